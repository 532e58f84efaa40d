"""vLLM plugin entry point (`vllm.general_plugins`): makes the connector known by name.

Imported in every vLLM process, with or without the connector in use, so it only registers
a lazy path.
"""

from __future__ import annotations

CONNECTOR = "HeteroConnector"


def register() -> None:
    """Register `HeteroConnector` with vLLM's factory; called once per process by vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "hetero_connector.connector", CONNECTOR)
