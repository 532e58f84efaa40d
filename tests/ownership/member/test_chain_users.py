"""Chain users are reported and asked for by a worker over a `ListedStore`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.errors import DirectoryUnavailableError
from ownership.directory import Worker
from ownership.directory.memory import MemoryDirectory
from tests.ownership.fleet_bench import chain
from tests.ownership.member.members import BreakableDirectory, RunningWorker
from tests.waiting import until

A, B, C = chain("read", 3)
LEASE_S = 0.6


@pytest.fixture
def directory() -> BreakableDirectory:
    return BreakableDirectory()


@pytest.fixture
def ann(directory: BreakableDirectory) -> Iterator[RunningWorker]:
    made = RunningWorker(directory, LEASE_S)
    yield made
    made.worker.close()


def readers(directory: MemoryDirectory, *chunks: ChunkKey) -> list[int]:
    return directory.count_users(chunks)


def test_chains_that_gain_or_lose_their_users_are_reported(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.store.readers = {"s": (B, A), "t": (B,)}
    until(lambda: readers(directory, A, B, C) == [1, 1, 0])
    ann.store.readers = {"s": (C,)}
    until(lambda: readers(directory, A, B, C) == [0, 1, 1])
    ann.store.readers = {"s": (), "t": ()}
    until(lambda: readers(directory, A, B, C) == [0, 0, 0])


def test_other_engines_users_are_asked_for_chunks_that_leave_next(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    bob = directory.register(Worker("bob", b"card"), 60.0).epoch
    directory.add_chain_user(bob, "u", [A])
    ann.store.soon = [A, B]
    until(lambda: ann.store.elsewhere == {A: True, B: False})
    directory.remove_chain_user(bob, "u", [A])
    until(lambda: ann.store.elsewhere == {A: False, B: False})


def test_the_end_of_the_last_user_is_reported_to_the_store_at_once(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.store.readers = {"s": (A,)}
    until(lambda: readers(directory, A) == [1])
    ann.store.readers = {"s": ()}
    until(lambda: ann.store.elsewhere == {A: False})


def test_users_that_have_left_are_reported_to_a_directory_that_takes_no_new_ones(
    directory: BreakableDirectory, ann: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DirectoryUnavailableError("its memory is full")

    ann.store.readers = {"s": (A,)}
    until(lambda: readers(directory, A) == [1])
    monkeypatch.setattr(directory, "add_chain_user", refuse)
    ann.store.readers = {"t": tuple(chain("more than one call", 300)), "s": ()}
    until(lambda: readers(directory, A) == [0])


def test_this_engines_own_use_does_not_count_as_anothers(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.store.readers = {"s": (A, B)}
    until(lambda: readers(directory, A, B) == [1, 1])
    bob = directory.register(Worker("bob", b"card"), 60.0).epoch
    directory.add_chain_user(bob, "u", [B])
    ann.store.soon = [A, B]
    until(lambda: ann.store.elsewhere == {A: False, B: True})


def test_all_users_are_reported_again_under_a_new_epoch(
    directory: BreakableDirectory, ann: RunningWorker
) -> None:
    ann.store.readers = {"s": (A,)}
    until(lambda: readers(directory, A) == [1])
    first = ann.store.epochs[-1]
    directory.gone = True
    until(lambda: not directory.workers())
    assert readers(directory, A) == [0], "readers end with their worker's lease"
    directory.gone = False
    until(lambda: readers(directory, A) == [1])
    assert ann.store.epochs[-1] > first
