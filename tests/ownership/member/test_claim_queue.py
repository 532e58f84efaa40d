"""A worker's claim queue over a real directory and a `ListedStore`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ownership.directory import (
    Claim,
    Copy,
    DirectoryLimits,
    Worker,
)
from ownership.directory.identifiers import NO_EPOCH, NO_TOKEN, Epoch
from tests.ownership.fleet_bench import copies_at
from tests.ownership.member.members import (
    BreakableDirectory,
    RunningWorker,
    change,
    is_free,
    owned_by_bob,
    record_of,
)
from tests.waiting import until


@pytest.fixture
def directory() -> BreakableDirectory:
    return BreakableDirectory()


@pytest.fixture
def ann(directory: BreakableDirectory) -> Iterator[RunningWorker]:
    made = RunningWorker(directory)
    yield made
    made.worker.close()


def test_sealed_artifacts_are_owned_and_the_store_learns_their_tokens(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.put(change(1), change(2))
    until(lambda: len(ann.store.tokens) == 2)
    held = record_of(directory, 1)
    assert held is not None
    assert held.token == ann.store.tokens[change(1).id]
    assert ann.store.epochs == [held.owner], "it serves under the epoch that owns"


def test_a_worker_accepts_claims_once_it_is_registered_while_there_is_room() -> None:
    directory = BreakableDirectory(DirectoryLimits(max_artifacts=2))
    ann = RunningWorker(directory)
    try:
        until(lambda: ann.worker.accepts_claims)
        ann.put(change(1), change(2))
        until(lambda: len(ann.store.tokens) == 2)
        assert ann.worker.accepts_claims
        ann.put(change(3))
        until(lambda: not ann.worker.accepts_claims)
        ann.drop(1)
        ann.drop(2)
        until(lambda: is_free(directory, 1) and is_free(directory, 2))
        ann.put(change(4))
        until(lambda: ann.worker.accepts_claims)
    finally:
        ann.worker.close()


def test_claims_refused_by_a_full_directory_are_repeated_until_there_is_room() -> None:
    directory = BreakableDirectory(DirectoryLimits(max_artifacts=2))
    ann = RunningWorker(directory)
    try:
        ann.put(change(1))
        until(lambda: bool(ann.store.tokens))
        bob = owned_by_bob(directory, 2)
        ann.put(change(3))
        until(lambda: not ann.worker.accepts_claims)
        ann.put(change(1, 4096))
        until(lambda: (h := record_of(directory, 1)) is not None and h.copy.dram_offset == 4096)
        assert not ann.worker.accepts_claims, "a claim that is granted makes no room for another"
        held = record_of(directory, 2)
        assert held is not None
        directory.release(bob, {change(2).id: held.token})
        until(lambda: change(3).id in ann.store.tokens)
        assert record_of(directory, 3) is not None
        until(lambda: ann.worker.accepts_claims)
    finally:
        ann.worker.close()


def test_a_worker_without_registration_or_room_accepts_no_claims(
    directory: BreakableDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.gone = True
    ann = RunningWorker(directory, lease_s=1.0)
    try:
        assert not ann.worker.accepts_claims
        directory.gone = False
        until(lambda: ann.worker.accepts_claims)
        monkeypatch.setattr(ann.worker._thread, "_max_claims", 0)
        assert not ann.worker.accepts_claims
        monkeypatch.undo()
        assert ann.worker.accepts_claims
        directory.gone = True
        until(lambda: not ann.worker.accepts_claims)
    finally:
        ann.worker.close()


def test_an_artifact_that_moves_is_claimed_with_its_new_place(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.put(change(1))
    until(lambda: bool(ann.store.tokens))
    token = ann.store.tokens[change(1).id]
    ann.put(change(1, 4096))
    until(lambda: (h := record_of(directory, 1)) is not None and h.copy.dram_offset == 4096)
    assert record_of(directory, 1).token == token  # type: ignore[union-attr]


def test_an_artifact_that_leaves_is_released_even_if_it_returns_at_once(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.put(change(1), change(2))
    until(lambda: len(ann.store.tokens) == 2)
    ann.drop(1)
    until(lambda: is_free(directory, 1))
    ann.store.drop(2)
    ann.put(change(2, 8192))
    until(lambda: (h := record_of(directory, 2)) is not None and h.copy.dram_offset == 8192)
    assert record_of(directory, 2).owner != NO_EPOCH  # type: ignore[union-attr]


def test_an_artifact_that_left_before_its_claim_was_answered_is_released(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    until(lambda: ann.store.epochs != [])
    directory.gone = True
    ann.put(change(1))
    until(lambda: not ann.store._changes)
    ann.drop(1)
    directory.gone = False
    until(lambda: change(1).id in directory.claimed)
    until(lambda: is_free(directory, 1))


def test_a_release_that_failed_is_repeated(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.put(change(1))
    until(lambda: bool(ann.store.tokens))
    directory.gone = True
    ann.drop(1)
    until(lambda: not ann.store._changes)
    assert record_of(directory, 1).owner != NO_EPOCH  # type: ignore[union-attr]
    directory.gone = False
    until(lambda: is_free(directory, 1))


def test_a_foreign_artifact_is_a_replica_whose_listing_is_renewed(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    owner = owned_by_bob(directory, 1)
    ann.put(change(1))
    until(lambda: change(1).id in ann.store.replicas)
    until(lambda: bool(record_of(directory, 1).replicas))  # type: ignore[union-attr]
    first = record_of(directory, 1).replicas[0].expires_s  # type: ignore[union-attr]
    until(lambda: record_of(directory, 1).replicas[0].expires_s > first)  # type: ignore[union-attr]
    assert record_of(directory, 1).owner == owner  # type: ignore[union-attr]
    ann.drop(1)
    until(lambda: not record_of(directory, 1).replicas)  # type: ignore[union-attr]


def test_replicas_are_counted_with_their_bytes(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    owner = owned_by_bob(directory, 1, 2)
    ann.put(change(1), change(2), change(3))
    until(lambda: ann.replicas(replicas=2, replica_bytes=128))
    ann.drop(2)
    until(lambda: ann.replicas(replicas=1, replica_bytes=64))
    held = record_of(directory, 1)
    assert held is not None
    directory.release(owner, {change(1).id: held.token})  # ours, when it is claimed again
    until(lambda: ann.replicas(replicas=0, replica_bytes=0))


@pytest.mark.parametrize("how", ["lets go", "dies"])
def test_a_replica_is_owned_after_its_owner_released_it_or_died(
    directory: BreakableDirectory, ann: RunningWorker, how: str
) -> None:
    owner = owned_by_bob(directory, 1)
    ann.put(change(1))
    until(lambda: change(1).id in ann.store.replicas)
    if how == "lets go":
        held = record_of(directory, 1)
        assert held is not None
        directory.release(owner, {change(1).id: held.token})
    else:
        directory.end_lease(owner)
    until(lambda: change(1).id in ann.store.tokens)
    assert ann.store.replicas == set()
    assert ann.store.tokens[change(1).id] > NO_TOKEN


def test_replicas_of_an_owner_that_died_are_claimed_early(
    directory: BreakableDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ownership.member.members.TTL_S", 3_600.0)
    ann = RunningWorker(directory, lease_s=0.6)
    try:
        owner = owned_by_bob(directory, 1)
        ann.put(change(1))
        until(lambda: change(1).id in ann.store.replicas)
        directory.end_lease(owner)
        until(lambda: change(1).id in ann.store.tokens)
    finally:
        ann.worker.close()


class Glimpsed(BreakableDirectory):
    """The live workers are asked for before bob joins and after it has ended."""

    def workers(self) -> dict[Epoch, Worker]:
        return {e: worker for e, worker in super().workers().items() if worker.name != "bob"}


def test_replicas_of_an_owner_that_was_never_seen_live_are_claimed_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.ownership.member.members.TTL_S", 3_600.0)
    directory = Glimpsed()
    ann = RunningWorker(directory, lease_s=0.6)
    try:
        owner = owned_by_bob(directory, 1)
        ann.put(change(1))
        until(lambda: change(1).id in ann.store.replicas)
        directory.end_lease(owner)
        until(lambda: change(1).id in ann.store.tokens)
    finally:
        ann.worker.close()


def test_serving_ends_before_the_lease_and_everything_is_claimed_again(
    directory: BreakableDirectory,
) -> None:
    ann = RunningWorker(directory, lease_s=1.0)
    try:
        ann.put(change(1))
        until(lambda: bool(ann.store.tokens))
        first = ann.store.tokens[change(1).id]
        directory.gone = True
        until(lambda: ann.store.epochs[-1] == NO_EPOCH)
        states = directory.lookup([change(1).id.chunk])
        assert copies_at(states), "it stopped while nobody could have taken over"
        until(lambda: not directory.workers())
        directory.gone = False
        until(lambda: ann.store.tokens[change(1).id] > first)
        assert ann.store.epochs[-1] > ann.store.epochs[0]
    finally:
        ann.worker.close()
    assert ann.store.epochs[-1] == NO_EPOCH


def test_an_artifact_that_returns_is_not_claimed_before_its_release_is_answered(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.put(change(1))
    until(lambda: bool(ann.store.tokens))
    directory.gone = True
    ann.drop(1)
    until(lambda: not ann.store._changes)
    directory.claimed.clear()
    ann.put(change(1, 4096))
    until(lambda: not ann.store._changes)
    directory.gone = False
    until(lambda: change(1).id in directory.claimed)
    assert directory.calls[-2:] == ["release", "claim"]


def test_a_record_without_its_artifact_is_released(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    until(lambda: ann.store.epochs != [])
    lost = change(7)
    own = Epoch(ann.store.epochs[-1])
    directory.claim_owner(own, [Claim(lost.id, Copy(64, bytes(16), 0, 1))])  # its answer was lost
    lookup = ann.worker.find([lost.id.chunk])
    until(lambda: lookup.poll())
    assert list(lookup.found) == [{}]
    until(lambda: is_free(directory, 7))
