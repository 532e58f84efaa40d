"""Chunks that are to leave early do so when their time is over, unless others use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from hetero_connector.artifacts.record import ChunkRange
from hetero_connector.store.catalog import lifetimes
from tests.clock import Clock
from tests.store.filling import (
    SIZES,
    Bench,
    ClockedStore,
    Disk,
    begin,
    chain,
    ids_of,
    put,
    stored,
)

A, B, LONG = chain("a", 2), chain("b", 2), chain("long", 200)
AT_ONCE = 64
"""Chunks that are forgotten while the lock is held."""


class Clocked(ClockedStore):
    def limit(self, chunks: Sequence[ChunkRange], *, is_forgotten: bool) -> None:
        """Let the time of these chunks be over."""
        keys = [chunk.key for chunk in chunks]
        self.store.retention.limit_life(keys, 0.0, is_forgotten=is_forgotten)
        self.store.expire_due()

    def protect(self, chunks: Sequence[ChunkRange], seconds: float = 1e6) -> None:
        self.store.retention.protect_chain("ann", (chunks[-1].key,), self.clock() + seconds)


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked(dram_chunks=4)
    yield made
    made.store.check_integrity()
    made.store.close()


def test_what_is_over_leaves_first_or_is_forgotten(clocked: Clocked) -> None:
    put(clocked.store, [*B, *A])
    clocked.limit(A, is_forgotten=False)
    assert stored(clocked.store, A) == 2, "there is room"
    put(clocked.store, chain("new", 2))
    assert (stored(clocked.store, A), stored(clocked.store, B)) == (0, 2)
    clocked.limit(B, is_forgotten=True)
    assert stored(clocked.store, B) == 0


def test_a_request_that_comes_to_what_leaves_first_already_lifts_that(clocked: Clocked) -> None:
    put(clocked.store, [*B, *A])
    clocked.limit(A, is_forgotten=False)
    clocked.store.retention.lift_limits((A[-1].key,))
    put(clocked.store, chain("new", 2))
    assert (stored(clocked.store, A), stored(clocked.store, B)) == (2, 0), "B is older"


def test_a_request_lifts_no_mark_that_another_reason_has_set(clocked: Clocked) -> None:
    put(clocked.store, [*A, *B])
    clocked.limit(A[1:], is_forgotten=False)
    clocked.store.catalog.demote(clocked.store.match(B))
    clocked.store.retention.lift_limits((B[-1].key,))
    put(clocked.store, chain("new", 2))
    assert (stored(clocked.store, A), stored(clocked.store, B)) == (2, 0), "loading it costs more"


def test_a_request_takes_the_lock_only_while_there_is_something_to_lift(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, retention = MagicMock(), clocked.store.retention

    def num_taken() -> int:
        with monkeypatch.context() as patch:
            patch.setattr(retention, "_lock", lock)
            retention.lift_limits(())
        count = lock.__enter__.call_count
        lock.reset_mock()
        return count

    put(clocked.store, [*B, *A])
    clocked.store.catalog.demote(clocked.store.match(B))
    assert num_taken() == 0, "that is no limit"
    clocked.limit(A, is_forgotten=False)
    assert num_taken() == 1
    put(clocked.store, chain("new", 4))
    assert stored(clocked.store, A) == 0
    assert num_taken() == 0


@pytest.mark.parametrize("parent_s", [5.0, 10.0])
@pytest.mark.parametrize("most_at_once", [1, 2, 64])
def test_what_a_fork_kept_leaves_first_with_what_follows_it(
    monkeypatch: pytest.MonkeyPatch, most_at_once: int, parent_s: float
) -> None:
    monkeypatch.setattr(lifetimes, "_AT_ONCE", most_at_once)
    clocked, long, fork = Clocked(dram_chunks=8), chain("a", 4), chain("fork", 2)
    put(clocked.store, [*B, *long])
    clocked.store.retention.protect_chain("parent", (long[0].key,), clocked.clock() + parent_s)
    clocked.store.retention.protect_chain("fork", (long[1].key,), clocked.clock() + 5)
    clocked.limit(long, is_forgotten=False)
    clocked.clock.passes(7.0)
    clocked.store.expire_due()
    clocked.clock.passes(7.0)
    clocked.store.expire_due()
    put(clocked.store, fork)
    put(clocked.store, chain("new", 4))
    assert stored(clocked.store, long) == 0
    assert (stored(clocked.store, B), stored(clocked.store, fork)) == (2, 2)
    clocked.store.check_integrity()
    clocked.store.close()


def test_what_was_used_meanwhile_does_not_leave_first_with_what_a_fork_kept() -> None:
    clocked, long = Clocked(dram_chunks=6), chain("a", 4)
    put(clocked.store, [*B, *long])
    clocked.store.retention.protect_chain("fork", (long[1].key,), clocked.clock() + 5)
    clocked.limit(long, is_forgotten=False)
    begin(clocked.store, ids_of(long[2:])).release()
    clocked.clock.passes(7.0)
    clocked.store.expire_due()
    put(clocked.store, chain("new", 2))
    assert (stored(clocked.store, long), stored(clocked.store, B)) == (4, 0)
    clocked.store.close()


def test_no_other_thread_waits_for_all_that_ends(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is let go of between the uses, the pins and the lives that end."""
    store, holds = clocked.store, list[int]()
    lock = CountedLock()

    def make_due() -> None:
        clocked.protect(A, seconds=1.0)
        store.retention.pin_chain("pin", (A[-1].key,), 1.0, b"")
        store.retention.limit_life([x.key for x in A], 1.0, is_forgotten=False)
        clocked.clock.passes(1.0)

    put(store, A)
    with monkeypatch.context() as patch:
        for owner in (store.catalog, store.retention):
            patch.setattr(owner, "_lock", lock)
        for end in (store.catalog.expire, lambda: store.begin_save(B[0], SIZES)):
            make_due()
            before = lock.num_holds
            end()
            holds.append(lock.num_holds - before)
    assert holds == [3, 4]


class CountedLock:
    """Counts how often a thread that did not have it took it."""

    def __init__(self) -> None:
        self.num_holds = 0
        self._depth = 0

    def __enter__(self) -> None:
        self.num_holds += not self._depth
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize("keeper", ["session", "pin"])
def test_what_is_used_or_pinned_is_looked_at_again(
    clocked: Clocked, keeper: str, is_forgotten: bool
) -> None:
    put(clocked.store, [*A, *B])
    if keeper == "session":
        clocked.protect(A)
    else:
        clocked.store.retention.pin_chain("ann", (A[-1].key,), 1e6, b"", is_bounded=False)
    clocked.limit(A, is_forgotten=is_forgotten)
    put(clocked.store, chain("new", 2))
    assert (stored(clocked.store, A), stored(clocked.store, B)) == (2, 0)
    clocked.store.retention.end_session("ann", ())
    clocked.clock.passes(1.0)
    clocked.store.expire_due()
    put(clocked.store, B)
    assert (stored(clocked.store, A), stored(clocked.store, chain("new", 2))) == (0, 2)


def test_without_an_io_thread_a_look_up_finds_nothing_that_is_over() -> None:
    clocked = Clocked(dram_chunks=2 * len(LONG))
    put(clocked.store, LONG)
    clocked.limit(LONG, is_forgotten=True)
    assert stored(clocked.store, LONG) == 0
    clocked.store.close()


def test_with_an_io_thread_a_look_up_forgets_a_part_of_it(tmp_path: Path) -> None:
    store = Bench(tmp_path / "ssd", Disk(), Clock()).open(dram_chunks=2 * len(LONG), run_io=False)
    put(store, LONG)
    store.retention.limit_life([x.key for x in LONG], 0.0, is_forgotten=True)
    store.expire_due()
    assert stored(store, LONG) == len(LONG) - AT_ONCE
    while store.run_io_round():
        pass
    assert stored(store, LONG) == 0
    assert store.io_thread is not None
    store.io_thread.start()
    store.close()
