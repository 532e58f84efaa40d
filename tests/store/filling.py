"""Chunks, artifacts with known bytes, and stores to put them in."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, ChunkRange, StoredChunk
from hetero_connector.errors import StoreError
from hetero_connector.metrics import COUNTERS, GAUGES, Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Save, StoreConfig, Wanted
from hetero_connector.store.catalog.prefetch_schedule import DEFAULT_COSTS, PrefetchCosts
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal_connection import Connect, connect
from hetero_connector.store.ssd.reader import SizeOf
from hetero_connector.transfer.base import Direction, Extent
from tests.clock import Clock
from tests.transfer.memory_files import MemoryFiles, MemoryTransfer
from tests.waiting import until

CHUNK = 256
DENSE, WINDOW = StateType.DENSE_KV, StateType.WINDOW_SWA
SIZES = {DENSE: 9_000, WINDOW: 3_000}
SLOTS = {DENSE: 12_288, WINDOW: 4_096}
CHUNK_BYTES = sum(SLOTS.values())
FINGERPRINT = b"f" * 16


def room_for(num_dense: int, num_windows: int) -> float:
    """Return the chunks' worth of DRAM that holds so many artifacts of each type and no more.

    One of each has a slot of its own; a zone holds one of dense state or three windows.
    """
    zones = num_dense - 1 + math.ceil((num_windows - 1) / 3)
    return 1 + zones * SLOTS[DENSE] / CHUNK_BYTES


def ssd_bytes_for(chunks: float, slots: Mapping[StateType, int] = SLOTS) -> int:
    """Return the `ssd_bytes` for a slab of so many chunks' worth: the rest is the journal's."""
    smallest = min(slots.values())
    slab = int(chunks * sum(slots.values()))
    return math.ceil(slab * (smallest + 512) / smallest * 16 / 15) + 64


def chain(name: str, count: int, parent: ChunkRange | None = None) -> list[ChunkRange]:
    """Return `count` full chunks after `parent`; their keys derive from `name`."""
    chunks = []
    key, start = (parent.key, parent.end) if parent else (ROOT, 0)
    for i in range(count):
        child = ChunkKey(hashlib.blake2b(f"{name}/{i}".encode() + key, digest_size=16).digest())
        chunks.append(ChunkRange(child, key, start, start + CHUNK))
        key, start = child, start + CHUNK
    return chunks


def ids_of(chunks: Iterable[ChunkRange], kinds: Iterable[StateType] = SIZES) -> list[ArtifactId]:
    return [ArtifactId(c.key, t) for c in chunks for t in kinds]


def begin(store: ArtifactStore, ids: Iterable[ArtifactId]) -> Restore:
    """Begin a restore of artifacts, column by column."""
    columns: dict[StateType, list[StoredChunk]] = {}
    for key, kind in ids:
        columns.setdefault(kind, []).append(answer(store, key))
    return store.begin_restore([Wanted(kind, chunks) for kind, chunks in columns.items()])


def answer(store: ArtifactStore, key: ChunkKey) -> StoredChunk:
    """Return the answer of `match` for the chunk; an outdated one if the store does not have it."""
    node = store.catalog.tiers.index.nodes.get(key)
    found = None if node is None else node.stored
    return found or StoredChunk(ChunkRange(key, ROOT, 0, CHUNK), {})


def contents(artifact_id: ArtifactId, size_bytes: int) -> npt.NDArray[np.uint8]:
    seed = int.from_bytes(artifact_id.chunk, "little") + list(StateType).index(
        artifact_id.state_type
    )
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def fill(store: ArtifactStore, save: Save) -> None:
    for kind, offset in save.offsets.items():
        size = save.sizes[kind]
        store.arena.view[offset : offset + size] = contents(ArtifactId(save.chunk.key, kind), size)


def put(
    store: ArtifactStore,
    chunks: Iterable[ChunkRange],
    sizes: Mapping[StateType, int] = SIZES,
) -> None:
    """Save whole chunks. There must be room for each, if need be after the I/O thread has made the
    checksums of earlier ones: until then it pins them."""
    for chunk in chunks:
        save = until(partial(store.begin_save, chunk, sizes), "there is no room")
        fill(store, save)
        store.complete_save(save)


def forget_all(store: ArtifactStore) -> None:
    """Drop everything, as eviction would: peers notice more of a reset."""
    with store.catalog.locked():
        used = set(store.catalog.tiers.pinned())
        for artifact in list(store.catalog.tiers.index.artifacts()):
            if artifact not in used and not artifact.forgotten:
                store.catalog.tiers.forget(artifact)


def wait(restore: Restore, timeout_s: float = 60.0) -> Restore:
    until(restore.poll, patience_s=timeout_s)
    return restore


def intact(store: ArtifactStore, restore: Restore) -> bool:
    """Return True if every artifact that arrived has its own bytes."""
    return all(
        np.array_equal(
            store.arena.view[at : at + SIZES[i.state_type]], contents(i, SIZES[i.state_type])
        )
        for i, at in restore.offsets.items()
    )


def assert_restored(store: ArtifactStore, chunks: Sequence[ChunkRange]) -> None:
    """Restore all artifacts of the chunks: each arrives, with its own bytes."""
    restore = wait(begin(store, ids_of(chunks)))
    assert not restore.failed
    assert intact(store, restore)
    restore.release()


def stored(store: ArtifactStore, chunks: Sequence[ChunkRange]) -> int:
    return len(store.match(chunks))


class CountedFiles(MemoryFiles):
    """Count in a `Disk` the bytes of every write, failed ones included."""

    disk: Disk

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> MemoryTransfer:
        if direction is Direction.WRITE:
            self.disk.written_bytes += sum(extent.size for extent in extents)
        return super().submit(direction, extents)


class Disk:
    """A slab in memory that outlives a store; each opening of a directory gets a `MemoryFiles`."""

    def __init__(self) -> None:
        self.written_bytes = 0
        self.slab = np.zeros(0, np.uint8)
        self.files: CountedFiles

    def __call__(self, memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> MemoryFiles:
        if not len(self.slab):
            self.slab = np.zeros(directory.geometry.size_bytes, np.uint8)
        self.files = CountedFiles(memory, [self.slab])
        self.files.disk = self
        return self.files


def slab_offset(store: ArtifactStore, artifact_id: ArtifactId) -> int:
    """Return where the SSD copy of an artifact begins in the slab."""
    tiers = store.catalog.tiers
    artifact = tiers.index.find(artifact_id)
    assert artifact is not None
    assert artifact.ssd is not None
    assert tiers.ssd is not None
    return tiers.ssd.offset(artifact.ssd)


class Bench:
    """Opens stores over one directory and keeps the latest recorder."""

    def __init__(
        self,
        root: Path | None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = connect,
    ) -> None:
        self.root = root
        self.disk = disk
        self.clock = clock
        self.connect = connect
        self.recorder = Recorder()
        self.size_of: SizeOf | None = None

    def open(
        self,
        dram_chunks: float = 8,
        ssd_chunks: float = 16,
        prefetch_costs: PrefetchCosts = DEFAULT_COSTS,
        seconds_saved: SecondsSaved = default_seconds_saved,
        peers: PeerAccess | None = None,
        *,
        run_io: bool = True,
        **config: object,
    ) -> ArtifactStore:
        self.recorder = Recorder()
        ssd_bytes = ssd_bytes_for(ssd_chunks) if self.root else 0
        values: dict[str, object] = {"spill_delay_s": 0.0, **config}
        return ArtifactStore.open(
            SIZES,
            StoreConfig(int(dram_chunks * CHUNK_BYTES), self.root, ssd_bytes, **values),  # type: ignore[arg-type]
            self.recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            clock=self.clock,
            prefetch_costs=prefetch_costs,
            seconds_saved=seconds_saved,
            peers=peers,
            connect=self.connect,
            size_of=self.size_of,
            run_io=run_io,
            **({"open_transfer": self.disk} if self.disk else {}),
        )

    def counts(self, name: str) -> dict[str, float]:
        """Return the counters and gauges of a name since the last call, by label text."""
        payload = self.recorder.drain() or {}
        found = {**payload.get(COUNTERS, {}), **payload.get(GAUGES, {})}
        return {k[len(name) + 1 : -1]: v for k, v in found.items() if k.startswith(name + "{")}


class ClockedStore:
    """A store with room for so many chunks in DRAM, and a clock that the test sets."""

    def __init__(self, dram_chunks: int, root: Path | None = None) -> None:
        self.clock = Clock()
        bench = Bench(root, Disk() if root else None, self.clock)
        self.store = bench.open(dram_chunks=dram_chunks)


class Beside:
    """A stand-in for `background.in_background`: it makes each call at once, or holds it back."""

    def __init__(self) -> None:
        self._calls_left = math.inf
        self._failures = 0
        self._held: list[tuple[Callable[[], object], Future[object]]] = []

    def __call__(self, call: Callable[[], object]) -> Future[object]:
        ended = Future[object]()
        self._calls_left -= 1
        if self._failures:
            self._failures -= 1
            ended.set_exception(StoreError("disk I/O error"))
        elif self._calls_left < 0:
            self._held.append((call, ended))
        else:
            _make(call, ended)
        return ended

    def hang_after(self, calls: int) -> None:
        """Hold back all calls after this number of them, until `resume`."""
        self._calls_left = calls

    def fail_next(self, count: int) -> None:
        """Fail the next `count` calls without making them."""
        self._failures = count

    def calm(self) -> None:
        """Let new calls succeed; those held back stay so."""
        self._calls_left, self._failures = math.inf, 0

    def drop(self) -> None:
        """Drop the calls held back: their process has ended."""
        self._held.clear()

    @property
    def is_stuck(self) -> bool:
        """Return whether a call is held back."""
        return bool(self._held)

    def resume(self) -> None:
        """Make the calls held back, and hold back no more."""
        self._calls_left = math.inf
        held, self._held = self._held, []
        for call, ended in held:
            _make(call, ended)


def _make(call: Callable[[], object], ended: Future[object]) -> None:
    try:
        ended.set_result(call())
    except Exception as error:
        ended.set_exception(error)
