"""The cut of a tier into slots: places that never overlap, and little that is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec.presets import PRESETS
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry, bundles_of, dram_geometry
from hetero_connector.units import GIB

DENSE, MLA, WINDOW, TAIL = (
    StateType.DENSE_KV,
    StateType.MLA_LATENT,
    StateType.WINDOW_SWA,
    StateType.TAIL_STATE,
)


@st.composite
def geometries(draw: st.DrawFn) -> SlotGeometry:
    types = draw(st.lists(st.sampled_from(list(StateType)), min_size=1, max_size=5, unique=True))
    sizes = {t: draw(st.integers(1, 60_000)) for t in types}
    chunk = sum(SlotGeometry.fit(sizes, 0).stride_bytes.values())
    return SlotGeometry.by_use(sizes, draw(st.integers(chunk, 40 * chunk)))


def spans(geometry: SlotGeometry, kind: StateType) -> list[tuple[int, int]]:
    stride = geometry.stride_bytes[kind]
    starts = [geometry.offset(kind, slot) for slot in range(geometry.num_slots(kind))]
    return [(start, start + stride) for start in starts]


@given(geometry=geometries())
def test_slots_of_a_bundle_never_overlap_and_lie_inside(geometry: SlotGeometry) -> None:
    for bundle in geometry.bundles:
        own = sorted(span for kind in bundle for span in spans(geometry, kind))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
        assert own[0][0] >= 0
        assert own[-1][1] <= geometry.size_bytes
    assert all(start % 4096 == 0 for t in geometry.stride_bytes for start, _ in spans(geometry, t))


@given(geometry=geometries())
def test_slots_of_different_bundles_overlap_only_in_one_zone(geometry: SlotGeometry) -> None:
    for one, other in itertools.combinations(geometry.stride_bytes, 2):
        for (a, x), (b, y) in itertools.product(
            enumerate(spans(geometry, one)), enumerate(spans(geometry, other))
        ):
            if x[0] < y[1] and y[0] < x[1]:
                zone = geometry.zone_of(one, a)
                assert zone == geometry.zone_of(other, b) >= 0
                assert geometry.bundle_of[one] != geometry.bundle_of[other]


@given(geometry=geometries(), offset=st.integers(-4096, 3_000_000))
def test_a_slot_is_found_by_the_byte_at_which_it_begins(
    geometry: SlotGeometry, offset: int
) -> None:
    for kind in geometry.stride_bytes:
        places = {geometry.offset(kind, n): n for n in range(geometry.num_slots(kind))}
        assert all(geometry.slot_at(kind, at) == slot for at, slot in places.items())
        for at in (offset, *(at + 4096 for at in places)):
            assert geometry.slot_at(kind, at) == places.get(at)


@given(geometry=geometries())
def test_the_slots_of_a_zone_are_those_whose_zone_it_is(geometry: SlotGeometry) -> None:
    for kind in geometry.stride_bytes:
        slots = range(geometry.num_slots(kind))
        for zone in range(geometry.num_zones):
            first = geometry.first_slot(kind, zone)
            own = [slot for slot in slots if geometry.zone_of(kind, slot) == zone]
            assert own == list(range(first, first + geometry.slots_in_zone(kind, zone)))
        assert [slot for slot in slots if geometry.zone_of(kind, slot) < 0] == [*slots][
            : geometry.count
        ]


def test_what_is_stored_together_is_a_bundle() -> None:
    assert bundles_of([DENSE, WINDOW, MLA, TAIL]) == ((DENSE, MLA), (WINDOW,), (TAIL,))
    assert bundles_of([WINDOW]) == ((WINDOW,),)


def test_one_bundle_has_equally_many_slots_of_each_type() -> None:
    geometry = SlotGeometry.by_use({DENSE: 8192, MLA: 4096}, 5 * 12288 + 8192)
    assert (geometry.num_slots(DENSE), geometry.num_slots(MLA)) == (5, 5)
    assert geometry.num_chunks == 5


def test_in_dram_one_bundle_has_no_zones() -> None:
    geometry = dram_geometry({DENSE: 8192, MLA: 4096}, 5 * 12288 + 8192)
    assert geometry == SlotGeometry(5, {DENSE: 8192, MLA: 4096})


@given(geometry=geometries(), offset=st.integers(0, 3_000_000))
def test_the_slots_in_the_first_bytes_are_the_first_slots(
    geometry: SlotGeometry, offset: int
) -> None:
    for kind in geometry.stride_bytes:
        ends = [end for _, end in spans(geometry, kind)]
        assert geometry.num_slots_in(kind, offset) == sum(end <= offset for end in ends)
        assert all(end > offset for end in ends[geometry.num_slots_in(kind, offset) :])


@given(geometry=geometries(), others=st.integers(0, 40))
def test_tiers_of_equal_zones_have_their_common_slots_at_the_same_places(
    geometry: SlotGeometry, others: int
) -> None:
    other = replace(geometry, zones_bytes=others * geometry.zone_bytes // 2 // 4096 * 4096)
    common = geometry.common_bytes(other)
    assert common == other.common_bytes(geometry) <= min(geometry.size_bytes, other.size_bytes)
    for kind in geometry.stride_bytes:
        slots = geometry.num_slots_in(kind, common)
        assert slots == other.num_slots_in(kind, common)
        assert spans(geometry, kind)[:slots] == spans(other, kind)[:slots]


def test_less_than_a_chunk_is_no_geometry() -> None:
    assert SlotGeometry.by_use({DENSE: 8192, WINDOW: 4096}, 12287).count == 0


def test_a_small_tier_has_a_slot_of_each_type_and_zones_for_the_rest() -> None:
    geometry = SlotGeometry.by_use({DENSE: 12_288, WINDOW: 4_096}, 8 * 16_384)
    assert (geometry.count, geometry.zone_bytes) == (1, 12_288)
    assert geometry.num_zones == 10, "the last one holds a window and nothing else"
    assert geometry.size_bytes == 8 * 16_384
    assert (geometry.num_slots(DENSE), geometry.num_slots(WINDOW)) == (10, 29)


def test_a_rest_that_holds_nothing_is_not_asked_for() -> None:
    geometry = SlotGeometry.by_use({DENSE: 12_288, WINDOW: 8_192}, 20_480 + 24_576 + 4_096)
    assert (geometry.size_bytes, geometry.num_zones) == (20_480 + 24_576, 1)


MODELS = {
    "gemma-3-27b": {},
    "deepseek-v4-flash": {"kv_dtype": "fp8_ds_mla"},
    "gpt-oss-120b": {},
    "qwen3-next-80b-a3b": {},
    "llama-3.1-70b": {"tp_size": 8},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gib", [4, 32, 512])
def test_real_models_lose_little_whatever_they_store(name: str, gib: int) -> None:
    """The checkpoint policy decides how much boundary state there is; the cut allows for either."""
    model = PRESETS[name](**MODELS[name])  # type: ignore[operator]
    sizes = ArtifactLayout(model, model.default_chunk_tokens()).max_bytes
    geometry = SlotGeometry.by_use(sizes, gib * GIB)
    prefix = sum(geometry.stride_bytes[t] for t in model.prefix_types)
    held = geometry.num_slots(model.prefix_types[0]) * prefix
    largest = geometry.chunk_bytes + geometry.zone_bytes
    assert held >= 0.96 * (gib * GIB - largest), "all of it as prefix-proportional state"
    for kind in model.boundary_types:
        assert kind.family is Family.BOUNDARY
        own = geometry.num_slots(kind) * geometry.stride_bytes[kind]
        assert own >= 0.96 * (gib * GIB - largest), "or as checkpoints"
