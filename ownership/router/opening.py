"""Opens the placer that a configuration asks for, and keeps its knowledge of workers current."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from typing import Any

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
from ownership.router.questions import Questions
from ownership.router.reports import LoadReports
from ownership.router.siblings import Siblings
from ownership.router.view import (
    EventReader,
    FleetChains,
    FleetWatch,
    PrefixViews,
    StockWorkers,
    Trust,
)
from ownership.scheduling.registry import scheduling_policy

_PERIOD_S = 5.0
"""Seconds between two questions to a worker: how it names chains, and what it has learned."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_placer(
    config: RouterConfig,
    questions: Questions,
    metrics: RouterMetrics,
    siblings: Siblings | None = None,
) -> AsyncIterator[Placer]:
    """Yield the placer of the configured policy. Raises RouterConfigError.

    `siblings`: None if this router has one process.
    """
    if config.policy_name == LEAST_LOADED:
        yield LeastLoaded()
        return
    async with AsyncExitStack() as stack:
        chains = ChainCache()
        if siblings is not None:
            chains = ChainCache(seed=siblings.seed, on_named=siblings.tell)
            stack.enter_context(siblings.listening(chains.take_in))
        identity = await asyncio.to_thread(open_identity, config, chains)
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
            log = _checked(
                "decisions", partial(DecisionLog, config.decisions, metrics.decisions_lost.inc)
            )
            stack.callback(log.close)
        figures = WorkerFigures()
        peers = None
        if config.directory.startswith("redis"):
            peers = await stack.enter_async_context(_open_peers(config.directory, metrics))
        policy = scheduling_policy(config.policy_name, Random())
        watch = FleetWatch(views, questions.servers, events=events, host_of=questions.host_of)
        placer = PolicyPlacer(policy, views, figures, log, peers, watch.on_answer)
        reports = LoadReports(questions.servers, placer.on_report, config.probe_s)
        for work in (_keep_current(questions, watch, figures, placer), reports.run()):
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


def open_identity(config: RouterConfig, chains: ChainCache | None = None) -> PromptIdentity:
    """Open the tokenizer of `model_path`, if there is one. Slow. Raises RouterConfigError."""
    tokenizer = None
    if config.model_path:
        tokenizer = _checked("model_path", partial(open_tokenizer, config.model_path))
    return PromptIdentity(
        tokenizer,
        chains or ChainCache(),
        chat_template=config.chat_template or None,
        template_kwargs=config.chat_template_kwargs,
    )


def _checked(key: str, opening: Any) -> Any:
    try:
        return opening()
    except (IdentityError, ValueError, OSError) as error:
        raise RouterConfigError("the router", [f"{key}: {error}"]) from error


async def _keep_current(
    questions: Questions, watch: FleetWatch, figures: WorkerFigures, placer: PolicyPlacer
) -> None:
    """Ask all workers in each period, and when one comes or goes."""
    changed = asyncio.Event()
    questions.workers.on_change.append(changed.set)
    while True:
        changed.clear()
        try:
            await watch.ask_all()
            await figures.ask_all(questions.servers())
            roles = {x.name: x.address.role for x in questions.workers}
            placer.set_workers(roles, time.monotonic())
        except Exception:  # an answer of an unknown kind ends no worker's questions
            _log.exception("the workers' figures are not current")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), _PERIOD_S)
