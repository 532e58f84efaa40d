from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from hetero_connector.errors import (
    DirectoryError,
    DirectoryRefusedError,
    DirectoryUnavailableError,
    StaleEpochError,
)
from hetero_connector.metrics import GAUGES, Recorder
from ownership.directory import Claim, Directory, GrantOutcome, Lease, RetiredEpochError, Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.member.directory_thread import DirectoryThread, ThreadHooks
from ownership.member.held_lease import lease_clock
from ownership.member.lease_keeper import LeaseKeeper
from tests.ownership.fleet_bench import artifact, claim_of

LEASE_S = 9.0


class ShakyDirectory(MemoryDirectory):
    """Fails on demand, and counts its calls."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(lambda: fleet.now_s)
        self.error: DirectoryError | None = None
        self.asked: list[str] = []
        self.memory = ""

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        self._ask("register")
        return super().register(worker, lease_s, floor)

    def renew_lease(self, epoch: Epoch) -> str:
        self._ask("renew")
        super().renew_lease(epoch)
        return self.memory

    def end_lease(self, epoch: Epoch) -> None:
        self._ask("end")
        super().end_lease(epoch)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error


class Fleet:
    """A directory, one worker's keeper and the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.recorder = Recorder()
        self.directory = ShakyDirectory(self)
        self.worker = Worker("ann")
        self.keeper = self.new_keeper()

    def new_keeper(self) -> LeaseKeeper:
        return LeaseKeeper(
            self.directory, lambda: self.worker, LEASE_S, self.recorder, lambda: self.now_s
        )

    def pass_s(self, seconds: float) -> list[Epoch]:
        """Let time pass, run the keeper when it is due, and return new epochs."""
        end_s, found = self.now_s + seconds, []
        while self.now_s < end_s:
            epoch = self.keeper.run_due()
            found += [] if epoch is None else [epoch]
            self.now_s = min(end_s, self.now_s + max(0.01, self.keeper.wait_s()))
        return found

    def joined(self) -> float | None:
        payload = self.recorder.drain() or {GAUGES: {}}
        return payload[GAUGES].get("heterocache_directory_joined{}")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def count(asked: Sequence[str], what: str) -> int:
    return sum(x == what for x in asked)


def test_it_registers_and_renews_three_times_a_lease(fleet: Fleet) -> None:
    assert len(fleet.pass_s(10 * LEASE_S)) == 1
    assert count(fleet.directory.asked, "register") == 1
    assert 28 <= count(fleet.directory.asked, "renew") <= 30
    assert fleet.keeper.lease is not None
    assert fleet.keeper.lease.is_valid
    assert fleet.joined() == 1.0


def test_an_unavailable_directory_is_asked_after_pauses_and_the_lease_runs_out(
    fleet: Fleet,
) -> None:
    fleet.pass_s(LEASE_S)
    fleet.directory.asked.clear()
    fleet.directory.error = DirectoryUnavailableError("gone")
    fleet.pass_s(2 * LEASE_S)
    lease = fleet.keeper.lease
    assert lease is not None
    assert not lease.is_valid
    assert 10 <= len(fleet.directory.asked) <= 30
    assert fleet.joined() == 0.0


def test_after_the_lease_has_ended_the_worker_gets_a_greater_epoch(fleet: Fleet) -> None:
    (first,) = fleet.pass_s(LEASE_S)
    fleet.directory.error = DirectoryUnavailableError("gone")
    fleet.pass_s(2 * LEASE_S)
    fleet.directory.error = None
    (second,) = fleet.pass_s(LEASE_S)
    assert second > first
    assert fleet.joined() == 1.0


def test_within_its_lease_the_worker_keeps_its_epoch(fleet: Fleet) -> None:
    fleet.pass_s(LEASE_S)
    fleet.directory.error = DirectoryUnavailableError("gone")
    fleet.pass_s(LEASE_S / 2)
    fleet.directory.error = None
    assert fleet.pass_s(LEASE_S) == []
    assert fleet.joined() == 1.0


def test_a_directory_that_lost_its_memory_is_given_the_greatest_number_seen(fleet: Fleet) -> None:
    fleet.pass_s(LEASE_S)
    fleet.keeper.note_number(5_000)
    empty = ShakyDirectory(fleet)
    fleet.keeper._directory = empty
    (epoch,) = fleet.pass_s(LEASE_S)
    assert epoch > 5_000


def test_a_loss_is_told_once_with_the_time_when_nothing_was_lost_yet(fleet: Fleet) -> None:
    """Renewals that reach the directory, but are not answered in time, do not move that time."""
    fleet.pass_s(LEASE_S)
    assert fleet.keeper.take_loss() is None
    whole_s = fleet.now_s
    fleet.directory.memory = "another"
    fleet.directory.error = DirectoryUnavailableError("late")
    fleet.pass_s(LEASE_S / 2)
    fleet.directory.error = None
    fleet.pass_s(LEASE_S)
    lost_after_s = fleet.keeper.take_loss()
    assert lost_after_s is not None
    assert whole_s - LEASE_S / 2 < lost_after_s <= whole_s
    assert fleet.keeper.take_loss() is None
    fleet.pass_s(LEASE_S)
    assert fleet.keeper.take_loss() is None


def test_a_worker_with_a_stale_epoch_registers_at_once(fleet: Fleet) -> None:
    (first,) = fleet.pass_s(1.0)
    fleet.keeper.on_stale(StaleEpochError(first))
    assert fleet.keeper.wait_s() == 0.0
    second = fleet.keeper.run_due()
    assert second is not None
    assert second > first
    fleet.keeper.on_stale(StaleEpochError(first))  # a late message about the old epoch
    assert fleet.keeper.lease is not None
    assert fleet.keeper.lease.is_valid


def test_a_refusal_is_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.directory.error = DirectoryRefusedError("wrong password")
    fleet.pass_s(LEASE_S)
    logged = [x for x in caplog.records if "wrong password" in x.getMessage()]
    assert [x.levelname for x in logged] == ["ERROR"]
    assert fleet.keeper.lease is None


def test_a_worker_that_leaves_frees_its_artifacts_even_without_an_answer(fleet: Fleet) -> None:
    fleet.pass_s(1.0)
    fleet.directory.error = DirectoryUnavailableError("gone")
    fleet.keeper.leave()
    assert fleet.keeper.lease is not None
    assert not fleet.keeper.lease.is_valid
    assert fleet.joined() == 0.0
    assert len(fleet.directory.workers()) == 1
    fleet.directory.error = None
    fleet.keeper.leave()
    assert fleet.directory.workers() == {}


def test_starting_over_ends_the_epoch_first(fleet: Fleet) -> None:
    before = fleet.keeper.run_due()
    fleet.keeper.start_over()
    assert not fleet.keeper.lease.is_valid  # type: ignore[union-attr]
    fleet.keeper.run_due()
    assert fleet.directory.workers() == {}
    after = fleet.keeper.run_due()
    assert before is not None
    assert after is not None
    assert after > before
    fleet.keeper.start_over()
    fleet.directory.error = DirectoryUnavailableError("gone")
    fleet.keeper.run_due()
    fleet.directory.error = None
    fleet.now_s += LEASE_S / 3
    fleet.keeper.run_due()
    assert fleet.directory.workers() == {}, "it ends once the directory is back"


def test_numbers_that_no_directory_hands_out_do_not_raise_the_floor(fleet: Fleet) -> None:
    fleet.keeper.note_number(2**60)
    assert fleet.keeper.run_due() == 1


def test_a_lease_runs_while_the_machine_is_suspended() -> None:
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    now_s = lease_clock()
    assert before_s <= now_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_worker_with_another_card_is_registered_again() -> None:
    """The process through which peers read from it was started again."""
    fleet = Fleet()
    first = fleet.keeper.run_due()
    assert first is not None
    assert fleet.keeper.run_due() is None
    fleet.worker = Worker("ann", b"another card")
    assert fleet.keeper.run_due() is None
    assert not fleet.keeper.lease.is_valid  # type: ignore[union-attr]
    assert first in fleet.directory.workers(), "it ends after the worker has stopped serving"
    assert fleet.keeper.run_due() is None
    second = fleet.keeper.run_due()
    assert second is not None
    assert second > first
    assert {w.peer for w in fleet.directory.workers().values()} == {b"another card"}
    assert fleet.keeper.run_due() is None


def test_a_worker_with_another_card_owns_its_artifacts_again_at_once(directory: Directory) -> None:
    cards = [b"card"]
    keeper = LeaseKeeper(
        directory, lambda: Worker("ann", cards[-1]), LEASE_S, Recorder(), lambda: 100.0
    )
    first = keeper.run_due()
    assert first is not None
    [before] = directory.claim_owner(first, [claim_of(artifact())])
    cards.append(b"another card")
    second = [keeper.run_due() for _ in range(3)][-1]
    assert second is not None
    [after] = directory.claim_owner(second, [claim_of(artifact())])
    assert after.outcome is GrantOutcome.OWNED
    assert after.token > before.token


def test_a_worker_whose_place_is_taken_once_in_a_lease_registers_at_once(fleet: Fleet) -> None:
    """A registration that was not answered may have arrived late."""
    (first,) = fleet.pass_s(1.0)
    for _ in range(3):
        fleet.keeper.on_stale(RetiredEpochError(first))
        assert fleet.keeper.wait_s() == 0.0
        second = fleet.keeper.run_due()
        assert second is not None
        assert fleet.pass_s(1.5 * LEASE_S) == []
        first = second


def test_engines_with_one_name_take_few_turns_and_say_what_to_change(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[float] = []

    def start_epoch() -> Iterator[Sequence[Claim]]:
        registered.append(fleet.now_s)
        return iter(())

    threads = [
        DirectoryThread(
            fleet.directory,
            fleet.new_keeper(),
            ThreadHooks(start_epoch, lambda *_: None),
            Recorder(),
            clock=lambda: fleet.now_s,
        )
        for _ in range(2)
    ]
    leases = 5
    until_s = fleet.now_s + leases * LEASE_S
    while fleet.now_s < until_s:
        fleet.now_s += 0.1
        for thread in threads:
            thread.call(lambda directory, epoch: directory.release(epoch, {}), 1.0)
            thread.run_turn()
    assert len(registered) <= 4 * (leases + 1)
    errors = [x.getMessage() for x in caplog.records if x.levelname == "ERROR"]
    assert 1 <= len(errors) <= 2 * (leases + 1)
    assert "worker_name 'ann'" in errors[0]
    assert "its own worker_name" in errors[0]
