"""Readers told to the directory and asked of it, by a worker over a store made of lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory import Worker
from ownership.directory.memory import MemoryDirectory
from tests.ownership.fleet_bench import chain
from tests.ownership.member.ledgers import BreakableDirectory, Worked, until

A, B, C = chain("read", 3)
LEASE_S = 0.6


@pytest.fixture
def directory() -> BreakableDirectory:
    return BreakableDirectory()


@pytest.fixture
def ann(directory: BreakableDirectory) -> Iterator[Worked]:
    made = Worked(directory, LEASE_S)
    yield made
    made.worker.close()


def readers(directory: MemoryDirectory, *chunks: ChunkKey) -> list[int]:
    return [usage.num_users for usage in directory.usage(chunks)]


def test_who_reads_here_is_told_and_who_left_is_too(
    directory: BreakableDirectory, ann: Worked
) -> None:
    ann.store.readers = {"s": (B, A), "t": (B,)}
    until(lambda: readers(directory, A, B, C) == [1, 1, 0])
    ann.store.readers = {"s": (C,)}
    until(lambda: readers(directory, A, B, C) == [0, 1, 1])
    ann.store.readers = {"s": (), "t": ()}
    until(lambda: readers(directory, A, B, C) == [0, 0, 0])


def test_who_reads_elsewhere_is_asked_of_what_would_leave_next(
    directory: BreakableDirectory, ann: Worked
) -> None:
    bob = directory.register(Worker("bob", b"card"), 60.0).epoch
    directory.add_chain_user(bob, "u", [A])
    ann.store.soon = [A, B]
    until(lambda: ann.store.elsewhere == {A: True, B: False})
    directory.remove_chain_user(bob, "u", [A])
    until(lambda: ann.store.elsewhere == {A: False, B: False})


def test_the_last_readers_release_is_acted_on_at_once(
    directory: BreakableDirectory, ann: Worked
) -> None:
    ann.store.readers = {"s": (A,)}
    until(lambda: readers(directory, A) == [1])
    ann.store.readers = {"s": ()}
    until(lambda: ann.store.elsewhere == {A: False})


def test_what_only_this_engine_reads_is_not_read_elsewhere(
    directory: BreakableDirectory, ann: Worked
) -> None:
    ann.store.readers = {"s": (A, B)}
    until(lambda: readers(directory, A, B) == [1, 1])
    bob = directory.register(Worker("bob", b"card"), 60.0).epoch
    directory.add_chain_user(bob, "u", [B])
    ann.store.soon = [A, B]
    until(lambda: ann.store.elsewhere == {A: False, B: True})


def test_under_a_new_epoch_all_readers_are_told_again(
    directory: BreakableDirectory, ann: Worked
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
