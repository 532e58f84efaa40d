"""The DRAM tier's space goes to the state types that are used, and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.generation import FIRST
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkRange, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.presets import PRESETS
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName, Failure, Save, StoreConfig, Wanted
from hetero_connector.store.catalog import tiers as tiers_module
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.slot_geometry import SlotGeometry, dram_geometry
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.units import GIB
from tests.store.filling import CHUNK, DENSE, SIZES, WINDOW, chain

MLA = StateType.MLA_LATENT
RECURRENT = StateType.RECURRENT


def catalog_of(geometry: SlotGeometry, eviction: EvictionName = "leaf_lru") -> Catalog:
    tiers = Tiers(CHUNK, geometry, None, Recorder(), eviction)
    return Catalog(tiers, StoreConfig(dram_bytes=1), Recorder(), lambda: 0.0, FIRST)


def put(
    catalog: Catalog, chunks: Sequence[ChunkRange], sizes: Mapping[StateType, int]
) -> list[dict[StateType, int]]:
    """Save chunks; return the offsets of each."""
    offsets = []
    for chunk in chunks:
        save = catalog.reserve(chunk, sizes)
        assert isinstance(save, Save), save
        offsets.append(dict(save.offsets))
        catalog.seal(save)
    return offsets


def has(catalog: Catalog, chunks: Sequence[ChunkRange], kind: StateType) -> list[bool]:
    return [not catalog.missing(chunk, [kind]) for chunk in chunks]


def use(catalog: Catalog, chunks: Sequence[ChunkRange], *kinds: StateType) -> None:
    found = catalog.tiers.index.match(chunks)
    catalog.end_restore(catalog.begin_restore([Wanted(kind, found) for kind in kinds], {}))


@pytest.fixture
def small() -> Catalog:
    """A slot of each type and eight zones, each for one artifact of dense state or 3 windows."""
    return catalog_of(SlotGeometry(1, {DENSE: 12_288, WINDOW: 4_096}, 12_288, 8 * 12_288))


MODELS: Mapping[str, tuple[dict[str, object], int]] = {
    "gemma-3-27b": ({}, 400_000),
    "deepseek-v4-flash": ({"kv_dtype": "fp8_ds_mla"}, 8_000_000),
    "gpt-oss-120b": ({}, 900_000),
    "qwen3-next-80b-a3b": ({}, 1_300_000),
}
"""The arguments of each preset, and the tokens that 32 GiB hold."""


@pytest.mark.parametrize("name", MODELS)
def test_32_gib_hold_a_long_prompt_with_one_checkpoint(name: str) -> None:
    arguments, tokens = MODELS[name]
    model = PRESETS[name](**arguments)  # type: ignore[operator]
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    tiers = Tiers(layout.chunk_tokens, dram_geometry(layout.max_bytes, 32 * GIB), None, Recorder())
    catalog = Catalog(tiers, StoreConfig(dram_bytes=1), Recorder(), lambda: 0.0, FIRST)
    prefix = {t: layout.max_bytes[t] for t in model.prefix_types}
    chunks = chain("prompt", tokens // layout.chunk_tokens)
    put(catalog, chunks[:-1], prefix)
    put(catalog, chunks[-1:], layout.max_bytes)
    assert len(catalog.tiers.index.match(chunks)) == len(chunks)


def test_space_that_one_type_leaves_is_the_others(small: Catalog) -> None:
    windows = chain("w", 7)
    put(small, windows, {DENSE: 9_000, WINDOW: 3_000})
    put(small, chain("a", 9), {DENSE: 9_000})
    assert has(small, chain("a", 9), DENSE) == [True] * 9
    assert small.tiers.dram.num_free(DENSE) == 0
    prompts = [chain(f"b{i}", 1)[0] for i in range(10)]
    put(small, prompts, SIZES)
    assert has(small, prompts[-7:], WINDOW) == [True] * 7, "one in its own slot, and two zones"
    assert has(small, prompts[-7:], DENSE) == [True] * 7, "one in its own slot, and six zones"
    small.check_integrity()


def test_what_was_used_longest_ago_leaves_whatever_its_type(small: Catalog) -> None:
    old, new = chain("old", 3), chain("new", 5)
    put(small, old, SIZES)  # dense: own slot and two zones; windows: own slot and one zone
    put(small, new, {DENSE: 9_000})
    assert small.tiers.dram.num_free(DENSE) == 0
    use(small, old, DENSE)  # their windows are older than all dense state by now
    put(small, chain("more", 1), {DENSE: 9_000})
    assert has(small, old, WINDOW) == [True, False, False], "the zone of two windows made room"
    assert has(small, old, DENSE) == [True] * 3
    assert has(small, new, DENSE) == [True] * 5


def test_state_that_is_newer_keeps_its_zone(small: Catalog) -> None:
    old, new = chain("old", 5), chain("new", 3)
    put(small, old, {DENSE: 9_000})
    put(small, new, SIZES)
    put(small, chain("more", 2), {DENSE: 9_000})
    assert has(small, new, WINDOW) == [True] * 3
    assert has(small, old, DENSE) == [True] * 3 + [False] * 2, "the deepest of the oldest"


def test_pinned_state_of_another_type_keeps_its_zone(small: Catalog) -> None:
    old = chain("old", 3)
    put(small, old, SIZES)
    found = small.tiers.index.match(old)
    restore = small.begin_restore([Wanted(WINDOW, found), Wanted(DENSE, found)], {})
    put(small, chain("new", 5), {DENSE: 9_000})
    held = small.begin_restore([Wanted(DENSE, small.tiers.index.match(chain("new", 5)))], {})
    assert small.reserve(chain("more", 1)[0], {DENSE: 9_000}) is Failure.NO_SLOT
    small.end_restore(restore)
    put(small, chain("more", 1), {DENSE: 9_000})
    small.end_restore(held)
    small.check_integrity()


def test_every_type_has_a_slot_whatever_the_others_need(small: Catalog) -> None:
    chunks = chain("a", 9)
    put(small, chunks, {DENSE: 9_000})
    pinned = small.begin_restore([Wanted(DENSE, small.tiers.index.match(chunks))], {})
    for name in "bcd":
        put(small, chain(name, 1), {WINDOW: 3_000})
    assert has(small, chain("d", 1), WINDOW) == [True]
    assert has(small, chain("c", 1), WINDOW) == [False], "it has no more than that one"
    small.end_restore(pinned)


def test_a_slot_costs_a_bounded_number_of_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One zone holds six windows here; what left before is a start for the next attempt."""
    monkeypatch.setattr(tiers_module, "_MAX_EVICTED", 4)
    small = catalog_of(SlotGeometry(1, {DENSE: 24_576, WINDOW: 4_096}, 24_576, 24_576))
    put(small, [chain(f"w{i}", 1)[0] for i in range(7)], {WINDOW: 3_000})
    put(small, chain("a", 1), {DENSE: 24_000})
    pinned = small.begin_restore([Wanted(DENSE, small.tiers.index.match(chain("a", 1)))], {})
    assert small.reserve(chain("b", 1)[0], {DENSE: 24_000}) is Failure.NO_SLOT
    assert small.tiers.dram.num_used(WINDOW) == 3
    put(small, chain("b", 1), {DENSE: 24_000})
    small.end_restore(pinned)
    small.check_integrity()


def test_what_is_saved_at_once_lies_in_neighbouring_slots() -> None:
    """Two sessions grow turn by turn, and some are forgotten in between."""
    geometry = SlotGeometry.by_use({DENSE: 4_096, RECURRENT: 65_536}, 69_632 + 16 * 65_536)
    catalog = catalog_of(geometry)
    one, other = chain("one", 16), chain("other", 16)
    pieces = 0
    put(catalog, chain("first", 1), {DENSE: 4_000})
    for at in range(0, 16, 4):
        put(catalog, chain(f"gone{at}", 3), {DENSE: 4_000})
        for chunks in (one, other):
            saved = put(catalog, chunks[at : at + 4], {DENSE: 4_000})
            steps = [b[DENSE] - a[DENSE] for a, b in itertools.pairwise(saved)]
            pieces += 1 + sum(step != 4_096 for step in steps)
        for artifact in [
            catalog.tiers.index.nodes[c.key].artifacts[DENSE] for c in chain(f"gone{at}", 3)
        ]:
            catalog.tiers.forget(artifact)
    assert pieces <= 12, "eight saves, and a few that cross from one zone to another"


@pytest.mark.parametrize("eviction", ["leaf_lru", "value"])
def test_a_change_of_traffic_moves_the_space(eviction: EvictionName) -> None:
    """Long prompts with few checkpoints, then short ones with many, then long ones again."""
    catalog = catalog_of(
        SlotGeometry.by_use({DENSE: 4_096, MLA: 4_096, RECURRENT: 65_536}, 73_728 + 32 * 65_536),
        eviction,
    )
    pool = catalog.tiers.dram
    prefix = {DENSE: 4_000, MLA: 4_000}

    def long_prompts(name: str) -> None:
        for i in range(12):
            chunks = chain(f"{name}{i}", 40)
            put(catalog, chunks[:-1], prefix)
            put(catalog, chunks[-1:], prefix | {RECURRENT: 65_000})
            catalog.check_integrity()

    long_prompts("a")
    assert pool.num_used(DENSE) >= 180
    for i in range(200):
        put(catalog, chain(f"short{i}", 1), prefix | {RECURRENT: 65_000})
    catalog.check_integrity()
    assert pool.num_used(RECURRENT) >= 20
    assert sum(has(catalog, [chain(f"short{i}", 1)[0] for i in range(200)], RECURRENT)) >= 20
    long_prompts("b")
    assert pool.num_used(DENSE) >= 180


def test_evict_first_counts_for_other_types_too(small: Catalog) -> None:
    old, new = chain("old", 5), chain("new", 3)
    put(small, old, {DENSE: 9_000})
    put(small, new, SIZES)
    for chunk in new[1:]:
        small.tiers.evict_first.add(small.tiers.index.nodes[chunk.key].artifacts[WINDOW], Tier.DRAM)
    put(small, chain("more", 1), {DENSE: 9_000})
    assert has(small, new, WINDOW) == [True, False, False]
    assert has(small, old, DENSE) == [True] * 5


def test_a_checkpoint_does_not_evict_the_chunk_that_it_belongs_to(small: Catalog) -> None:
    """The chunk is the oldest of all, and a checkpoint without its chunk is forgotten."""
    others = chain("others", 8)
    put(small, chain("old", 1), {DENSE: 9_000})
    put(small, others, {DENSE: 9_000})
    put(small, chain("windows", 1), {WINDOW: 3_000})
    held = small.begin_restore([Wanted(WINDOW, small.tiers.index.match(chain("windows", 1)))], {})
    put(small, chain("old", 1), {WINDOW: 3_000})
    assert has(small, chain("old", 1), DENSE) == has(small, chain("old", 1), WINDOW) == [True]
    assert has(small, others, DENSE) == [True] * 7 + [False]
    small.end_restore(held)
    small.check_integrity()


SAVES = st.tuples(
    st.integers(0, 5),  # session
    st.integers(0, 1),  # chunk of its chain
    st.sampled_from([{DENSE: 9_000}, {WINDOW: 3_000}, SIZES]),
    st.booleans(),  # restored afterwards
    st.booleans(),  # sealed, or abandoned
)


@given(saves=st.lists(SAVES, min_size=20, max_size=80))
def test_whatever_is_saved_no_slot_is_lost(
    saves: list[tuple[int, int, Mapping[StateType, int], bool, bool]],
) -> None:
    catalog = catalog_of(SlotGeometry(1, {DENSE: 12_288, WINDOW: 4_096}, 12_288, 2 * 12_288))
    for session, at, sizes, is_used, is_sealed in saves:
        chunks = chain(f"s{session}", 2)
        missing = {t: n for t, n in sizes.items() if t in catalog.missing(chunks[at], [t])}
        save = catalog.reserve(chunks[at], missing) if missing else None
        if isinstance(save, Save):
            (catalog.seal if is_sealed else catalog.abandon)(save)
        if is_used and (found := catalog.tiers.index.match(chunks)):
            held = [x for x in found if DENSE in x.tiers]
            catalog.end_restore(catalog.begin_restore([Wanted(DENSE, held)], {}))
        catalog.check_integrity()
        for kind in (DENSE, WINDOW):
            stored = sum(a.state_type is kind for a in catalog.tiers.index.artifacts())
            assert catalog.tiers.dram.num_used(kind) == stored
