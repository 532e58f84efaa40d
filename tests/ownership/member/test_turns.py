"""Turns of the directory's thread: exceptions, fairness, repeated claims."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hetero_connector.errors import StaleEpochError
from hetero_connector.metrics import COUNTERS, Recorder
from ownership.directory import Claim, DirectoryLimits, Grant, GrantOutcome, Lease, Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.member.directory_thread import CLAIMS_PER_CALL, DirectoryThread, ThreadHooks
from ownership.member.fleet_worker import FleetWorker, MemberTimes
from ownership.member.lease_keeper import LeaseKeeper
from tests.ownership.fleet_bench import artifact, chain, claim_of, lookup
from tests.ownership.member.members import ListedStore, change, owned_by_bob, record_of

pytestmark = pytest.mark.long

LEASE_S = 10.0
TURN_S = 1e-3


class Buggy(MemoryDirectory):
    """Raises what no directory may raise."""

    def __init__(self, clock: Callable[[], float], limits: DirectoryLimits | None = None) -> None:
        super().__init__(clock, limits)
        self.broken: set[str] = set()
        self.calls: list[str] = []

    def _check(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise TypeError(f"a bug in {name}")

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        self._check("register")
        return super().register(worker, lease_s, floor)

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        self._check("claim")
        return super().claim_owner(epoch, claims)

    def sweep(self, limit: int) -> int:
        self._check("sweep")
        return super().sweep(limit)


class Stepped:
    """A thread whose turns the test takes. A turn takes a millisecond."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 100.0
        self.recorder = Recorder()
        self.directory = Buggy(self.clock)
        self.keeper = LeaseKeeper(
            self.directory, lambda: Worker("ann", b"card"), LEASE_S, self.recorder, self.clock
        )
        self.granted: list[Grant] = []
        self.thread = DirectoryThread(
            self.directory,
            self.keeper,
            ThreadHooks(lambda: iter(()), lambda _, __, grants: self.granted.extend(grants)),
            self.recorder,
            clock=self.clock,
            **options,
        )

    def clock(self) -> float:
        return self.now_s

    def run_s(self, seconds: float) -> int:
        """Take the turns of that time; return their number."""
        until_s, turns = self.now_s + seconds, 0
        while self.now_s < until_s:
            idle_s = self.thread.idle_s()
            self.now_s += max(TURN_S, min(idle_s, until_s - self.now_s))
            if idle_s < seconds:
                self.thread.run_turn()
                turns += 1
        return turns


def test_a_registration_that_raises_is_retried_after_pauses_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Stepped()
    made.directory.broken = {"register"}
    with caplog.at_level(logging.ERROR):
        assert made.run_s(60.0) <= 300, "a core is not kept busy"
    assert len([r for r in caplog.records if "a bug in register" in (r.exc_text or "")]) == 1
    made.directory.broken.clear()
    made.run_s(1.0)
    assert made.keeper.lease is not None
    assert made.keeper.lease.is_valid


def test_a_stale_epoch_is_replaced_before_a_renewal_is_due() -> None:
    made = Stepped()
    made.run_s(TURN_S)
    before = made.keeper.lease
    assert before is not None
    made.directory.end_lease(before.epoch)
    noted = made.thread.call(lambda d, epoch: d.add_chain_user(epoch, "s", chain("a", 1)), 5.0)
    made.thread.run_turn()
    with pytest.raises(StaleEpochError):
        noted.result(0)
    assert made.thread.idle_s() == 0.0 < before.renew_in_s
    made.thread.run_turn()
    assert made.keeper.lease is not None
    assert made.keeper.lease.epoch > before.epoch
    assert made.keeper.lease.is_valid


@pytest.mark.parametrize("part", ["claim", "sweep"])
def test_a_task_that_raises_stops_neither_the_lease_nor_calls(part: str) -> None:
    made = Stepped(sweep_every_s=5.0)
    made.run_s(1.0)
    epoch = made.keeper.lease.epoch  # type: ignore[union-attr]
    made.directory.broken = {part}
    made.thread.publish([claim_of(artifact())])
    assert made.run_s(3 * LEASE_S) <= 600
    assert made.keeper.lease.epoch == epoch  # type: ignore[union-attr]
    asked = lookup(made.thread, 1.0, chain("a", 1))
    made.run_s(1.0)
    assert asked.done()
    payload = made.recorder.drain() or {}
    assert payload[COUNTERS]["heterocache_directory_failures{cause=internal}"] > 0


def test_steady_lookups_do_not_starve_claims_nor_sweeps() -> None:
    made = Stepped(sweep_every_s=5.0)
    made.run_s(1.0)
    made.directory.calls.clear()
    made.thread.publish([claim_of(artifact("many", i)) for i in range(4 * CLAIMS_PER_CALL)])
    asked = []
    for _ in range(10_000):
        asked.append(lookup(made.thread, 1.0, chain("a", 1)))
        made.now_s += TURN_S
        made.thread.run_turn()
    assert len(made.granted) == 4 * CLAIMS_PER_CALL
    assert made.directory.calls.count("sweep") >= 1
    assert sum(lookup.done() for lookup in asked) >= 9_950, "calls come first"


class Member:
    """A worker over a `ListedStore`; the test takes its turns."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, limits: DirectoryLimits | None = None
    ) -> None:
        monkeypatch.setattr(DirectoryThread, "start", lambda _: None)
        self.now_s = 100.0
        self.directory = Buggy(self.clock, limits)
        self.store = ListedStore()
        self.worker = FleetWorker(
            self.directory, "ann", MemberTimes(LEASE_S, call_s=0.1), Recorder(), self.clock
        )
        self.worker.start(self.store)

    def clock(self) -> float:
        return self.now_s

    def run_s(self, seconds: float) -> None:
        until_s, thread = self.now_s + seconds, self.worker._thread
        while self.now_s < until_s:
            self.now_s += max(TURN_S, min(thread.idle_s(), until_s - self.now_s))
            thread.run_turn()


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(monkeypatch)


def test_claims_dropped_from_a_full_queue_are_made_within_two_leases(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    member.run_s(1.0)
    monkeypatch.setattr(member.worker._thread, "_max_claims", 300)
    member.store.put(*map(change, range(1, 6_001)))
    member.run_s(2 * LEASE_S)
    assert len(member.store.tokens) == 6_000


def test_claims_lost_to_an_exception_are_made_again(member: Member) -> None:
    member.run_s(1.0)
    member.directory.broken = {"claim"}
    member.store.put(*map(change, range(1, 501)))
    member.run_s(1.0)
    member.directory.broken.clear()
    member.run_s(2 * LEASE_S)
    assert len(member.store.tokens) == 500


def test_records_of_another_model_make_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker claims another model's chunks again, so a full directory forgets them at once."""
    member = Member(monkeypatch, DirectoryLimits(max_artifacts=20_000))
    old = member.directory.register(Worker("old", b"card"), LEASE_S).epoch
    claims = [claim_of(artifact("old", 0))._replace(artifact=change(n).id) for n in range(20_000)]
    assert {g.outcome for g in member.directory.claim_owner(old, claims)} == {GrantOutcome.OWNED}
    member.directory.end_lease(old)
    member.store.put(*map(change, range(30_000, 30_256)))
    member.run_s(LEASE_S)
    assert len(member.store.tokens) == 256
    assert member.worker.accepts_claims
    member.run_s(LEASE_S)
    held = record_of(member.directory, 1)
    assert held is None or held.owner != old


def test_a_directory_full_of_live_records_is_swept_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = Member(monkeypatch, DirectoryLimits(max_artifacts=10))
    member.store.put(*map(change, range(20)))
    member.run_s(2 * LEASE_S)
    member.directory.calls.clear()
    member.run_s(600.0)
    assert member.directory.calls.count("sweep") <= 12


def test_lost_changes_of_the_store_end_the_epoch(member: Member) -> None:
    """An artifact that left unnoticed would be recorded as owned for ever."""
    member.store.put(change(1), change(2))
    member.run_s(1.0)
    before = member.store.epochs[-1]
    del member.store.here[change(2).id]
    member.store.put(change(3))
    member.store.take_exports()
    member.store.has_lost = True
    member.run_s(2.0)
    epoch = member.store.epochs[-1]
    assert epoch > before
    owners = [record_of(member.directory, number).owner for number in (1, 2, 3)]  # type: ignore[union-attr]
    assert owners == [epoch, before, epoch]
    assert before not in member.directory.workers()


def test_the_end_of_a_worker_that_owns_no_replica_here_begins_no_check(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = owned_by_bob(member.directory, 1)
    eve = member.directory.register(Worker("eve", b"card"), 3_600.0).epoch
    member.store.put(change(1))
    member.run_s(LEASE_S)
    assert member.store.replicas == {change(1).id}
    reclaims = list[float]()
    monkeypatch.setattr(member.worker._claims, "reclaim", lambda: reclaims.append(member.now_s))
    member.directory.end_lease(eve)
    member.run_s(LEASE_S)
    assert not reclaims
    member.directory.end_lease(bob)
    member.run_s(LEASE_S)
    assert reclaims
