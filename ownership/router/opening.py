"""Opens the placer that a configuration asks for, and keeps its knowledge of workers current."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from hetero_connector.errors import IdentityError, RouterConfigError
from ownership.directory.opening import open_directory
from ownership.router.config import LEAST_LOADED, RouterConfig
from ownership.router.decision_log import DecisionLog
from ownership.router.figures import WorkerFigures
from ownership.router.identity import ChainCache, PromptIdentity, open_tokenizer
from ownership.router.metrics import RouterMetrics
from ownership.router.peers import Peers
from ownership.router.placer import LeastLoaded, Placer
from ownership.router.policy_placer import PolicyPlacer
from ownership.router.reports import LoadReports
from ownership.router.view import (
    EventReader,
    FleetChains,
    FleetWatch,
    PrefixViews,
    StockWorkers,
    Trust,
)
from ownership.router.view.checks import Ask
from ownership.router.workers import Worker, WorkerSet, WorkerState
from ownership.scheduling.registry import scheduling_policy

_PERIOD_S = 5.0
"""Seconds between two questions to a worker: how it names chains, and what it has learned."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_placer(
    config: RouterConfig,
    workers: WorkerSet,
    session: aiohttp.ClientSession,
    metrics: RouterMetrics,
) -> AsyncIterator[Placer]:
    """Yield the placer of the configured policy. Raises RouterConfigError."""
    if config.policy_name == LEAST_LOADED:
        yield LeastLoaded()
        return
    async with AsyncExitStack() as stack:
        identity = await asyncio.to_thread(open_identity, config)
        directory = None
        if config.directory:
            directory = _checked("directory", partial(open_directory, config.directory))
            stack.callback(directory.close)
        events = EventReader()
        stack.callback(events.close)
        stock = StockWorkers(events.streams)
        views = PrefixViews(identity, FleetChains(), Trust(), directory, config.directory_s, stock)
        stack.callback(views.close)
        log = None
        if config.decisions is not None:
            log = _checked("decisions", partial(DecisionLog, config.decisions))
            stack.callback(log.close)
        figures = WorkerFigures()
        peers = None
        if config.directory.startswith("redis"):
            peers = await stack.enter_async_context(_open_peers(config.directory, metrics))
        policy = scheduling_policy(config.policy_name, Random())
        asked = _Asked(config, workers, session)
        watch = FleetWatch(views, asked.servers, events=events, host_of=asked.host_of)
        placer = PolicyPlacer(policy, views, figures, log, None, peers, watch.on_answer)
        reports = LoadReports(asked.servers, placer.on_report, config.probe_s)
        for work in (_keep_current(asked, watch, figures, placer), reports.run()):
            stack.callback(asyncio.get_running_loop().create_task(work).cancel)
        yield placer


@asynccontextmanager
async def _open_peers(url: str, metrics: RouterMetrics) -> AsyncIterator[Peers]:
    from ownership.directory.redis import RedisMessageLog  # needs the extra `redis`

    peers = Peers(RedisMessageLog(url), metrics)
    exchanging = asyncio.get_running_loop().create_task(peers.run())
    try:
        yield peers
    finally:
        exchanging.cancel()
        await asyncio.wait([exchanging])
        await peers.close()


def open_identity(config: RouterConfig) -> PromptIdentity:
    """Open the tokenizer of `model_path`, if there is one. Slow. Raises RouterConfigError."""
    tokenizer = None
    if config.model_path:
        tokenizer = _checked("model_path", partial(open_tokenizer, config.model_path))
    return PromptIdentity(tokenizer, ChainCache())


def _checked(key: str, opening: Any) -> Any:
    try:
        return opening()
    except (IdentityError, ValueError, OSError) as error:
        raise RouterConfigError("the router", [f"{key}: {error}"]) from error


class _Asked:
    """Questions to the workers that serve."""

    def __init__(
        self, config: RouterConfig, workers: WorkerSet, session: aiohttp.ClientSession
    ) -> None:
        self._session = session
        self.workers = workers
        key = config.worker_api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(config.probe_timeout_s)

    def servers(self) -> Mapping[str, Ask]:
        """Return how each worker that serves is asked, by its name."""
        up = [worker for worker in self.workers if worker.state is WorkerState.UP]
        return {worker.name: partial(self._ask, worker) for worker in up}

    def host_of(self, name: str) -> str:
        """Return a worker's host by its name."""
        urls = {worker.name: worker.address.url for worker in self.workers}
        return urlsplit(urls.get(name, "")).hostname or name

    async def _ask(
        self, worker: Worker, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Any:
        """Ask one worker. Raises OSError, or ValueError for an answer that is an error."""
        url = worker.address.url + path
        try:
            async with self._session.request(
                method, url, json=body, headers=self._headers, timeout=self._timeout
            ) as answer:
                answer.raise_for_status()
                text = await answer.read()
                is_json = answer.content_type == "application/json"
        except aiohttp.ClientResponseError as error:
            raise ValueError(f"{path}: status {error.status}") from error
        except aiohttp.ClientError as error:
            raise OSError(f"{path}: {error}") from error
        return msgspec.json.decode(text) if is_json else text.decode(errors="replace")


async def _keep_current(
    asked: _Asked, watch: FleetWatch, figures: WorkerFigures, placer: PolicyPlacer
) -> None:
    """Ask all workers in each period, and when one comes or goes."""
    changed = asyncio.Event()
    asked.workers.on_change.append(changed.set)
    while True:
        changed.clear()
        try:
            await watch.ask_all()
            await figures.ask_all(asked.servers())
            roles = {x.name: x.address.role for x in asked.workers}
            placer.set_workers(roles, time.monotonic())
        except Exception:  # an answer of an unknown kind ends no worker's questions
            _log.exception("the workers' figures are not current")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _PERIOD_S)
