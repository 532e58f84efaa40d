"""A limit on a day's writes decides which chunks reach the SSD."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.record import ChunkRange
from hetero_connector.metrics import COUNTERS, GAUGES
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.admission import Admission, expected_reuse
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_prefill_seconds
from hetero_connector.store.catalog.write_budget import DAY_S, WriteBudget
from hetero_connector.store.io_thread import IoThread
from tests.clock import Clock
from tests.store.filling import (
    CHUNK_BYTES,
    DENSE,
    SIZES,
    WINDOW,
    Bench,
    Disk,
    begin,
    chain,
    ids_of,
    put,
)
from tests.waiting import until

pytestmark = pytest.mark.long

BUCKETS_A_DAY = 8


class Written:
    """A store whose I/O thread runs only when told, over a budget counted in chunks."""

    def __init__(self, root: Path, chunks_a_day: float | None, **sizes: object) -> None:
        self.clock = Clock(0.0)
        self.bench = Bench(root / "ssd", Disk(), self.clock)
        self.budget = None if chunks_a_day is None else int(chunks_a_day * CHUNK_BYTES)
        self.sizes = sizes
        self.open()

    def open(self) -> None:
        self.store = self.bench.open(
            ssd_write_bytes_per_day=self.budget,
            run_io=False,
            **self.sizes,  # type: ignore[arg-type]
        )

    def settle(self) -> None:
        """Let the I/O thread do all it has to do, the half-minute's round included."""
        io_thread, writes = self.io_thread, self.store.catalog.writes
        io_thread.housekeep()
        while io_thread.step() or len(writes) or writes.num_writing:
            pass

    @property
    def io_thread(self) -> IoThread:
        assert self.store.io_thread is not None
        return self.store.io_thread

    def put(self, chunks: Iterable[ChunkRange]) -> None:
        put(self.store, chunks)
        self.settle()

    def use(self, chunks: Sequence[ChunkRange]) -> None:
        """Restore what is there, and let go again."""
        found = self.store.match(chunks)
        restore = begin(self.store, (i for x in found for i in ids_of([x.chunk], x.tiers)))
        while not restore.poll():
            self.io_thread.step()
        assert set(restore.failed.values()) <= {Failure.NO_SLOT}
        restore.release()
        self.settle()

    def on_ssd(self, chunks: Iterable[ChunkRange]) -> int:
        """The number of the chunks that are on SSD with all their state."""
        return sum(set(SIZES) <= self.kinds_on_ssd(c) for c in chunks)

    def kinds_on_ssd(self, chunk: ChunkRange) -> set[StateType]:
        node = self.store.catalog.tiers.index.nodes.get(chunk.key)
        artifacts = () if node is None else node.artifacts.values()
        return {a.state_type for a in artifacts if a.ssd is not None}

    def restart(self) -> None:
        self.io_thread.start()
        self.store.close()
        self.open()


@pytest.fixture
def opened(tmp_path: Path) -> Iterable[list[Written]]:
    stores: list[Written] = []
    yield stores
    for written in stores:
        written.io_thread.start()
        written.store.close()


def written(
    opened: list[Written], root: Path, chunks_a_day: float | None, **sizes: object
) -> Written:
    opened.append(Written(root, chunks_a_day, **sizes))
    return opened[-1]


def test_without_a_budget_everything_is_written(opened: list[Written], tmp_path: Path) -> None:
    w = written(opened, tmp_path, None)
    chunks = chain("a", 8)
    w.put(chunks)
    assert w.on_ssd(chunks) == 8
    assert w.bench.counts("heterocache_ssd_writes_refused") == {}


def test_everything_is_written_while_the_bucket_is_half_full(
    opened: list[Written], tmp_path: Path
) -> None:
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY)
    chunks = chain("a", 4)
    w.put(chunks)
    assert w.on_ssd(chunks) == 4


def test_of_equals_the_last_half_of_the_bucket_takes_none(
    opened: list[Written], tmp_path: Path
) -> None:
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY, dram_chunks=16)
    firsts = [chain(f"{i}", 1)[0] for i in range(12)]
    for c in firsts:
        w.put([c])
    assert [w.on_ssd([c]) for c in firsts] == [1] * 5 + [0] * 7
    assert w.bench.counts("heterocache_ssd_writes_refused") == {
        f"state_type={kind.value}": 7 for kind in SIZES
    }
    assert len(w.store.match(firsts[-1:])) == 1, "in DRAM, as before"


def test_what_was_refused_is_written_once_it_has_been_used(
    opened: list[Written], tmp_path: Path
) -> None:
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY, dram_chunks=16)
    w.put([chain(f"{i}", 1)[0] for i in range(8)])
    late = chain("late", 2)
    w.put(late)
    assert w.on_ssd(late) == 0
    w.use(late)
    assert w.on_ssd(late) == 2
    w.restart()
    assert len(w.store.match(late)) == 2


def test_what_has_been_used_is_written_though_the_engine_turned_out_to_be_faster(
    opened: list[Written], tmp_path: Path
) -> None:
    speed = 10.0
    saved = SecondsSaved(lambda tokens, context: speed * default_prefill_seconds(tokens, context))
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY, dram_chunks=16, seconds_saved=saved)
    w.put([chain(f"{i}", 1)[0] for i in range(8)])
    speed = 1.0
    late = chain("late", 2)
    w.put(late)
    w.use(late)
    assert w.on_ssd(late) == 2


def test_no_child_of_a_refused_chunk_is_written(opened: list[Written], tmp_path: Path) -> None:
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY, dram_chunks=16)
    w.put([chain(f"{i}", 1)[0] for i in range(8)])
    chunks = chain("late", 3)
    w.put(chunks[:1])
    for c in chunks[1:]:  # worth more than any before it, had it a parent
        w.store.catalog.tiers.index.nodes[c.parent].artifacts[DENSE].uses = 50
        w.put([c])
    assert [w.kinds_on_ssd(c) for c in chunks] == [set(), set(), set()]


def test_an_empty_bucket_writes_nothing_and_flush_and_close_end(
    opened: list[Written], tmp_path: Path
) -> None:
    w = written(opened, tmp_path, 2 * BUCKETS_A_DAY)
    budget = w.store.catalog.writes.admission.budget
    assert budget is not None
    assert budget.spend(2 * CHUNK_BYTES)
    assert w.io_thread.ssd is not None
    rows = w.io_thread.ssd.rows
    rows.prepare(lambda error: None, budget)
    until(lambda: rows.poll(patiently=True))
    w.io_thread.start()
    put(w.store, chain("a", 4))
    assert w.store.flush(60)
    w.store.close()
    assert w.bench.disk is not None
    assert w.bench.disk.written_bytes == 0
    w.open()
    assert w.store.match(chain("a", 4)) == [], "the next engine has not more to spend"
    w.put(chain("b", 1))
    assert w.bench.disk.written_bytes == 0


def test_every_attempt_of_a_failing_write_is_paid_for(
    opened: list[Written], tmp_path: Path
) -> None:
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY)
    assert w.bench.disk is not None
    w.bench.disk.files.fail_next(2)
    put(w.store, chain("a", 1))

    def written_after_a_while() -> bool:
        w.clock.now_s += 0.1
        w.io_thread.step()
        return w.on_ssd(chain("a", 1)) == 1

    until(written_after_a_while)
    budget = w.store.catalog.writes.admission.budget
    assert budget is not None
    assert budget.spent_today_bytes == 3 * CHUNK_BYTES == w.bench.disk.written_bytes


def test_what_found_no_slot_costs_nothing(opened: list[Written], tmp_path: Path) -> None:
    w = written(opened, tmp_path, 8 * BUCKETS_A_DAY)
    with patch.object(w.store.catalog.tiers, "take_ssd", return_value=None):
        w.put(chain("a", 1))
    budget = w.store.catalog.writes.admission.budget
    assert budget is not None
    assert budget.spent_today_bytes == 0
    assert budget.fullness == 1


class Choice:
    """An `Admission` over artifacts made by hand, its bucket as full as told."""

    def __init__(self, fullness: float, recent: Iterable[float]) -> None:
        self.budget = WriteBudget(BUCKETS_A_DAY * 100 * 4096, Clock(0.0), Clock(0.0))
        self.budget.spend(round((1 - fullness) * self.budget.burst_bytes))
        self.admission = Admission(self.budget, lambda artifact: 1.0)
        self.admission._recent.extend(recent)

    def admits(self, *artifacts: Artifact) -> list[bool]:
        admitted = self.admission.admit(artifacts)
        return [a in admitted for a in artifacts]


def node(parent: Node | None, *kinds: StateType, uses: int = 0) -> Node:
    """A chunk whose artifacts have one block each."""
    above = parent or Node(ChunkRange(*[bytes(16)] * 2, 0, 0), None)  # type: ignore[list-item]
    (chunk,) = chain(random.randbytes(4).hex(), 1, parent.chunk if parent else None)
    made = Node(chunk, above)
    above.num_children += 1
    for kind in kinds:
        artifact = made.artifacts[kind] = Artifact(made, kind, 4096)
        artifact.uses = uses
    return made


WORTH = 1 / 4096
"""The worth of a new chunk under the root: one use, one second, one block."""


@pytest.mark.parametrize(
    ("fullness", "share_below", "admitted"),
    [(0.6, 0.0, True), (0.4, 0.1, False), (0.4, 0.3, True), (0.1, 0.7, False), (0.1, 0.9, True)],
)
def test_the_threshold_moves_with_the_bucket(
    fullness: float, share_below: float, admitted: bool
) -> None:
    below = round(100 * share_below)
    choice = Choice(fullness, [WORTH / 2] * below + [WORTH * 2] * (100 - below))
    assert choice.admits(node(None, DENSE).artifacts[DENSE]) == [admitted]


def test_a_chunk_s_state_is_judged_as_a_whole() -> None:
    """One of the two types alone would be worth twice as much a byte."""
    both = node(None, DENSE, StateType.COMPRESSED_HCA)
    choice = Choice(0.25, [WORTH * 0.75] * 100)
    assert choice.admits(*both.artifacts.values()) == [False, False]
    assert choice.admits(node(None, DENSE).artifacts[DENSE]) == [True]


def test_boundary_state_is_written_only_where_its_chunk_is() -> None:
    choice = Choice(0.25, [WORTH * 0.75] * 100)
    whole = node(None, DENSE, WINDOW)
    assert choice.admits(whole.artifacts[WINDOW]) == [False], "its chunk is in DRAM only"
    assert choice.admits(*whole.artifacts.values()) == [True, True]
    dear = node(None, DENSE, StateType.COMPRESSED_HCA, WINDOW)
    assert choice.admits(*dear.artifacts.values()) == [False, False, False]


def test_expected_reuse() -> None:
    shared = node(None, DENSE, uses=6)
    first, second = node(shared, DENSE, WINDOW, uses=2), node(shared, DENSE)
    assert expected_reuse(shared.artifacts[DENSE]) == 7
    assert expected_reuse(first.artifacts[DENSE]) == 1 + 2 + 6 / 2
    assert expected_reuse(second.artifacts[DENSE]) == 1 + 0 + 6 / 2
    assert expected_reuse(first.artifacts[WINDOW]) == 1 + 2 + 6 / 2, "the turn's end"
    node(first, DENSE)
    assert expected_reuse(first.artifacts[WINDOW]) == 2 + 0.1, "inside a chain"


class Session:
    """A conversation that grows by a chunk or two a turn; a one-shot has only one turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.length = 0

    def turn(self, store: ArtifactStore, w: Written, grow: int) -> None:
        before = chain(self.name, self.length)
        found = len(store.match(before))
        if found:
            w.use(before[:found])
        self.length += grow
        put(store, chain(self.name, self.length)[found:])


def test_two_days_of_sessions_stay_within_capacity_and_budget(
    opened: list[Written], tmp_path: Path
) -> None:
    """Sessions that come back, among twice as many requests that nobody follows up."""
    rng = random.Random(7)
    a_day = 160
    w = written(opened, tmp_path, a_day, dram_chunks=48, ssd_chunks=120)
    disk = w.bench.disk
    assert disk is not None
    sessions, one_shots = [Session(f"s{i}") for i in range(6)], 0
    written_at = [(0.0, 0)]
    for minute in range(0, 2 * 24 * 60, 10):
        w.clock.now_s = minute * 60.0
        if minute == 24 * 60:
            w.restart()
        for _ in range(2):
            one_shots += 1
            Session(f"one {one_shots}").turn(w.store, w, 2)
        session = rng.choice(sessions)
        if session.length > 10:
            session.length, session.name = 0, f"{session.name}+"
        session.turn(w.store, w, rng.randint(1, 2))
        w.settle()
        written_at.append((w.clock.now_s, disk.written_bytes))
        day_ago = max(b for at, b in written_at if at <= max(0.0, w.clock.now_s - DAY_S))
        assert disk.written_bytes - day_ago <= a_day * CHUNK_BYTES
        w.store.check_integrity()
    assert disk.written_bytes > 1.5 * a_day * CHUNK_BYTES, "the budget is used"
    session_returned = [c for s in sessions for c in chain(s.name, s.length)]
    nobody = [c for i in range(one_shots - 100, one_shots) for c in chain(f"one {i}", 2)]
    # Written first come, first served, it is none of the one and a fifth of the other.
    assert w.on_ssd(session_returned) > len(session_returned) / 2
    assert w.on_ssd(nobody) < len(nobody) / 50
    payload = w.bench.recorder.drain() or {}
    today = payload[GAUGES]["heterocache_ssd_written_24h_bytes{}"]
    assert 0 < today <= a_day * CHUNK_BYTES
    assert payload[GAUGES]["heterocache_ssd_write_budget_bytes{}"] == a_day * CHUNK_BYTES
    refused = payload[COUNTERS]["heterocache_ssd_writes_refused{state_type=dense_kv}"]
    spilled = payload[COUNTERS]["heterocache_ssd_written_bytes{state_type=dense_kv}"] / SIZES[DENSE]
    assert refused > 3 * spilled, "it was not enough by far"
