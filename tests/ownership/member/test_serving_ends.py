"""A worker stops serving before its lease ends, even if its directory calls hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Directory, Grant, Worker
from ownership.directory.identifiers import NO_EPOCH, Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.member.directory_thread import DirectoryThread
from ownership.member.fleet_worker import FleetWorker, MemberTimes
from ownership.member.held_lease import MARGIN
from tests.clock import Clock
from tests.ownership.member.members import ListedStore, change
from tests.waiting import until

LEASE_S, CALL_S = 10.0, 1.0
STEP_S = 0.05


class LeaseClock(Clock):
    """The clock of worker and directory, which also knows the end of the lease."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.lease_ends_s = 0.0
        self.store = ListedStore()
        self.served_too_long_s = 0.0

    def passes(self, seconds: float) -> None:
        super().passes(seconds)
        if self.store.epochs and self.store.epochs[-1] != NO_EPOCH:
            over_s = self.now_s - self.lease_ends_s
            self.served_too_long_s = max(self.served_too_long_s, over_s)


class HangingDirectory(MemoryDirectory):
    """Each call takes its longest time, and renewals fail."""

    def __init__(self, clock: LeaseClock) -> None:
        super().__init__(clock)
        self.clock = clock

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Any:
        if self.clock.lease_ends_s:
            raise DirectoryUnavailableError("gone")
        self.clock.lease_ends_s = self.clock.now_s + lease_s * (1.0 - MARGIN)
        return super().register(worker, lease_s, floor)

    def renew_lease(self, epoch: Epoch) -> str:
        self.clock.passes(CALL_S)
        raise DirectoryUnavailableError("late")

    def workers(self) -> Mapping[Epoch, Worker]:
        self.clock.passes(CALL_S)
        return super().workers()

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        self.clock.passes(CALL_S)
        return super().claim_owner(epoch, claims)

    def sweep(self, limit: int) -> int:
        self.clock.passes(CALL_S)
        return super().sweep(limit)


def two_calls(directory: Directory, _: Epoch) -> None:
    directory.workers()
    directory.workers()


def served_too_long_s(at_s: float, what: str) -> float:
    """Return how long a worker that is kept busy from `at_s` on serves after its lease."""
    clock = LeaseClock()
    worker = FleetWorker(
        HangingDirectory(clock), "ann", MemberTimes(LEASE_S, CALL_S), Recorder(), clock
    )
    thread = worker._thread
    worker.start(clock.store)
    begins_s, is_busy = clock.now_s + at_s, False
    while clock.now_s < begins_s + LEASE_S:
        if not is_busy and clock.now_s >= begins_s:
            is_busy = True
            if what == "a job":
                thread.call(two_calls, LEASE_S)
            else:
                thread._sweeper.due_s = clock.now_s
                clock.store.put(change(1))
                worker.wake()
        if thread.idle_s() == 0.0:
            thread.run_turn()
        else:
            clock.passes(STEP_S)
    assert clock.store.epochs[0] != NO_EPOCH
    assert clock.store.epochs[-1] == NO_EPOCH
    return clock.served_too_long_s


@pytest.mark.parametrize("what", ["a job", "claims and a sweep"])
def test_serving_ends_before_another_worker_may_take_over(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryThread, "start", lambda _: None)
    starts = [STEP_S * n for n in range(round(LEASE_S / STEP_S))]
    assert max(served_too_long_s(at_s, what) for at_s in starts) <= 0.0


def test_a_worker_that_leaves_stops_serving_before_it_ends_its_lease() -> None:
    store, served = ListedStore(), list[int]()

    class Watched(MemoryDirectory):
        def end_lease(self, epoch: Epoch) -> None:
            served.append(store.epochs[-1])
            super().end_lease(epoch)

    worker = FleetWorker(Watched(), "ann", MemberTimes(LEASE_S), Recorder())
    worker.start(store)
    until(lambda: bool(store.epochs))
    assert store.epochs[-1] != NO_EPOCH
    worker.close()
    assert served == [NO_EPOCH]


def test_a_lease_with_no_time_to_serve_is_refused() -> None:
    with pytest.raises(ValueError, match=r"longer than 5\.29 s, got 5\.2 s"):
        MemberTimes(5.2, call_s=1.0)
    MemberTimes(5.3, call_s=1.0)
