"""The workers: which there are, which may get requests, and what each has under way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ownership.directory.breaker import CircuitBreaker
from ownership.router.config import WorkerAddress
from ownership.router.requests import RouterRequest


class WorkerState(StrEnum):
    """The answer of a worker's probes."""

    UNKNOWN = "unknown"
    """Not probed yet."""
    UP = "up"
    DOWN = "down"


@dataclass(eq=False, slots=True)
class Exchange:
    """One request under way at a worker."""

    patience: asyncio.Timeout
    """Ends the wait for the worker when it is rescheduled to now."""
    sent_s: float
    """Monotonic time at which it was sent."""
    heard_s: float = -math.inf
    """Monotonic time at which the worker last sent something; minus infinity before."""


@dataclass(eq=False)
class Worker:
    """One worker. The router's processes each have their own view of it."""

    address: WorkerAddress
    state: WorkerState = WorkerState.UNKNOWN
    models: Mapping[str, Any] = field(default_factory=dict)
    """Its answer to `/v1/models`, by id."""
    exchanges: set[Exchange] = field(default_factory=set)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    """Opened by requests that were lost; one request after each pause tries again."""

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def in_flight(self) -> int:
        return len(self.exchanges)

    def has_model(self, model: str | None) -> bool:
        """Return True also if it has not told its models, or the request names none."""
        return model is None or not self.models or model in self.models

    def abandon_silent(self, since_s: float) -> None:
        """End the exchanges without a byte since then. Each is sent elsewhere, or its client is
        told."""
        now_s = asyncio.get_running_loop().time()
        for exchange in self.exchanges:
            if exchange.heard_s < since_s and exchange.patience.when() is None:
                exchange.patience.reschedule(now_s)


class WorkerSet:
    """All workers. `on_change` is called when one comes, goes, or changes its state."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._workers: dict[str, Worker] = {}
        self._left: dict[tuple[str, str], Worker] = {}
        """Workers that have left with requests under way, by name and URL."""
        self.on_change: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def set_addresses(self, addresses: Iterable[WorkerAddress]) -> None:
        """Make these the workers. Those that are missing end what they have begun.

        One that comes back before that end is the same worker, with its requests and its breaker,
        but is probed again before it gets new ones.
        """
        known = self._left | {(x.name, x.address.url): x for x in self}
        before, self._workers = set(self), {}
        for address in addresses:
            worker = known.pop((address.name, address.url), None) or Worker(address)
            if worker not in before:
                worker.state = WorkerState.UNKNOWN
            worker.address = address
            self._workers[address.name] = worker
        self._left = {key: worker for key, worker in known.items() if worker.exchanges}
        self.changed()

    def changed(self) -> None:
        """Tell that a worker's state has changed."""
        for listener in self.on_change:
            listener()

    def is_known(self, model: str) -> bool:
        """Return True if a worker has the model, or may have it."""
        workers = self._workers.values()
        return not workers or any(worker.has_model(model) for worker in workers)

    def usable(self, request: RouterRequest, tried: Container[object] = ()) -> list[Worker]:
        """Return the workers that could take the request now, or after others have ended."""
        up, model = WorkerState.UP, request.model  # to look up a member takes as long as the rest
        found = [
            worker
            for worker in self._workers.values()
            if worker.state is up
            and not worker.address.is_draining
            and (model is None or not worker.models or model in worker.models)
        ]
        return [worker for worker in found if worker not in tried] if tried else found

    def room(self, request: RouterRequest) -> int | None:
        """Return how many more requests like this the workers could take; None without any.

        If all of them pause after lost requests, it is one as soon as a pause has ended.
        """
        usable = self.usable(request, request.tried)
        if not usable:
            return None
        closed = [worker for worker in usable if not worker.breaker.is_open]
        if not closed:
            return int(any(worker.breaker.can_try for worker in usable))
        return sum(max(0, self._max_in_flight - worker.in_flight) for worker in closed)

    def candidates(self, request: RouterRequest, tried: Container[Worker]) -> list[Worker]:
        """Return the workers to choose from. If one's breaker wants to try again, it alone.

        With room if there are such.
        """
        usable, most = self.usable(request, tried), self._max_in_flight
        ready = [x for x in usable if len(x.exchanges) < most and not x.breaker.is_open]
        if len(ready) == len(usable):  # nearly always
            return ready
        closed = [worker for worker in usable if not worker.breaker.is_open]
        if len(closed) < len(usable):
            for worker in usable:
                if worker.breaker.is_open and worker.breaker.admit() == 0.0:
                    return [worker]
        return ready or closed
