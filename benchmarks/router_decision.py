"""The time of a placement in the router: a body decoded, a worker chosen of 64, the view given."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque
from functools import partial

import msgspec

from benchmarks.known_stubs import chain_answer
from ownership.router.config import WorkerAddress
from ownership.router.doors import DOORS
from ownership.router.figures import WorkerFigures
from ownership.router.identity import ChainCache, PromptIdentity
from ownership.router.placer import Placed
from ownership.router.policy_placer import PolicyPlacer
from ownership.router.requests import Priority, RouterRequest
from ownership.router.view import (
    Certainty,
    FleetChains,
    PrefixViews,
    PromptView,
    PublishedChain,
    Trust,
)
from ownership.router.workers import WorkerSet, WorkerState
from ownership.scheduling import WorkerPrefix, scheduling_policy
from ownership.scheduling.registry import DEFAULT_POLICY

_PATH = "/v1/chat/completions"
_BODY = {"messages": [{"role": "user", "content": "x" * 2_000}], "stream": True}
_TOKENS = 60_000
_HOLDERS = 8
"""Workers that have parts of the prompt."""
_IN_FLIGHT = 200
_SESSIONS = 300


class _GivenViews(PrefixViews):
    """Views that are known before they are asked for."""

    view: PromptView

    async def find(self, path: str, body: object, now_s: float) -> PromptView:
        return self.view


def decision_us(workers: int = 64, repeats: int = 2_000) -> float:
    """Return the median microseconds of CPU time that `PolicyPlacer.place` takes.

    The candidates are looked for, and the ledger counts `_IN_FLIGHT` requests that come and go.
    """
    return 1e6 * statistics.median(asyncio.run(_samples(workers, repeats)))


async def _samples(count: int, repeats: int) -> list[float]:
    rng = random.Random(1)
    workers, fleet = WorkerSet(256), FleetChains()
    names = [f"stub-{number:03}" for number in range(count)]
    workers.set_addresses([WorkerAddress(name, f"http://{name}") for name in names])
    for worker in workers:
        worker.state = WorkerState.UP
        fleet.told(worker.name, [PublishedChain.of(chain_answer(worker.name, b""))], 0.0)
    views = _GivenViews(PromptIdentity(None, ChainCache()), fleet, Trust(), None)
    figures = WorkerFigures()
    placer = PolicyPlacer(scheduling_policy(DEFAULT_POLICY, rng), views, figures)
    placer.set_workers({x.name: x.address.role for x in workers}, time.monotonic())
    body, samples, open_requests = msgspec.json.encode(_BODY), [], deque[Placed]()
    for number in range(repeats):
        headers = [(b"x-session-id", b"%d" % (number % _SESSIONS))]
        request = RouterRequest(
            DOORS[_PATH], "POST", _PATH, headers, body, "", Priority.NORMAL, is_stream=True
        )
        views.view = PromptView(_TOKENS, _prefixes(rng, names), Certainty.EXACT)
        candidates = partial(workers.candidates, request, ())
        begun_s = time.thread_time()
        placed = await placer.place(request, candidates)
        samples.append(time.thread_time() - begun_s)
        assert isinstance(placed, Placed)
        placer.on_sent(placed, time.monotonic())
        open_requests.append(placed)
        if len(open_requests) > _IN_FLIGHT:
            ended, now_s = open_requests.popleft(), time.monotonic()
            placer.on_first_byte(ended, now_s)
            placer.on_ended(ended, 20, now_s)
    views.close()
    return samples[repeats // 4 :]


def _prefixes(rng: random.Random, names: list[str]) -> dict[str, WorkerPrefix]:
    """Return the prefixes of some workers, shorter and shorter."""
    holders = rng.sample(names, min(_HOLDERS, len(names)))
    most = _TOKENS - 2_000
    return {name: WorkerPrefix(0, most // at, most // at) for at, name in enumerate(holders, 1)}
