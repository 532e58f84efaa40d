"""Replicas are claimed again, at once when an owner ends, and so are refused claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import Recorder
from ownership.directory import (
    ChainView,
    Claim,
    Copy,
    DirectoryLimits,
    Grant,
    GrantOutcome,
    Worker,
)
from ownership.directory.identifiers import NO_EPOCH, NO_TOKEN, Epoch, Token
from ownership.directory.memory import MemoryDirectory
from ownership.member.claim_queue import ClaimQueue
from ownership.member.directory_thread import Job
from tests.clock import Clock
from tests.ownership.member.members import ListedStore, change, record_of

BOB, EVE = Epoch(2), Epoch(3)
FULL = Grant(GrantOutcome.FULL, NO_EPOCH, NO_TOKEN)
OWNED = Grant(GrantOutcome.OWNED, Epoch(1), Token(9))


class FakeThread:
    """Stands in for a `DirectoryThread` whose directory has lost all records."""

    accepts_claims = True
    num_claims = 0

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    @property
    def artifacts(self) -> list[ArtifactId]:
        return [claim.artifact for claim in self.claims]

    def publish(self, claims: Sequence[Claim]) -> int:
        self.claims += claims
        return len(claims)

    def take_dropped(self) -> bool:
        return False

    def call(self, job: Job[None], _: float) -> Future[None]:
        """Run checks at once. Calls that change the directory are never answered."""
        future = Future[None]()
        if "_check" in job.__name__:
            future.set_result(job(MemoryDirectory(), Epoch(1)))
        return future


def answered(queue: ClaimQueue, grant: Grant, *numbers: int) -> None:
    claims = [Claim(change(number).id, Copy(64, bytes(16), 0, 1)) for number in numbers]
    queue.on_granted(Epoch(1), claims, [grant] * len(claims))


def held_by(queue: ClaimQueue, owner: Epoch, *numbers: int) -> None:
    answered(queue, Grant(GrantOutcome.FOREIGN, owner, Token(9)), *numbers)


def test_all_replicas_are_claimed_at_once() -> None:
    """All are claimed, because their owners may have changed since."""
    store, thread = ListedStore(), FakeThread()
    store.put(*map(change, range(1, 4)))
    clock = Clock(0.0)
    queue = ClaimQueue(store, thread, Recorder(), clock=clock)  # type: ignore[arg-type]
    queue.run_due()
    held_by(queue, BOB, 1, 2)
    held_by(queue, EVE, 3)
    thread.claims.clear()
    clock.passes(0.5)
    queue.run_due()
    assert thread.artifacts == []
    queue.reclaim()
    queue.run_due()
    assert set(thread.artifacts) == {change(n).id for n in (1, 2, 3)}


def test_replica_owners_are_those_of_the_present_replicas() -> None:
    store, thread = ListedStore(), FakeThread()
    store.put(*map(change, range(1, 4)))
    queue = ClaimQueue(store, thread, Recorder(), clock=lambda: 0.0)  # type: ignore[arg-type]
    held_by(queue, BOB, 1, 2)
    held_by(queue, EVE, 3)
    assert queue.replica_owners == {BOB, EVE}
    held_by(queue, EVE, 1)
    assert queue.replica_owners == {BOB, EVE}
    held_by(queue, EVE, 2)
    assert queue.replica_owners == {EVE}
    for _ in queue.start_epoch():
        pass
    assert queue.replica_owners == set()


class Refused:
    """A queue whose directory was full for these artifacts."""

    def __init__(self, *numbers: int) -> None:
        self.store, self.thread = ListedStore(), FakeThread()
        self.queue = ClaimQueue(self.store, self.thread, Recorder(), clock=lambda: 0.0)  # type: ignore[arg-type]
        self.store.put(*map(change, numbers))
        self.queue.run_due()
        answered(self.queue, FULL, *numbers)

    def reclaimed(self) -> list[Claim]:
        """Return all claims that are made together with the replicas'."""
        self.thread.claims.clear()
        self.queue.reclaim()
        self.queue.run_due()
        return self.thread.claims


def numbers_of(claims: Sequence[Claim]) -> list[int]:
    return sorted(int.from_bytes(claim.artifact.chunk, "big") for claim in claims)


def test_refused_claims_are_repeated_with_the_replicas() -> None:
    made = Refused(1, 2, 3)
    made.store.put(change(4))
    held_by(made.queue, BOB, 4)
    made.queue.run_due()
    assert made.queue.has_refused, "another claim that was answered changes nothing"
    assert numbers_of(made.reclaimed()) == [1, 2, 3, 4]
    answered(made.queue, FULL, 1)
    assert numbers_of(made.reclaimed()) == [1, 2, 3, 4]


def test_a_claim_that_is_answered_otherwise_is_no_longer_refused() -> None:
    made = Refused(1, 2)
    answered(made.queue, OWNED, 1)
    assert made.queue.has_refused
    held_by(made.queue, BOB, 2)
    assert not made.queue.has_refused
    assert numbers_of(made.reclaimed()) == [2], "a replica"


def test_an_artifact_that_leaves_is_no_longer_refused() -> None:
    made = Refused(1)
    made.store.drop(1)
    made.queue.run_due()
    assert not made.queue.has_refused
    answered(made.queue, FULL, 1)
    assert not made.queue.has_refused
    assert made.reclaimed() == []


def test_a_new_epoch_starts_without_refused_claims() -> None:
    made = Refused(1)
    assert len(list(made.queue.start_epoch())) == 1
    assert not made.queue.has_refused


def test_a_refused_artifact_that_moved_is_claimed_at_its_new_place() -> None:
    made = Refused(1)
    made.store.put(change(1, 4096))
    assert [claim.copy.dram_offset for claim in made.reclaimed()] == [4096, 4096]


def test_a_replica_that_moved_is_not_claimed_at_its_old_place() -> None:
    store, thread = ListedStore(), FakeThread()
    store.put(change(1))
    queue = ClaimQueue(store, thread, Recorder())  # type: ignore[arg-type]
    queue.run_due()
    held_by(queue, BOB, 1)
    thread.claims.clear()
    store.put(change(1, 4096))
    queue.reclaim()
    queue.run_due()
    assert [claim.copy.dram_offset for claim in thread.claims] == [4096, 4096]


def test_an_unregistered_worker_does_not_queue_its_replicas_repeatedly() -> None:
    store, thread = ListedStore(), FakeThread()
    queue = ClaimQueue(store, thread, Recorder())  # type: ignore[arg-type]
    store.put(change(1))
    queue.run_due()
    held_by(queue, BOB, 1)
    thread.claims.clear()
    thread.accepts_claims = False
    queue.reclaim()
    queue.run_due()
    assert thread.claims == []


def test_a_release_under_a_new_epoch_is_sent_before_its_claims() -> None:
    store, thread = ListedStore(), FakeThread()
    store.put(*map(change, range(300)))
    queue = ClaimQueue(store, thread, Recorder())  # type: ignore[arg-type]
    queue.run_due()
    batches = queue.start_epoch()
    answered(queue, OWNED, 1)
    store.drop(1)
    queue.run_due()
    assert [len(batch) for batch in batches] == [256, 43]
    assert queue._releases == {change(1).id: OWNED.token}


class AnsweringThread(FakeThread):
    """Calls that change the directory are answered, too."""

    def __init__(self, directory: MemoryDirectory | None = None) -> None:
        super().__init__()
        self.directory = directory or MemoryDirectory()
        self.epoch = self.directory.register(Worker("ann"), 3_600.0).epoch
        self.names: list[str] = []

    def call(self, job: Job[None], _: float) -> Future[None]:
        self.names.append(job.__name__)
        future = Future[None]()
        try:
            future.set_result(job(self.directory, self.epoch))
        except DirectoryUnavailableError as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize(("lost_after_s", "is_repeated"), [(0.0, True), (3.9, True), (4.1, False)])
def test_releases_of_two_leases_before_a_loss_are_repeated_however_late_it_is_seen(
    lost_after_s: float, is_repeated: bool
) -> None:
    clock, store, thread = Clock(0.0), ListedStore(), AnsweringThread()
    queue = ClaimQueue(store, thread, Recorder(), clock=clock, lease_s=2.0)  # type: ignore[arg-type]
    store.put(change(1))
    queue.run_due()
    answered(queue, OWNED, 1)
    store.drop(1)
    queue.run_due()
    assert not queue.has_unsent
    clock.passes(100.0)
    queue.on_records_lost(lost_after_s)
    assert queue.has_unsent == is_repeated


def test_a_replica_that_is_one_too_many_is_listed_again_when_others_may_have_ended() -> None:
    clock, store, ttl_s = Clock(0.0), ListedStore(), 60.0
    thread = AnsweringThread(MemoryDirectory(clock, DirectoryLimits(max_replicas=0)))
    bob = thread.directory.register(Worker("bob"), 60.0 * ttl_s).epoch
    thread.directory.claim_owner(bob, [Claim(change(1).id, Copy(64, bytes(16), 0, 1))])
    queue = ClaimQueue(store, thread, Recorder(), ttl_s, clock)  # type: ignore[arg-type]
    store.put(change(1))
    queue.run_due()
    held_by(queue, bob, 1)
    listed = []
    while clock.now_s < 1.5 * ttl_s:
        before = thread.names.count("_send_batch")
        queue.run_due()
        if thread.names.count("_send_batch") > before:
            listed.append(clock.now_s)
        clock.passes(1.0)
    assert thread.names.count("_check_batch") > 3, "it is checked all the time"
    assert len(listed) == 2
    assert listed[0] == 0.0
    assert listed[1] >= ttl_s


def test_a_replica_that_has_another_owner_is_claimed_to_learn_which() -> None:
    """Else the end of that owner would not be seen."""
    clock, store, thread = Clock(), ListedStore(), AnsweringThread()
    bob, eve = (thread.directory.register(Worker(name), 60.0).epoch for name in ("bob", "eve"))
    thread.directory.claim_owner(eve, [Claim(change(1).id, Copy(64, bytes(16), 0, 1))])
    queue = ClaimQueue(store, thread, Recorder(), clock=clock)  # type: ignore[arg-type]
    store.put(change(1))
    queue.run_due()
    thread.claims.clear()
    for owner, expected in ((bob, [change(1).id]), (eve, [])):
        held_by(queue, owner, 1)
        thread.claims.clear()
        queue.reclaim()
        clock.passes(1.0)
        queue.run_due()
        assert thread.artifacts == expected


class FullServer(MemoryDirectory):
    """A server whose memory is full for the first replicas."""

    num_refused = 1

    def replicate_readonly(
        self, epoch: Epoch, copies: Sequence[Claim], ttl_s: float
    ) -> list[Grant]:
        if self.num_refused:
            self.num_refused -= 1
            return [FULL] * len(copies)
        return super().replicate_readonly(epoch, copies, ttl_s)


def test_a_replica_that_a_full_server_refused_is_listed_when_it_is_next_checked() -> None:
    clock, store, lease_s = Clock(), ListedStore(), 2.0
    thread = AnsweringThread(FullServer(clock))
    bob = thread.directory.register(Worker("bob"), 3_600.0).epoch
    thread.directory.claim_owner(bob, [Claim(change(1).id, Copy(64, bytes(16), 0, 1))])
    queue = ClaimQueue(store, thread, Recorder(), 30 * lease_s, clock, lease_s)  # type: ignore[arg-type]
    store.put(change(1))
    queue.run_due()
    held_by(queue, bob, 1)
    for _ in range(5):
        queue.run_due()
        clock.passes(1.0)
    held = record_of(thread.directory, 1)
    assert held is not None
    assert [replica.holder for replica in held.replicas] == [thread.epoch]


class LosesLookups(MemoryDirectory):
    """Has lost all records, and answers every other lookup only."""

    num_asked = 0

    def lookup(self, chain: Sequence[ChunkKey]) -> ChainView:
        self.num_asked += 1
        if self.num_asked % 2 == 0:
            raise DirectoryUnavailableError("lost")
        return super().lookup(chain)


class LongStore(ListedStore):
    """Lists what it has in several batches."""

    def inventory(self) -> Iterator[list[ExportChange]]:
        [everything] = super().inventory()
        for first in range(0, len(everything), 256):
            yield everything[first : first + 256]


def test_a_check_that_fails_begins_no_audit_anew() -> None:
    clock, store, thread = Clock(), LongStore(), AnsweringThread(LosesLookups())
    numbers = range(1, 4 * 256 + 1)
    queue = ClaimQueue(store, thread, Recorder(), clock=clock)  # type: ignore[arg-type]
    store.put(*map(change, numbers))
    queue.run_due()
    answered(queue, OWNED, *numbers)
    thread.claims.clear()
    queue.on_records_lost(clock.now_s)
    for _ in range(12):
        queue.run_due()
        clock.passes(1.0)
    assert set(thread.artifacts) == {change(number).id for number in numbers}


@pytest.mark.parametrize("offset", [4096, None])
def test_what_changed_after_a_check_that_failed_is_not_claimed_as_it_was(
    offset: int | None,
) -> None:
    clock, store, directory = Clock(), ListedStore(), LosesLookups()
    directory.num_asked = 1
    thread = AnsweringThread(directory)
    queue = ClaimQueue(store, thread, Recorder(), clock=clock)  # type: ignore[arg-type]
    store.put(change(1), change(2))
    queue.run_due()
    answered(queue, OWNED, 1, 2)
    queue.on_records_lost(clock.now_s)
    queue.run_due()
    assert directory.num_asked == 2, "a check has failed"
    thread.claims.clear()
    if offset is None:
        store.drop(1)
    else:
        store.put(change(1, offset))
    for _ in range(3):
        clock.passes(1.0)
        queue.run_due()
    assert directory.num_asked > 2
    assert change(2).id in thread.artifacts
    offsets = [c.copy.dram_offset for c in thread.claims if c.artifact == change(1).id]
    assert set(offsets) == (set() if offset is None else {offset})
