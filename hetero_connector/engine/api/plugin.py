"""vLLM's plugin entry point for routes (`vllm.endpoint_plugins`).

vLLM loads it only if `VLLM_PLUGINS` names it, in every API server. Routes under `/v1` are guarded
by `--api-key`; vLLM guards no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_connector.engine.api.engines import Engines
from hetero_connector.engine.plugin import extra_configs

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient


class HeteroRoutes:
    """Adds our routes to an API server."""

    name = "heterocache"
    required_tasks: Any = None
    """Any server is eligible, one for embeddings, too."""

    def attach_router(self, app: FastAPI) -> None:
        """Register the routes, take agents' session headers, and make spans if any are exported."""
        from hetero_connector.engine.api.live import make_live_router
        from hetero_connector.engine.api.routes import make_router
        from hetero_connector.engine.api.session_header import SessionHeader

        self._app = app
        app.include_router(make_router())
        app.include_router(make_live_router())
        app.add_middleware(SessionHeader)
        if getattr(app.state, "args", None) and app.state.args.otlp_traces_endpoint:
            from hetero_connector.engine.api.server_spans import ServerSpans

            app.add_middleware(ServerSpans)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Keep in `state` what the routes need. A server without engines has no client."""
        from hetero_connector.engine.api.command_routes import has_api_key
        from hetero_connector.engine.api.live import Dashboard, engine_feed

        stack = self._app.middleware_stack or self._app.build_middleware_stack()
        self._app.middleware_stack = Dashboard(stack)  # before vLLM's own, which is complete now
        state.heterocache_engines = state.heterocache_feed = None
        state.heterocache_has_key = has_api_key(args)
        if engine_client is not None and any(
            True for _ in extra_configs(engine_client.vllm_config.kv_transfer_config)
        ):
            state.heterocache_engines = Engines.of(engine_client.vllm_config)
            state.heterocache_feed = engine_feed(state.heterocache_engines)
