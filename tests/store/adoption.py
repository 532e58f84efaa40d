"""A dead engine leaves an SSD, and an engine takes it over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig, Wanted
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd.space import model_directory
from tests.clock import Clock
from tests.store.filling import CHUNK, CHUNK_BYTES, FINGERPRINT, SIZES, Bench, chain, put, wait
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers

CHUNKS = chain("left", 3)
DEAD = 5
PEER_DEADLINE_S = 0.5
Copies = Mapping[ArtifactId, PeerCopy]
Bytes = npt.NDArray[np.uint8]


class Survivor:
    """An engine of the same model with an SSD of its own."""

    def __init__(self, root: Path, dram_chunks: int = 8, load_deadline_s: float = 10.0) -> None:
        self.clock = Clock()
        self.peers, self.recorder = KnownPeers(), Recorder()
        network = MemoryNetwork()
        self.store = ArtifactStore.open(
            SIZES,
            StoreConfig(
                dram_chunks * CHUNK_BYTES,
                root,
                32 * CHUNK_BYTES,
                load_deadline_s=load_deadline_s,
                peer_deadline_s=PEER_DEADLINE_S,
                adopt_from=root.parent,
                spill_delay_s=0.0,
            ),
            self.recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={},
            clock=self.clock,
            peers=PeerAccess(self.peers, lambda regions: MemoryPeers(network, regions)),
        )
        self._counted: dict[str, float] = {}

    def adopt(self, copies: Copies) -> Restore:
        """Restore CHUNKS as the directory says they were left."""
        return wait(self.begin(copies))

    def begin(self, copies: Copies) -> Restore:
        found = [StoredChunk(c, dict.fromkeys(SIZES, Tier.SSD)) for c in CHUNKS]
        return self.store.begin_restore([Wanted(t, found) for t in SIZES], copies)

    def count(self, name: str, tier: Tier | None = None) -> float:
        """All that was counted of a metric, of a tier or whatever its labels."""
        for key, number in (self.recorder.drain() or {}).get(COUNTERS, {}).items():
            self._counted[key] = self._counted.get(key, 0.0) + number
        label = "" if tier is None else f"tier={tier.value}"
        counted = self._counted.items()
        return sum(n for key, n in counted if key.startswith(f"{name}{{") and label in key)


def leave(root: Path) -> Copies:
    store = Bench(root).open()
    put(store, CHUNKS)
    assert store.flush(60)
    copies = records(store, root)
    store.close()
    return copies


def records(store: ArtifactStore, root: Path) -> Copies:
    with store.catalog.locked():
        found = list(store.catalog.tiers.index.artifacts())
    storage = str(model_directory(root, FINGERPRINT))
    return {
        a.id: PeerCopy(DEAD, -1, 0, a.size_bytes, a.checksum or b"", storage=storage) for a in found
    }
