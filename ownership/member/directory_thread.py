"""The directory beside the engine: a thread of its own, so that no step ever waits for it.

It keeps the lease, answers calls through futures, and publishes what the worker has sealed. The
directory may hang up to its deadline, be gone for hours or come back empty: calls fail in time,
sealed artifacts wait in a bounded queue, and after every new registration all that the worker
has is claimed again, a batch at a time between other calls.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.errors import (
    DirectoryError,
    DirectoryRefusedError,
    DirectoryUnavailableError,
    RecordError,
    StaleEpochError,
)
from hetero_connector.metrics import Recorder
from ownership.directory import ChainView, Claim, Directory, Grant, GrantOutcome
from ownership.directory.identifiers import Epoch
from ownership.member.lease_keeper import LeaseKeeper
from ownership.member.sweeping import Sweeper
from ownership.member.task_guard import Guard

T = TypeVar("T")
Job = Callable[[Directory, Epoch], T]
"""A call of the directory; the epoch is the worker's latest."""
Inventory = Callable[[], Iterator[Sequence[Claim]]]
"""Batches of all that the worker has sealed; made anew after each registration."""
Granted = Callable[[Epoch, Sequence[Claim], Sequence[Grant]], None]
"""Told what became of claims, on the directory's thread."""

CLAIMS_PER_CALL = 256
CALLS_PER_TURN = 3
"""Most that come between two times that the errands are run: two of a job, or claims and a sweep,
and then the lease's."""
CLAIMS_WAIT_S = 0.025
"""So long claims wait at most for calls, which come first."""
_SWEEPS_WAIT_S = 1.0
_PAUSE_S = 0.25
"""After a claim that failed: the directory is not asked in a loop."""
_CLOSE_TIMEOUT_S = 5.0
_CAUSES = (
    (StaleEpochError, "stale"),
    (DirectoryUnavailableError, "unavailable"),
    (DirectoryRefusedError, "refused"),
    (RecordError, "record"),
)

_log = logging.getLogger("vllm.heterocache")


@dataclass(frozen=True)
class _Call:
    job: Callable[[Directory, Epoch], Any]
    needs_epoch: bool
    until_s: float
    future: Future[Any] = field(default_factory=Future)


class DirectoryThread:
    """A `Directory` used from an engine. All methods return at once, but `close`."""

    def __init__(
        self,
        directory: Directory,
        keeper: LeaseKeeper,
        inventory: Inventory,
        granted: Granted,
        recorder: Recorder,
        *,
        errands: Callable[[], float] = lambda: math.inf,
        leaving: Callable[[], None] = lambda: None,
        swept: Callable[[int], None] = lambda _: None,
        num_workers: Callable[[], int] = lambda: 1,
        max_calls: int = 256,
        max_claims: int = 65_536,
        sweep_every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`errands`: called on the thread, in each turn; says in how many seconds it is due again.
        Jobs (`call`, `ask`) make two calls of the directory at most, see `CALLS_PER_TURN`.
        `leaving`: called on the thread right before the lease is ended. `swept`: told there how
        many records a sweep has forgotten. `num_workers`: who all sweep the directory.

        `max_calls`, `max_claims`: most that wait; more are refused. Call `start`.
        """
        self._directory = directory
        self._keeper = keeper
        self._inventory = inventory
        self._granted = granted
        self._recorder = recorder
        self._max_calls = max_calls
        self._max_claims = max_claims
        self._errands, self._leaving = errands, leaving
        self._sweeper = Sweeper(directory, num_workers, swept, sweep_every_s, clock)
        self._guard = Guard(recorder, clock)
        self._clock = clock
        self._wake = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._claims: deque[Claim] = deque()
        self._batches: Iterator[Sequence[Claim]] | None = None
        """What is left to claim again under a new epoch; None when all is."""
        self._claim_at_s = self._errands_at_s = self._claimed_s = clock()
        self._has_dropped = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    @property
    def takes_claims(self) -> bool:
        """Whether what is published now can be claimed soon: registered, and there is room."""
        with self._wake:
            return len(self._claims) < self._max_claims and self._is_joined()

    @property
    def num_claims(self) -> int:
        """Published ones that wait."""
        return len(self._claims)

    def take_dropped(self) -> bool:
        """Return whether claims were dropped since the last call, for too many waited."""
        has_dropped, self._has_dropped = self._has_dropped, False
        return has_dropped

    def start(self) -> None:
        """Begin to register."""
        self._thread.start()

    def lookup(self, chain: Sequence[ChunkKey], deadline_s: float) -> Future[ChainView]:
        """What is known of a chain. See `call`."""
        return self.ask(lambda directory, _: directory.lookup(chain), deadline_s)

    def ask(self, job: Job[T], deadline_s: float) -> Future[T]:
        """Run calls that change nothing, registered or not. See `call`."""
        return self._enqueue(job, False, deadline_s)

    def call(self, job: Job[T], deadline_s: float) -> Future[T]:
        """Run any call that needs an epoch; ask the future, never wait for it in a step.

        It fails with DirectoryUnavailableError when the worker is not registered, too many
        calls wait, or its turn does not come within `deadline_s`; else as the directory does.
        """
        return self._enqueue(job, True, deadline_s)

    def publish(self, claims: Sequence[Claim]) -> int:
        """Claim what was sealed, soon; how many were taken on. The rest stays local, counted."""
        with self._wake:
            room = 0 if self._is_closing else max(0, self._max_claims - len(self._claims))
            self._claims.extend(claims[:room])
            self._wake.notify()
        self._count_dropped(len(claims) - room)
        return min(len(claims), room)

    def close(self) -> None:
        """Fail what waits, end the lease, stop the thread. Idempotent; waits a few seconds."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def wake(self) -> None:
        """The errands have something to do. Returns at once."""
        with self._wake:
            self._errands_at_s = -math.inf
            self._wake.notify()

    def _enqueue(
        self, job: Callable[[Directory, Epoch], T], needs_epoch: bool, deadline_s: float
    ) -> Future[T]:
        call = _Call(job, needs_epoch, self._clock() + deadline_s)
        with self._wake:
            refusal = ""
            if self._is_closing:
                refusal = "the directory is closed"
            elif len(self._calls) >= self._max_calls:
                refusal = f"{self._max_calls} calls wait for the directory already"
            if refusal:
                call.future.set_exception(self._counted(DirectoryUnavailableError(refusal)))
            else:
                self._calls.append(call)
                self._wake.notify()
        return call.future

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._is_closing:
                    break
                idle_s = self._idle_s()
                if idle_s > 0.0:
                    self._wake.wait(idle_s)
            self._turn()
        self._end()

    def _turn(self) -> None:
        """What is due: the lease, the errands, then either a call, or claims and a sweep."""
        self._guard.run("lease", self._keep_lease)
        self._guard.run("errands", self._run_errands)
        call = None if self._is_owed() else self._next_call()
        if call is not None:
            self._answer(call)
        elif self._is_joined():
            if self._clock() >= self._claim_at_s:
                self._has_dropped |= not self._guard.run("claims", self._publish_batch)
            if self._clock() >= self._sweeper.due_s:
                self._guard.run("sweep", self._sweep)

    def _keep_lease(self) -> None:
        if self._keeper.keep() is not None:
            self._batches = self._inventory()

    def _run_errands(self) -> None:
        self._errands_at_s = math.inf
        due_in_s = _PAUSE_S
        try:
            due_in_s = self._errands()
        finally:
            with self._wake:  # it may have been woken meanwhile
                self._errands_at_s = min(self._errands_at_s, self._clock() + due_in_s)

    def _is_owed(self) -> bool:
        """Return whether claims or a sweep have waited for long enough, whatever calls wait."""
        if not self._is_joined():
            return False
        now_s = self._clock()
        has_claims = bool(self._claims) or self._batches is not None
        since_s = max(self._claimed_s + CLAIMS_WAIT_S, self._claim_at_s)
        return (has_claims and now_s >= self._guard.earliest_s("claims", since_s)) or (
            now_s >= self._guard.earliest_s("sweep", self._sweeper.due_s) + _SWEEPS_WAIT_S
        )

    def _is_joined(self) -> bool:
        lease = self._keeper.lease
        return lease is not None and lease.is_valid

    def _idle_s(self) -> float:
        """Seconds until there is something to do, if nothing new comes in."""
        if self._calls:
            return 0.0
        due_s = self._guard.earliest_s("lease", self._clock() + self._keeper.wait_s())
        if self._is_joined():
            due_s = min(due_s, self._guard.earliest_s("sweep", self._sweeper.due_s))
            if self._claims or self._batches is not None:
                due_s = min(due_s, self._guard.earliest_s("claims", self._claim_at_s))
        due_s = min(due_s, self._guard.earliest_s("errands", self._errands_at_s))
        return max(0.0, due_s - self._clock())

    def _next_call(self) -> _Call | None:
        with self._wake:
            return self._calls.popleft() if self._calls else None

    def _answer(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        lease = self._keeper.lease
        try:
            if self._clock() >= call.until_s:
                raise DirectoryUnavailableError("its turn did not come before the deadline")
            if call.needs_epoch and lease is None:
                raise DirectoryUnavailableError("the worker is not registered")
            answer = call.job(self._directory, Epoch(0) if lease is None else lease.epoch)
        except DirectoryError as error:
            call.future.set_exception(self._counted(error))
        except Exception as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(answer)

    def _publish_batch(self) -> None:
        """Claim what was sealed of late, else what a new epoch has to claim again."""
        lease = self._keeper.lease
        claims = self._next_claims()
        if not claims or lease is None:
            return
        try:
            grants = self._directory.claim_owner(lease.epoch, claims)
        except DirectoryError as error:
            self._counted(error)
            self._claim_at_s = self._clock() + _PAUSE_S
            self._put_back(claims)
            return
        finally:
            self._claimed_s = self._clock()
        for grant in grants:
            self._keeper.saw(grant.token)
        if any(grant.outcome is GrantOutcome.FULL for grant in grants):
            self._sweeper.found_full()
        self._granted(lease.epoch, claims, grants)

    def _next_claims(self) -> Sequence[Claim]:
        with self._wake:
            count = min(CLAIMS_PER_CALL, len(self._claims))
            if count:
                return [self._claims.popleft() for _ in range(count)]
        if self._batches is None:
            return ()
        claims = next(self._batches, None)
        if claims is None:
            self._batches = None
        return claims or ()

    def _put_back(self, claims: Sequence[Claim]) -> None:
        """They wait for the directory to come back, as far as there is room."""
        with self._wake:
            room = max(0, self._max_claims - len(self._claims))
            self._claims.extendleft(reversed(claims[:room]))
        self._count_dropped(len(claims) - room)

    def _count_dropped(self, count: int) -> None:
        if count > 0:
            self._has_dropped = True
            self._recorder.add("heterocache_directory_claims_discarded", count)

    def _sweep(self) -> None:
        try:
            self._sweeper.sweep()
        except DirectoryError as error:
            self._counted(error)

    def _counted(self, error: DirectoryError) -> DirectoryError:
        if isinstance(error, StaleEpochError):
            self._keeper.lost(Epoch(error.epoch))
        cause = next((name for kind, name in _CAUSES if isinstance(error, kind)), "error")
        self._recorder.add("heterocache_directory_failures", cause=cause)
        return error

    def _end(self) -> None:
        with self._wake:
            waiting, self._calls = self._calls, deque()
        for call in waiting:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(DirectoryUnavailableError("the directory is closed"))
        self._leaving()
        self._keeper.leave()
        self._directory.close()
