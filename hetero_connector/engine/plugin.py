"""vLLM's plugin entry point (`vllm.general_plugins`): register the connector's name.

vLLM imports this in every process, also if the connector is not used. So it only registers the path
of the class.
"""

from __future__ import annotations

CONNECTOR = "HeteroConnector"


def register() -> None:
    """Register `HeteroConnector` with vLLM's factory."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "hetero_connector.connector", CONNECTOR)
