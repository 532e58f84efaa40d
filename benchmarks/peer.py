"""Reads of another process's DRAM over NIXL and UCX, against a memcpy from shared memory.

    python -m benchmarks.peer --json

An owner process exports an arena, a memfd as in an engine of a fleet. Both sides have a peer
process, as engines do. The reference maps the arena into this process and copies the same blocks
one by one to the same places: the cost of a cache that shares memory on one host. Reads and copies
take turns; figures are medians of the ratios within a turn.

`limit` is the kernel's limit for one thread: the same blocks by `process_vm_readv` alone. Within a
host UCX reads by that call (CMA) and cannot be faster. `small` is one read of 4 KiB, from the call
to the observed end.

`restore` is a complete restore through the store: artifacts of 1 MiB are read, verified by
checksum, generation and epoch, and stored; against a plain memcpy of as many bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.known_peers import KnownPeers
from benchmarks.measure import Samples, machine_line, publish, rounded, table, timed
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import (
    ROOT,
    ArtifactId,
    ChunkKey,
    ChunkRange,
    StoredChunk,
    Tier,
)
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.arena import Arena, ArenaHandle
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.transfer.base import wait_for
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.units import MIB

BLOCKS = [16 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB]
FIGURE_BLOCK = MIB
_START_S = 120.0
_TIMEOUT_S = 60.0
TOTAL = 128 * MIB
EPOCH = 1
KIND = StateType.DENSE_KV
_SMALL_BYTES = 4 << 10
_SMALL_READS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; writes no results")
    arguments = parser.parse_args()
    samples = measure(3 if arguments.quick else 15)
    figures = rounded(figures_of(samples))
    transports = os.environ.get("UCX_TLS", "not set")
    text = f"{machine_line()}; medians; UCX_TLS {transports}\n\n{report(samples)}"
    details = {"seconds": samples.medians()}
    publish("peer", text, figures, details, as_json=arguments.json, write=not arguments.quick)


def measure(repeats: int) -> Samples:
    """Measure the seconds to move `TOTAL` bytes, by method and block size."""
    samples = Samples()
    with owner(export) as (metadata, handle, process_id, address):
        own, shared = Arena.create(TOTAL), Arena.attach(handle)
        peers = NixlPeers([own.shared])
        peers.connect("owner", metadata)
        for size in BLOCKS:
            # In random order, as the slots of a store that has run for a while.
            order = np.random.default_rng(size).permutation(TOTAL // size) * size
            copy = partial(copy_blocks, own.view, shared.view, order.tolist(), size)
            limit = partial(read_process, process_id, own.view, address, order.tolist(), size)
            read = partial(read_blocks, peers, order.tolist(), size)
            for turn in range(repeats + 1):
                seconds = {"memcpy": timed(copy), "limit": timed(limit)}
                own.view[:: 1 << 12] = 0
                seconds["peer"] = timed(read)
                if not np.array_equal(own.view[:: 1 << 12], shared.view[:: 1 << 12]):
                    raise RuntimeError("the bytes that were read are not those of the owner")
                for name, value in seconds.items() if turn else ():
                    samples.add(f"{name} {size}", value)
        for _ in range(repeats * _SMALL_READS):
            samples.add("small", timed(partial(read_blocks, peers, [0], _SMALL_BYTES)))
        peers.close()
    measure_restores(samples, repeats)
    return samples


def measure_restores(samples: Samples, repeats: int) -> None:
    """Measure restores through a store, each with a memcpy of as many bytes."""
    with owner(export_store) as (card, copies):
        known = KnownPeers()
        known.cards[EPOCH] = card
        store = open_store(known)
        chunks = [StoredChunk(chunk, {KIND: Tier.PEER}) for chunk in chain()]
        source, target = np.ones(TOTAL, np.uint8), np.ones(TOTAL, np.uint8)
        for turn in range(repeats + 1):
            copied_s = timed(lambda: np.copyto(target, source))
            restored_s = timed(lambda: restore(store, chunks, copies))
            forget_all(store)
            if turn:
                samples.add("memcpy restore", copied_s)
                samples.add("restore", restored_s)
        store.close()


def figures_of(samples: Samples) -> dict[str, float]:
    """Return the figures: bandwidths over that of the memcpy."""
    size = FIGURE_BLOCK
    return {
        "peer_over_memcpy": samples.paired_ratio(f"memcpy {size}", f"peer {size}"),
        "peer_over_limit": samples.paired_ratio(f"limit {size}", f"peer {size}"),
        "limit_over_memcpy": samples.paired_ratio(f"memcpy {size}", f"limit {size}"),
        "peer_restore_over_memcpy": samples.paired_ratio("memcpy restore", "restore"),
        "peer_gb_per_s": TOTAL / samples.median(f"peer {size}") / 1e9,
        "small_read_us": samples.median("small") * 1e6,
    }


def report(samples: Samples) -> str:
    """Return a table of bandwidths by block size."""
    rows = []
    for size in BLOCKS:
        row: list[object] = [f"{size >> 10} KiB"]
        row.append(f"{TOTAL / samples.median(f'memcpy {size}') / 1e9:.2f}")
        for name in ("limit", "peer"):
            row.append(f"{TOTAL / samples.median(f'{name} {size}') / 1e9:.2f}")
            row.append(f"{samples.paired_ratio(f'memcpy {size}', f'{name} {size}'):.2f}")
        rows.append(row)
    header = ["block", "memcpy GB/s"]
    for name in ("limit", "peer"):
        header += [f"{name} GB/s", "over memcpy"]
    whole = samples.paired_ratio("memcpy restore", "restore")
    speed = TOTAL / samples.median("restore") / 1e9
    return (
        f"{table(header, rows)}\n\nrestore of {TOTAL // MIB} artifacts of 1 MiB, verified: "
        f"{speed:.2f} GB/s, {whole:.2f} of a memcpy"
    )


def copy_blocks(target: np.ndarray, source: np.ndarray, offsets: list[int], size: int) -> None:
    for at in offsets:
        target[at : at + size] = source[at : at + size]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_process(
    process_id: int, target: np.ndarray, source: int, offsets: list[int], size: int
) -> None:
    """Read block by block from `source`, an address in another process. Raises OSError."""
    readv: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    for at in offsets:
        here = _Iovec(target.ctypes.data + at, size)
        there = _Iovec(source + at, size)
        moved = readv(process_id, ctypes.byref(here), one, ctypes.byref(there), one, none)
        if moved != size:
            raise OSError(ctypes.get_errno(), f"process_vm_readv moved {moved} of {size} bytes")


def read_blocks(peers: NixlPeers, offsets: list[int], size: int) -> None:
    extents = [PeerExtent(0, at, 0, at, size) for at in offsets]
    wait_for(peers.submit("owner", extents), _TIMEOUT_S)


def restore(
    store: ArtifactStore, chunks: list[StoredChunk], copies: dict[ArtifactId, PeerCopy]
) -> None:
    running = store.begin_restore([Wanted(KIND, chunks)], copies)
    while not running.poll():
        time.sleep(100e-6)
    if running.failed:
        raise RuntimeError(f"not everything was read: {set(running.failed.values())}")
    running.release()


def forget_all(store: ArtifactStore) -> None:
    """Evict all artifacts. A reset would not do: after it no peer is read any more."""
    with store.catalog.locked():
        for artifact in list(store.catalog.tiers.index.artifacts()):
            store.catalog.tiers.forget(artifact)


def chain() -> list[ChunkRange]:
    """Return chunks with one artifact of 1 MiB each."""
    chunks, key = [], ROOT
    for i in range(TOTAL // MIB):
        child = ChunkKey(hashlib.blake2b(key + bytes([i]), digest_size=16).digest())
        chunks.append(ChunkRange(child, key, 256 * i, 256 * (i + 1)))
        key = child
    return chunks


def open_store(peers: KnownPeers) -> ArtifactStore:
    return ArtifactStore.open(
        {KIND: MIB},
        StoreConfig(
            TOTAL, spill_delay_s=0.0, peer_deadline_s=30.0, load_deadline_s=30.0, shared=False
        ),
        Recorder(),
        chunk_tokens=256,
        fingerprint=b"benchmark",
        description={},
        peers=PeerAccess(peers),
    )


def export(pipe: Connection) -> None:
    """Export an arena, in the owner's process."""
    arena = Arena.create(TOTAL)
    arena.view[:] = np.random.default_rng(0).integers(0, 256, TOTAL, dtype=np.uint8)
    peers = NixlPeers([arena.shared])
    shared = ArenaHandle(arena.handle.path, TOTAL)
    pipe.send((peers.metadata, shared, os.getpid(), arena.view.ctypes.data))
    pipe.recv()
    peers.close()


def export_store(pipe: Connection) -> None:
    """Export a store with the chain, in the owner's process."""
    store = open_store(KnownPeers())
    sharing = store.sharing
    if sharing is None:
        raise RuntimeError("the store exports nothing: is NIXL installed?")
    sharing.serve_under(EPOCH)
    rng = np.random.default_rng(0)
    for chunk in chain():
        begun = store.begin_save(chunk, {KIND: MIB})
        if begun is None:
            raise RuntimeError("the store has no room for the chain")
        at = begun.offsets[KIND]
        store.arena.view[at : at + MIB] = rng.integers(0, 256, MIB, dtype=np.uint8)
        store.complete_save(begun)
    copies: dict[ArtifactId, PeerCopy] = {}
    while len(copies) < TOTAL // MIB:
        for change in sharing.take_exports():
            if change.copy is not None:
                copies[ArtifactId(change.chunk.key, KIND)] = PeerCopy(
                    EPOCH,
                    change.copy.dram_offset,
                    change.copy.generation,
                    change.copy.size_bytes,
                    change.copy.checksum,
                )
        time.sleep(0.001)
    pipe.send((sharing.card, copies))
    pipe.recv()
    store.close()


@contextmanager
def owner(run: Any) -> Iterator[Any]:
    """Run `run` in a process of its own; yield its first message."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # otherwise this process would not see the other end
    try:
        if not pipe.poll(_START_S):
            raise TimeoutError(f"the other process sent nothing for {_START_S:.0f} s")
        yield pipe.recv()
        pipe.send("end")
    finally:
        process.join(10)
        process.kill()


if __name__ == "__main__":
    main()
