"""A small tree of chunks, and an index over it."""

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, SlotRef, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.index import PrefixIndex
from hetero_connector.store.catalog.nodes import Artifact

DENSE, WINDOW = StateType.DENSE_KV, StateType.WINDOW_SWA

CHUNK = 256

_slots = iter(range(10**9))


def slot(tier: Tier, kind: StateType) -> SlotRef:
    return SlotRef(tier, kind, next(_slots), 1)


class Tree:
    """An index and the artifacts it offered."""

    def __init__(self) -> None:
        self.offered: list[Artifact] = []
        self.index = PrefixIndex(CHUNK, self.offered.append)

    def put(
        self, chunk: ChunkRange, kind: StateType = DENSE, tiers: tuple[Tier, ...] = (Tier.DRAM,)
    ) -> Artifact:
        artifact = self.index.add(chunk, kind, 100)
        for tier in tiers:
            self.index.attach(artifact, slot(tier, kind), 0)
        self.index.seal(artifact)
        return artifact


def chunk(name: str, parent: ChunkRange | None = None, tokens: int = CHUNK) -> ChunkRange:
    start = parent.end if parent else 0
    key = ChunkKey(name.encode().ljust(16))
    return ChunkRange(key, parent.key if parent else ROOT, start, start + tokens)


A = chunk("a")

B = chunk("b", A)

C = chunk("c", B)
