"""Hundreds of chain users that come and go, and a directory that does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise

import pytest

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.errors import DirectoryUnavailableError
from ownership.directory import Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.member import chain_users
from ownership.member.chain_users import ChainUserExchange
from ownership.member.directory_thread import Job
from tests.ownership.fleet_bench import chain
from tests.ownership.member.members import ListedStore

PERIOD_S = 3.3


class CountingDirectory(MemoryDirectory):
    """Counts its calls, and loses answers on demand."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.calls = 0
        self.loses_answers = False

    def add_chain_user(self, epoch: Epoch, reader: str, chunks: Sequence[ChunkKey]) -> None:
        super().add_chain_user(epoch, reader, chunks)
        self._answer()

    def remove_chain_user(
        self, epoch: Epoch, reader: str, chunks: Sequence[ChunkKey]
    ) -> list[ChunkKey]:
        self._answer()
        return super().remove_chain_user(epoch, reader, chunks)

    def count_users(self, chunks: Sequence[ChunkKey]) -> list[int]:
        self._answer()
        return super().count_users(chunks)

    def _answer(self) -> None:
        self.calls += 1
        if self.loses_answers:
            raise DirectoryUnavailableError("its answer was lost")


class Turns:
    """Stands in for a `DirectoryThread`; the test controls its turns and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.directory = CountingDirectory()
        self.store = ListedStore()
        self.epoch = self.directory.register(Worker("ann", b"card"), 86_400.0).epoch
        self.calls_of_turns: list[int] = []
        self._job: tuple[Job[None], Future[None]] | None = None
        self.counts = ChainUserExchange(self.store, self, PERIOD_S, lambda: self.now_s)  # type: ignore[arg-type]

    def call(self, job: Job[None], deadline_s: float) -> Future[None]:
        assert self._job is None
        self._job = job, Future()
        return self._job[1]

    def turn(self) -> float:
        """Run the periodic task, then a waiting call; return the seconds until it is due again."""
        before = self.directory.calls
        wait_s = self.counts.run_due()
        if self._job is not None:
            (job, future), self._job = self._job, None
            try:
                future.set_result(job(self.directory, self.epoch))
            except DirectoryUnavailableError as error:
                future.set_exception(error)
        self.calls_of_turns.append(self.directory.calls - before)
        return wait_s

    def period(self) -> None:
        """Take turns until nothing is due, then let the time pass until something is."""
        while (wait_s := self.turn()) == 0.0:
            assert len(self.calls_of_turns) < 10_000
        self.now_s += wait_s

    def read(self, *chunks: ChunkKey) -> list[int]:
        return MemoryDirectory.count_users(self.directory, chunks)


@pytest.fixture
def turns() -> Turns:
    return Turns()


def test_only_present_users_are_stored_however_many_come_and_go(turns: Turns) -> None:
    per_period = 100
    chunks = chain("busy", 40 * per_period)
    for period in range(40):
        came = range(period * per_period, (period + 1) * per_period)
        turns.store.readers = {f"s{i}": (chunks[i],) for i in came}
        turns.store.readers |= {f"s{i - per_period}": () for i in came if i >= per_period}
        turns.period()
        assert turns.read(chunks[came[0]], chunks[came[-1]]) == [1, 1]
        assert turns.read(*chunks[: came[0]]) == [0] * came[0]
    counts = turns.counts
    assert len(counts._sessions) == len(counts._counts) == len(counts._reported) == per_period
    assert not counts._to_report


def test_a_user_that_left_before_it_was_reported_costs_no_call(turns: Turns) -> None:
    (chunk,) = chain("short", 1)
    turns.directory.loses_answers = True
    turns.store.soon = [chunk]  # the first job of a period asks, and fails
    turns.store.readers = {"s": (chunk,)}
    turns.period()
    turns.store.soon, turns.store.readers = [], {"s": ()}
    before = turns.directory.calls
    turns.period()
    assert turns.directory.calls == before
    assert not turns.counts._sessions
    assert not turns.counts._to_report


def test_a_job_makes_two_calls_at_most_and_leaves_every_other_turn_free(turns: Turns) -> None:
    first, then = chain("first", 1_000), chain("then", 1_000)
    turns.store.soon = first[:1]
    turns.store.readers = {f"s{i}": (chunk,) for i, chunk in enumerate(first)}
    turns.period()
    turns.store.readers = {f"s{i}": (chunk,) for i, chunk in enumerate(then)}
    turns.period()
    assert turns.read(*first) == [0] * 1_000
    assert turns.read(*then) == [1] * 1_000
    assert max(turns.calls_of_turns) == 2
    assert all(0 in pair for pair in pairwise(turns.calls_of_turns))


def test_a_report_without_an_answer_is_taken_back(turns: Turns) -> None:
    (chunk,) = chain("lost", 1)
    turns.directory.loses_answers = True
    turns.store.readers = {"s": (chunk,)}
    turns.period()
    assert turns.read(chunk) == [1], "it was heard, and the answer was lost"
    turns.directory.loses_answers = False
    turns.store.readers = {"s": ()}
    turns.period()
    assert turns.read(chunk) == [0]
    assert not turns.counts._reported


def test_after_a_failure_the_directory_is_not_asked_until_the_next_period(turns: Turns) -> None:
    turns.directory.loses_answers = True
    turns.store.readers = {"s": tuple(chain("gone", 1))}
    for period in range(1, 5):
        turns.period()
        assert turns.directory.calls == period


def test_the_number_of_sessions_is_bounded(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_users, "_MAX_SESSIONS", 3)
    chunks = chain("many", 5)
    for i in (0, 1, 2, 0, 3, 4):
        turns.store.readers = {f"s{i}": (chunks[i],)}
        turns.period()
    assert turns.read(*chunks) == [1, 0, 0, 1, 1], "those that changed longest ago were forgotten"
