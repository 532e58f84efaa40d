"""The connector's part in a replica of Ray Serve LLM."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from examples.ray_serve.internals import (
    BaseConnectorBackend,
    KVConnectorBackendFactory,
    clamp_request_to_single_token,
)
from examples.ray_serve.parameters import own_configuration, replica_name
from ownership.router.handoffs import decode_parameters, prefill_parameters

CONNECTOR = "HeteroConnector"


def register_backend() -> None:
    """Tell the whole Ray cluster which backend our connector has. Idempotent."""
    if not KVConnectorBackendFactory.is_registered(CONNECTOR):
        path = f"{HeteroBackend.__module__}:{HeteroBackend.__qualname__}"
        KVConnectorBackendFactory.register_backend(CONNECTOR, path)


class HeteroBackend(BaseConnectorBackend):
    """Prepares one replica before its engine is made, and the two requests of each handoff.

    A prefill needs to know no decoder, because the directory knows what each replica has, and the
    decoder is told by the prefiller's answer at which token it may resume.
    """

    requires_peer_binding = False
    concurrent_handoff = False

    def setup(self) -> None:
        """Give this replica's engine a name, an address and an SSD directory of its own."""
        context = serve.get_replica_context()
        name = replica_name(context.app_name, context.deployment, context.rank.rank)
        key = "kv_connector_extra_config"
        self.kv_transfer_config[key] = own_configuration(
            self.kv_transfer_config.get(key) or {}, name, ray.util.get_node_ip_address()
        )

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """Return the request for the prefiller: one token, and what the client allows to store."""
        prefill = request.model_copy(deep=True)
        prefill.kv_transfer_params = prefill_parameters(request.kv_transfer_params)
        clamp_request_to_single_token(prefill)
        prefill.min_tokens = 0  # vLLM refuses more than max_tokens, which is 1 now
        prefill.n = 1
        return prefill

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any | None
    ) -> Any:
        """Return the request for the decoder, told where it may resume."""
        decode = request.model_copy(deep=True)
        answered = getattr(prefill_response, "kv_transfer_params", None)
        if answered:  # a prefiller that shares nothing says nothing
            decode.kv_transfer_params = decode_parameters(request.kv_transfer_params, answered)
        return decode
