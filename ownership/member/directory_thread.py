"""The thread that makes every call to the directory, so that no step of the engine waits for one.

It keeps the lease, answers calls through futures, and claims what the worker has sealed. The
directory may hang up to its deadline, be down for hours or come back empty. Calls then fail in
time, claims wait in a bounded queue, and after each new registration everything the worker has is
claimed again, a batch at a time between other calls.
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

from hetero_connector.errors import (
    DirectoryError,
    DirectoryRefusedError,
    DirectoryUnavailableError,
    RecordError,
    StaleEpochError,
)
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Directory, Grant, GrantOutcome
from ownership.directory.identifiers import NO_EPOCH, Epoch
from ownership.member.lease_keeper import LeaseKeeper
from ownership.member.sweeping import Sweeper

T = TypeVar("T")
Job = Callable[[Directory, Epoch], T]
"""Calls of the directory, two at most. The epoch is the worker's latest."""
ClaimBatches = Iterator[Sequence[Claim]]

CLAIMS_PER_CALL = 256
CALLS_PER_TURN = 3
"""Most directory calls between two runs of the periodic tasks: two of a job (or claims and a
sweep), then one for the lease."""
CLAIMS_WAIT_S = 0.025
"""Longest that claims wait for jobs, which go first."""
_SWEEPS_WAIT_S = 1.0
_PAUSE_S = 0.25
"""Pause after a claim that failed, so that the directory is not asked in a loop."""
_TASK_PAUSE_S = 0.25
"""Pause of a task after it has failed."""
_CLOSE_TIMEOUT_S = 5.0
_CAUSES = (
    (StaleEpochError, "stale"),
    (DirectoryUnavailableError, "unavailable"),
    (DirectoryRefusedError, "refused"),
    (RecordError, "record"),
)

_log = logging.getLogger("vllm.heterocache")


@dataclass(frozen=True)
class ThreadHooks:
    """The worker's work on the directory's thread."""

    start_epoch: Callable[[], ClaimBatches]
    """Called after each registration: returns batches of claims for all that the worker has."""
    on_granted: Callable[[Epoch, Sequence[Claim], Sequence[Grant]], None]
    """Called with the answers to claims."""
    run_periodic: Callable[[], float] = lambda: math.inf
    """Run the worker's periodic tasks; returns the seconds until it is due again. Called in each
    turn."""
    before_leaving: Callable[[], None] = lambda: None
    """Called right before the lease is ended."""
    on_swept: Callable[[int], None] = lambda _: None
    """Called after a sweep with the number of records it forgot."""
    num_workers: Callable[[], int] = lambda: 1
    """Returns the number of workers that sweep the directory."""


@dataclass(frozen=True)
class _Call:
    job: Callable[[Directory, Epoch], Any]
    needs_epoch: bool
    until_s: float
    future: Future[Any] = field(default_factory=Future)


class DirectoryThread:
    """A `Directory` used from an engine. All methods except `close` return at once."""

    def __init__(
        self,
        directory: Directory,
        keeper: LeaseKeeper,
        hooks: ThreadHooks,
        recorder: Recorder,
        *,
        max_calls: int = 256,
        max_claims: int = 65_536,
        sweep_every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_calls`, `max_claims`: most that may wait; more are refused. Then call `start`."""
        self._directory = directory
        self._keeper = keeper
        self._hooks = hooks
        self._recorder = recorder
        self._max_calls = max_calls
        self._max_claims = max_claims
        self._sweeper = Sweeper(directory, hooks.num_workers, hooks.on_swept, sweep_every_s, clock)
        self._guard = TaskGuard(recorder, clock)
        self._clock = clock
        self._wake = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._claims: deque[Claim] = deque()
        self._batches: ClaimBatches | None = None
        """Claims that a new epoch has still to repeat; None when there are none left."""
        self._claim_at_s = self._periodic_at_s = self._claimed_s = clock()
        self._has_dropped = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    @property
    def accepts_claims(self) -> bool:
        """True if new claims can be made soon: the worker is registered, and the queue has room."""
        with self._wake:
            return len(self._claims) < self._max_claims and self._is_registered()

    @property
    def num_claims(self) -> int:
        """Claims that wait."""
        return len(self._claims)

    @property
    def is_idle(self) -> bool:
        """True if no claim waits, those that a new epoch repeats among them."""
        return not self._claims and self._batches is None

    def take_dropped(self) -> bool:
        """Return True if claims were dropped since the last call because too many waited."""
        has_dropped, self._has_dropped = self._has_dropped, False
        return has_dropped

    def start(self) -> None:
        """Start the thread, which registers the worker."""
        self._thread.start()

    def ask(self, job: Job[T], deadline_s: float) -> Future[T]:
        """Run a job that changes nothing, whether the worker is registered or not. See `call`."""
        return self._enqueue(job, False, deadline_s)

    def call(self, job: Job[T], deadline_s: float) -> Future[T]:
        """Run a job that needs an epoch. Poll the future; never wait for it in a step.

        It fails with DirectoryUnavailableError if the worker is not registered, too many calls
        wait, or the job does not start within `deadline_s`; else as the directory's calls do.
        """
        return self._enqueue(job, True, deadline_s)

    def publish(self, claims: Sequence[Claim]) -> int:
        """Queue claims; return how many the queue took. The others stay local, and are counted."""
        with self._wake:
            room = 0 if self._is_closing else max(0, self._max_claims - len(self._claims))
            self._claims.extend(claims[:room])
            self._wake.notify()
        self._count_dropped(len(claims) - room)
        return min(len(claims), room)

    def close(self) -> None:
        """Fail waiting calls, end the lease, stop the thread: a few seconds at most. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def wake(self) -> None:
        """Run the periodic tasks soon. Returns at once."""
        with self._wake:
            self._periodic_at_s = -math.inf
            self._wake.notify()

    def idle_s(self) -> float:
        """Return the seconds until something is due, unless new work comes in."""
        if self._calls:
            return 0.0
        due_s = self._guard.earliest_s("lease", self._clock() + self._keeper.wait_s())
        if self._is_registered():
            due_s = min(due_s, self._guard.earliest_s("sweep", self._sweeper.due_s))
            if not self.is_idle:
                due_s = min(due_s, self._guard.earliest_s("claims", self._claim_at_s))
        due_s = min(due_s, self._guard.earliest_s("periodic", self._periodic_at_s))
        return max(0.0, due_s - self._clock())

    def run_turn(self) -> None:
        """Do what is due: the lease, the periodic tasks, then a call, or claims and a sweep."""
        self._guard.run("lease", self._keep_lease)
        self._guard.run("periodic", self._run_periodic)
        call = None if self._has_overdue_work() else self._next_call()
        if call is not None:
            self._answer(call)
        elif self._is_registered():
            if self._clock() >= self._claim_at_s:
                self._has_dropped |= not self._guard.run("claims", self._claim_batch)
            if self._clock() >= self._sweeper.due_s:
                self._guard.run("sweep", self._sweep)

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
                call.future.set_exception(self._count(DirectoryUnavailableError(refusal)))
            else:
                self._calls.append(call)
                self._wake.notify()
        return call.future

    def _run(self) -> None:
        while True:
            with self._wake:
                if self._is_closing:
                    break
                idle_s = self.idle_s()
                if idle_s > 0.0:
                    self._wake.wait(idle_s)
            self.run_turn()
        self._leave()

    def _keep_lease(self) -> None:
        if self._keeper.run_due() is not None:
            self._batches = self._hooks.start_epoch()

    def _run_periodic(self) -> None:
        self._periodic_at_s = math.inf
        due_in_s = _PAUSE_S
        try:
            due_in_s = self._hooks.run_periodic()
        finally:
            with self._wake:  # `wake` may have been called meanwhile
                self._periodic_at_s = min(self._periodic_at_s, self._clock() + due_in_s)

    def _has_overdue_work(self) -> bool:
        """Return True if claims or a sweep have waited so long that they go before calls."""
        if not self._is_registered():
            return False
        now_s = self._clock()
        since_s = max(self._claimed_s + CLAIMS_WAIT_S, self._claim_at_s)
        return (not self.is_idle and now_s >= self._guard.earliest_s("claims", since_s)) or (
            now_s >= self._guard.earliest_s("sweep", self._sweeper.due_s) + _SWEEPS_WAIT_S
        )

    def _is_registered(self) -> bool:
        lease = self._keeper.lease
        return lease is not None and lease.is_valid

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
            answer = call.job(self._directory, NO_EPOCH if lease is None else lease.epoch)
        except DirectoryError as error:
            call.future.set_exception(self._count(error))
        except Exception as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(answer)

    def _claim_batch(self) -> None:
        """Claim what was sealed last, else what a new epoch has to claim again."""
        lease = self._keeper.lease
        claims = self._next_claims()
        if not claims or lease is None:
            return
        try:
            grants = self._directory.claim_owner(lease.epoch, claims)
        except DirectoryError as error:
            self._count(error)
            self._claim_at_s = self._clock() + _PAUSE_S
            self._put_back(claims)
            return
        finally:
            self._claimed_s = self._clock()
        for grant in grants:
            self._keeper.note_number(grant.token)
        if any(grant.outcome is GrantOutcome.FULL for grant in grants):
            self._sweeper.on_full()
        self._hooks.on_granted(lease.epoch, claims, grants)

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
        """Queue claims again that were not answered, as far as there is room."""
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
            self._count(error)

    def _count(self, error: DirectoryError) -> DirectoryError:
        """Count a failure, and give up an epoch that is stale. Return the error."""
        if isinstance(error, StaleEpochError):
            self._keeper.on_stale(error)
        cause = next((name for kind, name in _CAUSES if isinstance(error, kind)), "error")
        self._recorder.add("heterocache_directory_failures", cause=cause)
        return error

    def _leave(self) -> None:
        with self._wake:
            waiting, self._calls = self._calls, deque()
        for call in waiting:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(DirectoryUnavailableError("the directory is closed"))
        self._hooks.before_leaving()
        self._keeper.leave()
        self._directory.close()


class TaskGuard:
    """Runs a thread's tasks, so that a bug in one neither ends the others nor is retried in a loop.

    A task that raises is paused and counted, and logged once per cause.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._paused_until_s: dict[str, float] = {}
        self._logged: set[tuple[str, type[Exception], int]] = set()
        """Task, error and line of each failure that was logged."""

    def run(self, task: str, action: Callable[[], None]) -> bool:
        """Run the task unless it is paused. Return False if it failed."""
        if self._clock() < self.earliest_s(task, -math.inf):
            return True
        try:
            action()
        except Exception as error:
            self._paused_until_s[task] = self._clock() + _TASK_PAUSE_S
            self._recorder.add("heterocache_directory_failures", cause="internal")
            self._log_once(task, error)
            return False
        return True

    def earliest_s(self, task: str, due_s: float) -> float:
        """Return the earliest time at which a task that is due at `due_s` can run."""
        return max(due_s, self._paused_until_s.get(task, -math.inf))

    def _log_once(self, task: str, error: Exception) -> None:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        cause = (task, type(error), 0 if at is None else at.tb_lineno)
        if cause not in self._logged:
            self._logged.add(cause)
            _log.error("the directory's thread continues after an error (%s)", task, exc_info=error)
