"""A process with a store of its own that peers read: what an engine is to the others."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import psutil

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.peers.ports import PeerAccess
from tests.store.filling import CHUNK, DENSE, FINGERPRINT, WINDOW, chain, contents, forget_all
from tests.waiting import until

BIG = {DENSE: (1 << 20) + 5, WINDOW: 200_000}
CHUNKS = chain("shared", 3)
_SLOTS = (1 << 20) + 4_096 + 204_800

Told = tuple[bytes, dict[ArtifactId, PeerCopy]]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["hetero_connector.store.peers.ports", "nixl"])


def open_store(peers: KnownPeers, chunks: int = 8, **config: object) -> ArtifactStore:
    return ArtifactStore.open(
        BIG,
        StoreConfig(chunks * _SLOTS, spill_delay_s=0.0, **config),  # type: ignore[arg-type]
        Recorder(),
        chunk_tokens=CHUNK,
        fingerprint=FINGERPRINT,
        description={},
        peers=PeerAccess(peers),
    )


def right(chunk: ChunkRange) -> dict[object, np.ndarray]:
    """The bytes of a chunk's artifacts."""
    return {kind: contents(ArtifactId(chunk.key, kind), size) for kind, size in BIG.items()}


class Writer:
    """Saves chains into a store, from bytes made once."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._bytes: dict[bytes, dict[object, np.ndarray]] = {}

    def put(self, chunks: list[ChunkRange]) -> None:
        for chunk in chunks:
            known = self._bytes.setdefault(chunk.key, {}) or right(chunk)
            self._bytes[chunk.key] = known
            save = self._store.begin_save(chunk, BIG)
            assert save is not None
            for kind, offset in save.offsets.items():
                self._store.arena.view[offset : offset + BIG[kind]] = known[kind]
            self._store.complete_save(save)

    def exported(self, epoch: int, chunks: list[ChunkRange]) -> dict[ArtifactId, PeerCopy]:
        """Waits until the chunks' artifacts are exported; where they are."""
        copies: dict[ArtifactId, PeerCopy] = {}
        wanted = {ArtifactId(c.key, kind) for c in chunks for kind in BIG}

        def take() -> bool:
            for change in self._store.sharing.take_exports():
                key, copy = ArtifactId(change.chunk.key, change.state_type), change.copy
                if copy is not None and key in wanted:
                    copies[key] = PeerCopy(
                        epoch, copy.dram_offset, copy.generation, copy.size_bytes, copy.checksum
                    )
            return len(copies) == len(wanted)

        until(take)
        return copies


def serve(pipe: Connection, epoch: int, churns: bool) -> None:
    """Runs in the owner's process: tells where CHUNKS are; churning, again and again."""
    store = open_store(KnownPeers(), chunks=6)
    store.sharing.serve_under(epoch)
    writer = Writer(store)
    writer.put(CHUNKS)
    pipe.send((store.sharing.card, writer.exported(epoch, CHUNKS)))
    rng = np.random.default_rng(epoch)
    others = [chain(f"other {i}", 3) for i in range(4)]
    while churns:
        time.sleep(float(rng.random()) * 0.02)
        forget_all(store)
        store.sharing.take_exports()
        writer.put(others[int(rng.integers(4))][: int(rng.integers(1, 4))])
        writer.put(CHUNKS)
        pipe.send((store.sharing.card, writer.exported(epoch, CHUNKS)))
    pipe.recv()
    store.close()
    pipe.send(True)


class Engine:
    """One such process, under one epoch."""

    def __init__(self, epoch: int, *, churns: bool = False) -> None:
        self.epoch = epoch
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, epoch, churns), daemon=True)
        self._process.start()
        self._told: Told | None = None

    def told(self) -> Told:
        """The latest that it told: its card and where CHUNKS are."""
        while self._told is None or self._pipe.poll():
            self._told = self._pipe.recv()
        return self._told

    def register(self, peers: KnownPeers) -> Mapping[ArtifactId, PeerCopy]:
        """Answer as a directory does: its card is known while its lease lasts; where CHUNKS are."""
        card, copies = self.told()
        peers.cards[self.epoch] = card
        return copies

    def close(self) -> bool:
        self._pipe.send("close")
        return bool(self._pipe.recv())

    def stop(self) -> None:
        """Engine and peer process, as when the whole machine stops."""
        for process in self._processes():
            process.suspend()
            until(lambda p=process: p.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]

    def resume(self) -> None:
        for process in self._processes():
            process.resume()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _processes(self) -> list[psutil.Process]:
        engine = psutil.Process(self._process.pid)
        return [engine, *engine.children()]


@contextmanager
def engines(*epochs: int, churns: bool = False) -> Iterator[list[Engine]]:
    """Processes started side by side."""
    started = [Engine(epoch, churns=churns) for epoch in epochs]
    try:
        yield started
    finally:
        for engine in started:
            engine.kill()
