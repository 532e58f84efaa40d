"""`python -m benchmarks.faults [--json]`: rounds of injected faults, and the cost of big tiers.

`rounds`, and among them `wrong_answers`, `hangs`, `engine_deaths` and `stuck`, which must be 0: see
`tests/faults`. `open_s_per_million_rows`: seconds to open an SSD tier. `bytes_per_chunk`: memory of
its index for a chunk of two state types. `gc_pause_ms`: the longest garbage collection with half a
million chunks, after loading them and while more are added. `evict_us_4000_holds`: the mean time
of an eviction while 4,000 restores wait. Times are processor seconds of the measuring thread, so
other processes on the machine do not matter. Only a run with the default options writes results.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.measure import is_default, machine_line, publish, rounded, table
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, SlotRef, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.slots import SlotPool
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.garbage import Freezer
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalMeta, JournalRow
from hetero_connector.store.ssd.tier import adopt_journal
from tests.faults.campaign import run_campaign

KINDS = (StateType.DENSE_KV, StateType.WINDOW_SWA)
SLOT_BYTES = dict.fromkeys(KINDS, 4096)
CHUNK = 256
TURN = 64
"""Chunks per chain."""
RESTORES = 4_000
EVICTIONS = 500
GROWTH = 65_536
"""Chunks that are added while collections are timed."""


@dataclass(frozen=True)
class BigTier:
    """The cost of opening an SSD tier and adding to it."""

    rows: int
    open_s: float
    memory_bytes: int
    """Memory that the process allocated for it."""
    full_collection_s: float
    """A full garbage collection right after opening."""
    longest_collection_s: float
    """The longest collection while chunks were added."""

    @property
    def open_s_per_million_rows(self) -> float:
        return self.open_s / self.rows * 1e6

    @property
    def bytes_per_chunk(self) -> float:
        return self.memory_bytes / self.rows * len(KINDS)


def open_big_tier(rows: int = 1_000_000) -> BigTier:
    """Write a journal of `rows` rows, open it, and add `GROWTH` chunks."""
    count = rows // len(KINDS)
    room = (count + GROWTH) * 17 // 16  # some of it is in zones that are partly free
    geometry = SlotGeometry.by_use(SLOT_BYTES, room * sum(SLOT_BYTES.values()))
    meta = JournalMeta(b"f" * 16, geometry)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = Journal.open(path, meta)
        new = _rows(count, SlotPool(Tier.SSD, geometry))
        while batch := list(islice(new, 100_000)):
            journal.record(batch)
        del batch
        journal.close()
        tiers = Tiers(CHUNK, SlotGeometry(1, SLOT_BYTES), geometry, Recorder())
        gc.collect()
        before_bytes = _resident_bytes()

        def open_it() -> None:
            directory: Any = SimpleNamespace(path=path, journal=Journal.open(path, meta))
            adopt_journal(directory, tiers)
            directory.journal.close()

        open_s = _busy(open_it)
        memory_bytes = _resident_bytes() - before_bytes
    if len(tiers.index.nodes) != count + 1:
        raise RuntimeError("not every row was adopted")
    full_s = _busy(gc.collect)
    freezer = Freezer(tiers.index)
    freezer.start()
    with _collections() as pauses_s:
        _grow(tiers)
    freezer.stop()
    gc.unfreeze()
    return BigTier(rows, open_s, memory_bytes, full_s, max(pauses_s, default=0.0))


@dataclass(frozen=True)
class Evictions:
    """Seconds per eviction while `RESTORES` restores wait."""

    mean_s: float
    worst_s: float
    median_s: float


def evict_under_restores() -> Evictions:
    """Fill a DRAM tier, begin restores of three quarters of it, then save more chunks."""
    count = RESTORES
    store = ArtifactStore.open(
        SLOT_BYTES,
        StoreConfig(dram_bytes=count * sum(SLOT_BYTES.values())),
        Recorder(),
        chunk_tokens=CHUNK,
        fingerprint=b"f" * 16,
        description={},
    )
    chunks = [ChunkRange(_key(n), ROOT, 0, CHUNK) for n in range(1, count + EVICTIONS + 1)]
    for chunk in chunks[:count]:
        _save(store, chunk)
    restores = []
    for number in range(RESTORES):
        found = store.match([chunks[number % (3 * count // 4)]])
        restores.append(store.begin_restore([Wanted(kind, found) for kind in KINDS]))
    seconds = [_busy(lambda chunk=chunk: _save(store, chunk)) for chunk in chunks[count:]]  # type: ignore[misc]
    for restore in restores:
        restore.release()
    store.close()
    # Each save evicts one artifact of each type.
    each_s = [x / len(KINDS) for x in seconds]
    return Evictions(statistics.fmean(each_s), max(each_s), statistics.median(each_s))


def _save(store: ArtifactStore, chunk: ChunkRange) -> None:
    save = store.begin_save(chunk, SLOT_BYTES)
    if save is None:
        raise RuntimeError("there was nothing to evict")
    store.complete_save(save)


def _rows(count: int, pool: SlotPool) -> Iterator[JournalRow]:
    parent, start = ROOT, 0
    above: dict[StateType, SlotRef] = {}
    for number in range(count):
        chunk = ChunkRange(_key(number + 1), parent, start, start + CHUNK)
        for kind in KINDS:
            checksum = hashlib.blake2b(b"%s%d" % (kind.value.encode(), number), digest_size=16)
            ref = pool.take(kind, above.get(kind))
            assert ref is not None
            above[kind] = ref
            yield JournalRow(chunk, kind, ref.slot, 1, 3_000, checksum.digest(), float(number))
        parent, start = (chunk.key, chunk.end) if (number + 1) % TURN else (ROOT, 0)


def _grow(tiers: Tiers) -> None:
    """Add chunks as an engine does that saves and writes them; nothing is evicted."""
    assert tiers.ssd is not None
    parent, start = ROOT, 0
    for number in range(GROWTH):
        chunk = ChunkRange(_key(1 << 40 | number), parent, start, start + CHUNK)
        for kind in KINDS:
            artifact = tiers.index.add(chunk, kind, 3_000)
            ref = tiers.ssd.take(kind)
            assert ref is not None
            tiers.attach(artifact, ref)
            artifact.last_used, artifact.checksum = tiers.tick(), os.urandom(16)
            tiers.index.seal(artifact)
        parent, start = (chunk.key, chunk.end) if (number + 1) % TURN else (ROOT, 0)


def _key(number: int) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest())


@contextmanager
def _collections() -> Iterator[list[float]]:
    """Collect the seconds of each garbage collection that Python starts itself."""
    seconds: list[float] = []
    began_s = 0.0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        else:
            seconds.append(time.thread_time() - began_s)

    gc.callbacks.append(on_collection)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(on_collection)


def _busy(job: Callable[[], object]) -> float:
    began_s = time.thread_time()
    job()
    return time.thread_time() - began_s


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1_000_000, help="journal rows of the big tier")
    arguments = parser.parse_args()
    tier = open_big_tier(arguments.rows)
    evictions = evict_under_restores()
    campaign = run_campaign(arguments.rounds, arguments.seed)
    pause_s = max(tier.full_collection_s, tier.longest_collection_s)
    counted = {
        "rounds": campaign.rounds,
        "wrong_answers": campaign.wrong_answers,
        "hangs": campaign.hangs,
        "engine_deaths": campaign.engine_deaths,
        "stuck": campaign.stuck,
    }
    measured = {
        "open_s_per_million_rows": tier.open_s_per_million_rows,
        "bytes_per_chunk": tier.bytes_per_chunk,
        "gc_pause_ms": 1e3 * pause_s,
        "evict_us_4000_holds": 1e6 * evictions.mean_s,
    }
    figures = counted | rounded(measured)
    rows = [
        ["a million journal rows", f"{tier.open_s_per_million_rows:.2f} s to open"],
        ["a chunk of two types on SSD", f"{tier.bytes_per_chunk:.0f} bytes of memory"],
        ["a full collection after opening", f"{1e3 * tier.full_collection_s:.1f} ms"],
        ["the longest collection while it grows", f"{1e3 * tier.longest_collection_s:.1f} ms"],
        [
            f"an eviction while {RESTORES:,} restores wait",
            f"{1e6 * evictions.mean_s:.1f} us (mean)",
        ],
        [f"the median of {EVICTIONS} evictions", f"{1e6 * evictions.median_s:.1f} us"],
        ["the longest, which is the first", f"{1e6 * evictions.worst_s:.1f} us"],
        ["rounds with faults", f"{campaign.rounds:,}"],
        *([name.replace("_", " "), str(counted[name])] for name in list(counted)[1:]),
    ]
    text = f"{machine_line()}; {arguments.rows:,} rows\n\n{table(['measured', 'value'], rows)}"
    details = {"tier": vars(tier), "evictions": vars(evictions), "findings": campaign.findings}
    write = is_default(parser, arguments, free=("json",))
    publish("faults", text, figures, details, as_json=arguments.json, write=write)


if __name__ == "__main__":
    main()
