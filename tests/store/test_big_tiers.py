"""A big SSD tier holds nothing up while it is opened, and its index takes little."""

from __future__ import annotations

import gc
import sqlite3
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.nodes import Artifact, Node, index_bytes
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.directory_lock import is_locked
from hetero_connector.store.ssd.journal_connection import connect
from hetero_connector.store.ssd.journal_format import RowValues, as_row
from hetero_connector.store.ssd.tier import adopt_rows
from tests.store.filling import CHUNK, DENSE, FINGERPRINT, SLOTS, WINDOW

CHAINS, DEPTH = 32, 64
CHUNKS = CHAINS * DEPTH


def rows() -> Iterator[RowValues]:
    """`CHAINS` sessions, as a journal lists them: parents first, equal values not shared."""
    for depth in range(DEPTH):
        for session in range(CHAINS):
            slot = session * DEPTH + depth
            for kind in (DENSE, WINDOW):
                key = b"%16d" % (slot + 1)
                parent = b"%16d" % slot if depth else bytes(ROOT)
                start, end = depth * CHUNK, (depth + 1) * CHUNK
                checksum = b"%15d " % slot
                yield key, parent, start, end, kind, slot, 1, 3_000, checksum, 1.0 * slot, 0


def empty() -> Tiers:
    return Tiers(CHUNK, SlotGeometry(1, SLOTS), SlotGeometry(CHUNKS, SLOTS), Recorder())


def test_a_chunk_on_ssd_takes_little_memory() -> None:
    tiers = empty()
    gc.collect()
    tracemalloc.start()
    try:
        assert adopt_rows(rows(), tiers) == []
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tiers.check_integrity()
    assert len(tiers.index.nodes) == CHUNKS + 1
    assert taken / CHUNKS < 1_700
    assert taken < index_bytes(CHUNKS, 2) < 2 * taken, "what the doctor counts"


def test_a_chunk_on_ssd_has_few_objects_that_a_collection_looks_at() -> None:
    tiers = empty()
    gc.collect()
    before = len(gc.get_objects())
    adopt_rows(rows(), tiers)
    gc.collect()
    assert (len(gc.get_objects()) - before) / CHUNKS < 9


def test_only_what_may_leave_waits_for_its_eviction() -> None:
    tiers = empty()
    adopt_rows(rows(), tiers)
    assert len(tiers._policies[Tier.SSD, DENSE].soon(CHUNKS)) == CHAINS
    new = tiers.index.add(ChunkRange(ChunkKey(b"new".ljust(16)), ROOT, 0, CHUNK), DENSE, 3_000)
    for _ in range(CHUNKS):
        assert tiers.take_ssd(new, None), "each is offered once what rested on it has left"
    assert tiers.take_ssd(new, None) is None
    tiers.forget(new)
    tiers.check_integrity()


def test_no_row_is_read_while_other_engines_wait_for_this_one_to_open(tmp_path: Path) -> None:
    looks: list[bool] = []

    def look() -> int:
        looks.append(is_locked(tmp_path / ".lock"))
        return 0

    def watched(path: Path, mode: str) -> sqlite3.Connection:
        connection = connect(path, mode)
        # Called whenever SQLite has done as much as it takes to read some dozens of rows.
        connection.set_progress_handler(look, 1_000)
        return connection

    directory = SsdDirectory.open(tmp_path, FINGERPRINT, SLOTS, 64 << 20)
    directory.journal.record(as_row(values) for values in rows())
    directory.close()
    (directory.path / "slots.slab").unlink()
    directory = SsdDirectory.open(tmp_path, FINGERPRINT, SLOTS, 64 << 20, {}, watched)
    assert len(looks) > 20, "the rows were read"
    assert not any(looks)
    assert directory.journal.count() == 0
    directory.close()


def in_memory(*types: type) -> int:
    return sum(type(x) in types for x in gc.get_objects())


def test_what_the_index_forgets_is_freed_without_a_collection() -> None:
    cleared, emptied = empty(), empty()
    gc.collect()
    gc.disable()
    try:
        before = in_memory(Node, Artifact)
        adopt_rows(rows(), cleared)
        adopt_rows(rows(), emptied)
        assert in_memory(Node, Artifact) - before == 2 * 3 * CHUNKS
        cleared.clear()
        first = ChunkRange(ChunkKey(b"new".ljust(16)), ROOT, 0, CHUNK)
        new = emptied.index.add(first, DENSE, 3_000)
        while emptied.take_ssd(new, None):
            pass
        assert in_memory(Node, Artifact) - before < CHUNKS // 10, "but for a few in the heaps"
    finally:
        gc.enable()
