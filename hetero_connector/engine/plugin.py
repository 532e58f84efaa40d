"""vLLM's plugin entry point (`vllm.general_plugins`).

vLLM imports this in every process, also if the connector is not used. So it registers the path of
the class only, and observes the configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

CONNECTOR = "HeteroConnector"
_OBSERVED = "heterocache_observes"


def register() -> None:
    """Register `HeteroConnector` with vLLM's factory, and check its configuration early."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "hetero_connector.connector", CONNECTOR)
    _observe_configurations()


def _observe_configurations() -> None:
    """Check the connector's keys when vLLM makes its configuration. Idempotent.

    vLLM makes the connector after it has loaded the weights, which takes minutes, and then each
    worker's error lies between lines of traceback.
    """
    from vllm.config import VllmConfig

    kind: Any = VllmConfig
    if hasattr(kind, _OBSERVED):
        return
    setattr(kind, _OBSERVED, True)
    original = kind.__post_init__

    @functools.wraps(original)
    def check_and_init(self: Any) -> None:
        for keys in extra_configs(self.kv_transfer_config):
            from hetero_connector.config import HeteroConfig

            HeteroConfig.from_extra_config(keys)
        original(self)

    kind.__post_init__ = check_and_init


def extra_configs(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of each `HeteroConnector` that is configured, also in a `MultiConnector`."""
    if transfer is None:
        return
    own = transfer.kv_connector_extra_config
    if transfer.kv_connector == CONNECTOR:
        yield own
    elif transfer.kv_connector == "MultiConnector":
        for child in own.get("connectors", ()):
            if child.get("kv_connector") == CONNECTOR:
                yield child.get("kv_connector_extra_config", {})
