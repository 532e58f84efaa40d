"""Admission: requests beyond the workers' bounds wait in fair queues, and not for ever."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from ownership.router.doors import Reason, Refusal
from ownership.router.requests import Priority, RefusedError, RouterRequest

WEIGHTS = {Priority.HIGH: 16.0, Priority.NORMAL: 4.0, Priority.LOW: 1.0}
"""Shares of the classes while all of them wait."""
_LOOK_S = 0.1
"""While requests wait, workers are looked at so often: the end of a worker's pause is no event."""
_Key = TypeVar("_Key")


class _Waiter:
    """One waiting request."""

    def __init__(self, request: RouterRequest) -> None:
        self.request = request
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Turns(Generic[_Key]):
    """Start-time fair queueing: each key has a time that advances by 1/weight with each of its
    turns, and the key with the least time is next."""

    def __init__(self) -> None:
        self._times: dict[_Key, float] = {}
        self._now = 0.0

    def join(self, key: _Key, weight: float = 1.0) -> None:
        self._times[key] = self._now + 1.0 / weight

    def leave(self, key: _Key) -> None:
        del self._times[key]

    def order(self) -> list[_Key]:
        """Return the keys, the next one first; among equals the one that came first."""
        return sorted(self._times, key=self._times.__getitem__)

    def take(self, key: _Key, weight: float = 1.0) -> None:
        """Count a turn of the key."""
        self._now = max(self._now, self._times[key])
        self._times[key] += 1.0 / weight


class _Class:
    """The waiting requests of one class, by caller."""

    def __init__(self) -> None:
        self.flows: dict[str, deque[_Waiter]] = {}
        self.turns = _Turns[str]()


class _ClassQueue:
    """Waiting requests: the classes take turns by weight, and the callers of a class by turns.

    So a class gets its share while it has requests, from however many callers, and a caller that
    sends a thousand does not delay another one's of its class.
    """

    def __init__(self) -> None:
        self._classes: dict[Priority, _Class] = {}
        self._turns = _Turns[Priority]()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, waiter: _Waiter) -> None:
        priority, caller = waiter.request.priority, waiter.request.caller
        if priority not in self._classes:
            self._classes[priority] = _Class()
            self._turns.join(priority, WEIGHTS[priority])
        found = self._classes[priority]
        if caller not in found.flows:
            found.flows[caller] = deque()
            found.turns.join(caller)
        found.flows[caller].append(waiter)
        self._size += 1

    def first(self, runs: Callable[[RouterRequest], bool]) -> _Waiter | None:
        """Return the first request that runs, of the first class and caller that have one."""
        for priority in self._turns.order():
            found = self._classes[priority]
            for caller in found.turns.order():
                waiter = next((x for x in found.flows[caller] if runs(x.request)), None)
                if waiter is not None:
                    return waiter
        return None

    def take(self, waiter: _Waiter) -> None:
        """Remove a request, and count a turn of its class and of its caller."""
        priority = waiter.request.priority
        self._turns.take(priority, WEIGHTS[priority])
        self._classes[priority].turns.take(waiter.request.caller)
        self.remove(waiter)

    def remove(self, waiter: _Waiter) -> None:
        priority, caller = waiter.request.priority, waiter.request.caller
        found = self._classes[priority]
        found.flows[caller].remove(waiter)
        self._size -= 1
        if not found.flows[caller]:
            del found.flows[caller]
            found.turns.leave(caller)
        if not found.flows:
            del self._classes[priority]
            self._turns.leave(priority)


class FairQueue:
    """The waiting requests of all models. Shares are kept for each model.

    A class's turns at one model's workers must not count against it at another's. The turns over
    all requests say which model is next: models may have the same workers.
    """

    def __init__(self) -> None:
        self._all = _ClassQueue()
        self._models: dict[str | None, _ClassQueue] = {}

    def __len__(self) -> int:
        return len(self._all)

    def push(self, waiter: _Waiter) -> None:
        self._all.push(waiter)
        self._models.setdefault(waiter.request.model, _ClassQueue()).push(waiter)

    def pop(self, can_run: Callable[[RouterRequest], bool]) -> _Waiter | None:
        """Take the next request that can run.

        One that cannot run, for a model whose workers are full, say, holds up none behind it.
        """
        known: dict[str | None, bool] = {}

        def runs(request: RouterRequest) -> bool:
            if request.tried:  # it may not go to every worker of its model
                return can_run(request)
            if request.model not in known:
                known[request.model] = can_run(request)
            return known[request.model]

        found = self._all.first(runs)
        if found is None:
            return None
        model = found.request.model
        waiter = self._models[model].first(runs)
        assert waiter is not None  # `found`, if no other
        self._all.take(waiter)
        self._models[model].take(waiter)
        self._forget_empty(model)
        return waiter

    def remove(self, waiter: _Waiter) -> None:
        model = waiter.request.model
        self._all.remove(waiter)
        self._models[model].remove(waiter)
        self._forget_empty(model)

    def _forget_empty(self, model: str | None) -> None:
        if not self._models[model]:
            del self._models[model]


class Admission:
    """Lets a request through when a worker has room for it. Belongs to one event loop."""

    def __init__(
        self,
        room: Callable[[RouterRequest], int | None],
        max_queued: int,
        queue_s: float,
        on_queued: Callable[[int], object] = lambda count: None,
    ) -> None:
        """`room`: requests that the workers for this one could still take; None: no worker.
        `on_queued`: called with how many wait, when that has changed.
        """
        self._room, self._on_queued = room, on_queued
        self._max_queued = max_queued
        self._queue_s = queue_s
        self._queue = FairQueue()
        self._placing = 0
        self._look: asyncio.TimerHandle | None = None
        """The next look at workers; None if none waits."""
        self._intervals_s: deque[float] = deque(maxlen=64)
        """Between two ends while requests waited: at other times they tell how much was asked."""
        self._last_end_s = math.nan
        """Not a number before the first end since requests wait."""

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def enter(self, request: RouterRequest) -> None:
        """Wait for room. Call `placed` when the request is about to count at a worker, or will
        not.

        Raises RefusedError if too many wait, or this one has waited too long.
        """
        if not self._queue and self._can_run(request):
            self._placing += 1
            return
        if len(self._queue) >= self._max_queued and not self._can_run(request):
            text = f"{self.queued} requests wait already"
            raise self._refused(Reason.QUEUE_FULL, text)
        if not self._queue:
            self._last_end_s = math.nan
        waiter = _Waiter(request)
        self._queue.push(waiter)
        self._on_queued(self.queued)
        self.admit()
        try:
            async with asyncio.timeout(self._queue_s):
                await asyncio.shield(waiter.admitted)
        except BaseException as error:
            if not waiter.admitted.done():
                self._queue.remove(waiter)
                self._on_queued(self.queued)
            else:
                self.placed(counts=False)
            if isinstance(error, TimeoutError):
                text = f"no worker had room within {self._queue_s:g} s"
                raise self._refused(Reason.QUEUE_TIMEOUT, text) from None
            raise

    def placed(self, *, counts: bool) -> None:
        """The request counts at its worker, at the latest before the event loop goes on; or it
        needs no room after all, and another one gets it."""
        self._placing -= 1
        if not counts:
            self.admit()

    def left(self) -> None:
        """A request has ended, so there may be room."""
        now_s = monotonic()
        if self._queue and not math.isnan(self._last_end_s):
            self._intervals_s.append(now_s - self._last_end_s)
        self._last_end_s = now_s
        self.admit()

    def admit(self) -> None:
        """Let through those who can run. Also called when workers come or go."""
        while self._queue and (waiter := self._queue.pop(self._can_run)):
            self._placing += 1
            self._on_queued(self.queued)
            waiter.admitted.set_result(None)
        if self._queue and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.admit()

    def _can_run(self, request: RouterRequest) -> bool:
        """Return True also if there is no worker at all, which is refused at once."""
        room = self._room(request)
        return room is None or room > self._placing

    def _refused(self, reason: Reason, text: str) -> RefusedError:
        return RefusedError(Refusal(reason, text, self.retry_after_s))

    @property
    def retry_after_s(self) -> int:
        """Seconds until the queue is likely to be served, from the pace of the last requests."""
        if not self._intervals_s:
            return 1
        mean_s = sum(self._intervals_s) / len(self._intervals_s)
        return max(1, min(60, math.ceil(mean_s * self.queued)))
