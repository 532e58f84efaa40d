"""The router as a Starlette application: workers, probes and the proxy, started and ended here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from ownership.router.answer import refusal_response
from ownership.router.config import RouterConfig
from ownership.router.discovery import Discovery
from ownership.router.fleet_page import FleetDoors, FleetState
from ownership.router.history import History
from ownership.router.metrics import RouterMetrics
from ownership.router.opening import open_placer
from ownership.router.placer import Placer
from ownership.router.probes import Prober
from ownership.router.proxy import Proxy
from ownership.router.questions import WorkerQuestions
from ownership.router.requests import NO_KEY, has_key
from ownership.router.reservations import Reservations
from ownership.router.selection import SelectionDoors
from ownership.router.siblings import Siblings
from ownership.router.spans import RouterSpans
from ownership.router.stored import StoredStates
from ownership.router.workers import WorkerSet, WorkerState

_KEEP_ALIVE_S = 4.0
"""Idle connections to workers are closed before vLLM's server closes them, after 5 s."""
_CONNECT_S = 5.0


def make_app(
    config: RouterConfig, placer: Placer | None = None, siblings: Siblings | None = None
) -> Starlette:
    """Return the application, with its `state.metrics`. Set `state.server` before it starts.

    `placer`: None for that of the configured policy. `siblings`: None if there are none.
    """
    router = _Router(config, placer, siblings)
    routes = [
        Route("/health", router.health),
        Route("/ready", router.ready),
        Route("/metrics", router.show_metrics),
        Route("/v1/models", router.models),
        Mount("/", router.proxy),
    ]
    app = Starlette(routes=routes, lifespan=router.lifespan)
    app.state.metrics = router.metrics
    return app


class _Router:
    """The parts of one process."""

    def __init__(
        self, config: RouterConfig, placer: Placer | None, siblings: Siblings | None
    ) -> None:
        self._config, self._placer, self._siblings = config, placer, siblings
        self._workers = WorkerSet(config.max_in_flight)
        self.metrics = RouterMetrics()
        self._proxy: Proxy | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(_session(self._config))
            prober = Prober(self._workers, session, self._config)
            stack.push_async_callback(prober.close)
            questions = WorkerQuestions(self._config, self._workers, session)
            chosen = self._placer
            if chosen is None:
                opening = open_placer(self._config, questions, self.metrics, self._siblings)
                chosen = await stack.enter_async_context(opening)
            placer = History(chosen)
            spans = RouterSpans(self._config.otlp_traces_endpoint)
            stack.push_async_callback(asyncio.to_thread, spans.close)
            self._proxy = Proxy(self._config, self._workers, placer, session, self.metrics, spans)
            reservations = Reservations(self._proxy, placer, self._config.lease_s)
            stack.callback(reservations.close)
            doors = SelectionDoors(self._config, self._workers, reservations, self.metrics)
            app.routes[:0] = doors.routes
            stored = StoredStates(questions.servers)
            stack.callback(stored.close)
            app.routes[:0] = FleetDoors(self._fleet(self._proxy, placer), stored).routes
            self._workers.on_change += [prober.follow, self._show_workers]
            discovery = Discovery(self._config, self._workers, session)
            await discovery.look()
            looking = asyncio.get_running_loop().create_task(discovery.run())
            stack.callback(looking.cancel)
            if self._config.ext_proc_port is not None:
                from ownership.router.ext_proc import Addresses, Parts, endpoint_picker

                addresses = Addresses(self._config.probe_s)
                used = self._workers, self._proxy, placer, self.metrics, spans
                parts = Parts(self._config, *used, addresses)
                picker = endpoint_picker(
                    parts,
                    self._config.ext_proc_port,
                    lambda: self._is_ready() and not app.state.server.should_exit,
                    app.state.server.grace_s,
                )
                app.state.ext_proc_port = await stack.enter_async_context(picker)
            yield

    async def proxy(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._proxy is not None
        if scope["type"] == "http":
            await self._proxy(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def health(self, request: Request) -> Response:
        """Answer 200 as long as this process serves."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """Answer 200 if a worker serves, else 503."""
        states = {worker.name: worker.state for worker in self._workers}
        body = msgspec.json.encode({"workers": states})
        return Response(body, 200 if self._is_ready() else 503, media_type="application/json")

    def _is_ready(self) -> bool:
        return any(worker.state is WorkerState.UP for worker in self._workers)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """Answer with the models of all workers that serve."""
        if not has_key(dict(request.headers.raw), self._config):
            return refusal_response(NO_KEY, self.metrics)
        found: dict[str, Any] = {}
        for worker in self._workers:
            if worker.state is WorkerState.UP:
                found.update(worker.models)
        body = msgspec.json.encode({"object": "list", "data": list(found.values())})
        return Response(body, media_type="application/json")

    def _fleet(self, proxy: Proxy, history: History) -> FleetState:
        return FleetState(
            self._config,
            1 if self._siblings is None else self._siblings.num_processes,
            time.time(),
            self._workers,
            proxy,
            history,
            self.metrics,
        )

    def _show_workers(self) -> None:
        self.metrics.show_workers({x.name: x.state is WorkerState.UP for x in self._workers})


def _session(config: RouterConfig) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_S, sock_read=config.silent_s
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=65536,
        max_field_size=65536,
    )
