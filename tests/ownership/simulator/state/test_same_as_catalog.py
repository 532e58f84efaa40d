"""A simulated tier of runs holds exactly the chunks that the engine's own catalog would hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName, Save, StoreConfig, Wanted
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.eviction import make_policy
from hetero_connector.store.catalog.seconds_saved import default_seconds_saved
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.tiers import Tiers
from ownership.simulator.state.resident import ResidentChunks
from tests.ownership.simulator.state.few_chunks import SIZES, names, prompts

KIND = StateType.DENSE_KV
TOKENS = SIZES.tokens


class EngineTier:
    """The catalog of an engine with DRAM alone: one node for each chunk."""

    def __init__(self, capacity: int, eviction: EvictionName) -> None:
        self._tiers = Tiers(
            TOKENS, SlotGeometry(capacity, {KIND: 4096}), None, Recorder(), eviction
        )
        config = StoreConfig(dram_bytes=capacity * 4096)
        self._catalog = Catalog(self._tiers, config, Recorder(), lambda: 0.0, Generation())

    def add(self, ids: Sequence[int]) -> None:
        """Restore what is there of a prompt; save the rest, as far as there is room."""
        chunks = chain(ids)
        found = self._catalog.tiers.index.match(chunks)
        restore = self._catalog.begin_restore([Wanted(KIND, found)], {})
        for chunk in chunks[len(found) :]:
            save = self._catalog.reserve(chunk, {KIND: 4096})
            if not isinstance(save, Save):
                break
            self._catalog.seal(save)
        restore.release()
        self._catalog.check_integrity()

    def held(self) -> set[int]:
        return {number(a.node.key) for a in self._tiers.index.artifacts()}


def chain(ids: Sequence[int]) -> list[ChunkRange]:
    keys = [ROOT, *(ChunkKey((i + 1).to_bytes(16, "little")) for i in ids)]
    return [
        ChunkRange(key, parent, at * TOKENS, (at + 1) * TOKENS)
        for at, (parent, key) in enumerate(pairwise(keys))
    ]


def number(key: ChunkKey) -> int:
    return int.from_bytes(key, "little") - 1


@given(texts=prompts, capacity=st.integers(1, 25))
def test_runs_hold_what_the_engine_would(texts: list[list[int]], capacity: int) -> None:
    eviction: EvictionName = "leaf_lru"
    policy = make_policy(eviction, default_seconds_saved, lambda: 0)
    runs = ResidentChunks(SIZES, capacity * SIZES.chunk_bytes, policy, KIND)
    engine = EngineTier(capacity, eviction)
    for tick, prompt in enumerate(names(texts), 1):
        runs.add(prompt, prompt.num_blocks, (), tick)
        engine.add(prompt.ids().tolist())
        assert {run.first + i for run in runs.runs() for i in range(run.count)} == engine.held()
