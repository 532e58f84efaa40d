"""Scheduler sides that share a cache, whose steps the test runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import COUNTERS, split_key
from hetero_connector.spec import ModelSpec
from hetero_connector.store.peers.ports import PeerAccess
from ownership.directory import ArtifactRecord, ChainView
from ownership.directory.memory import MemoryDirectory
from ownership.member.fleet_worker import FleetWorker, MemberTimes
from tests.engine.stepped import CHUNK, Engine
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

LEASE_S = 30.0
WAIT_S = 60.0


class SlowDirectory(MemoryDirectory):
    """A directory whose lookups can be held back."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.fails = False
        self.asked = 0

    def lookup(self, chain: Sequence[ChunkKey]) -> ChainView:
        self.asked += 1
        self.answers.wait(WAIT_S)
        if self.fails:
            raise DirectoryUnavailableError("it is gone")
        return super().lookup(chain)


class Fleet:
    """Engines of one model on one directory and one network."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.network = MemoryNetwork()
        self.directory = SlowDirectory()
        self.engines: list[Engine] = []
        self.counted: dict[Engine, dict[str, float]] = {}

    def join(self, name: str, dram_bytes: int = 1 << 20, **given: Any) -> Engine:
        recorder_of = _Recorders()
        times = MemberTimes(
            LEASE_S,
            call_s=0.1,
            lookup_s=given.pop("lookup_s", 5.0),
            listing_ttl_s=given.pop("listing_ttl_s", 60.0),
        )
        worker = FleetWorker(
            self.directory,
            name,
            times,
            recorder_of,  # type: ignore[arg-type]
        )
        access = PeerAccess(
            worker.peers, lambda regions: MemoryPeers(self.network, regions), worker.wake
        )
        engine = Engine(
            self.model,
            dram_bytes,
            fleet=worker,
            peers=access,
            spill_delay_s=0.0,
            peer_deadline_s=0.2,
            **given,
        )
        recorder_of.target = engine.recorder
        self.engines.append(engine)
        self.counted[engine] = {}
        until(lambda: name in {w.name for w in self.directory.workers().values()})
        until(lambda: worker._keeper.lease is not None)
        return engine

    def count(self, engine: Engine, name: str, **labels: str) -> float:
        """Return the value of an engine's counter, summed over labels."""
        counted = self.counted[engine]
        for key, number in (engine.recorder.drain() or {COUNTERS: {}})[COUNTERS].items():
            counted[key] = counted.get(key, 0.0) + number
        found = ((split_key(key), number) for key, number in counted.items())
        return sum(n for (who, has), n in found if who == name and labels.items() <= has.items())

    def records(self, engine: Engine) -> dict[ArtifactId, ArtifactRecord]:
        """Return the directory's records of everything that an engine stores."""
        stored = list(engine.store.catalog.tiers.index.artifacts())
        keys = [a.node.key for a in stored]
        view = MemoryDirectory.lookup(self.directory, keys)
        pairs = zip(stored, view.chunks, strict=True)
        return {a.id: chunk[a.state_type] for a, chunk in pairs if a.state_type in chunk}

    def settle(self, engine: Engine) -> None:
        """Wait until all that the engine stores is claimed and the engine knows the owners."""

        def judged() -> bool:
            stored = list(engine.store.catalog.tiers.index.artifacts())
            known = self.records(engine)
            return len(known) == len(stored) and all(a.token or a.replica for a in stored)

        until(judged)


class _Recorders:
    """A recorder that is set later: the engine makes its own after its fleet."""

    target: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name) if self.target is not None else lambda *_, **__: None


def chunk_bytes(fleet: Fleet) -> int:
    """Return the bytes that a chunk takes in a DRAM tier."""
    sizes = ArtifactLayout(fleet.model, CHUNK).max_bytes
    return sum(-(-size // 4096) * 4096 for size in sizes.values())


@contextmanager
def joined(model: ModelSpec) -> Iterator[Fleet]:
    made = Fleet(model)
    yield made
    made.directory.answers.set()
    made.network.stopped.clear()
    for engine in made.engines:
        engine.side.close()
        engine.store.check_integrity()
