"""Artifact sizes are arithmetic: useful bytes of the pages needed, nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from hetero_connector.spec.presets import PRESETS

KV, SWA, LOCAL = StateType.DENSE_KV, StateType.WINDOW_SWA, StateType.CHUNKED_LOCAL

FULL = LayerSpec("full", 0, KV, 1, 16, 100, 128, "uint8", RestoreRule.EVERY_TOKEN, parts=2)
WINDOW = replace(
    FULL, layer="swa", group=1, state_type=SWA, restore_rule=RestoreRule.WINDOW, window=40,
    boundary_tokens=39,
)  # fmt: skip
CHUNKED = replace(
    FULL, layer="local", group=2, state_type=LOCAL, restore_rule=RestoreRule.CHUNK_START, window=64
)
MODEL = ModelSpec((FULL, replace(FULL, layer="full2"), WINDOW, CHUNKED), alignment=16, tp_size=2)
LAYOUT = ArtifactLayout(MODEL, 48)


def test_a_chunk_has_its_pages_of_every_layer_and_rank() -> None:
    assert LAYOUT.artifact_bytes(KV, 48, 96) == 2 * 2 * 3 * 100
    assert [s.first_page for s in LAYOUT.segments(KV, 48, 96)] == [3, 3]
    assert [s.offset for s in LAYOUT.segments(KV, 48, 96)] == [0, 2 * 300]


def test_a_window_has_the_blocks_that_cover_it_and_fewer_near_the_start() -> None:
    assert LAYOUT.artifact_bytes(SWA, 0, 96) == 2 * 3 * 100
    assert LAYOUT.artifact_bytes(SWA, 0, 32) == 2 * 2 * 100


def test_chunked_local_state_is_empty_where_a_chunk_begins() -> None:
    assert [LAYOUT.artifact_bytes(LOCAL, 0, b) for b in (16, 48, 64, 80)] == [200, 600, 0, 200]


@given(st.integers(1, 64).map(lambda n: n * 16))
def test_no_artifact_is_larger_than_its_slot(boundary: int) -> None:
    for kind in (SWA, LOCAL):
        assert LAYOUT.artifact_bytes(kind, 0, boundary) <= LAYOUT.max_bytes[kind]
    start = max(0, boundary - 48)
    assert LAYOUT.artifact_bytes(KV, start, boundary) <= LAYOUT.max_bytes[KV]


def test_the_largest_of_each_type_really_occurs() -> None:
    assert LAYOUT.max_bytes == {KV: 1200, SWA: 600, LOCAL: 600}


@pytest.mark.parametrize("chunk", [0, -16, 20])
def test_a_chunk_off_the_grid_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match="multiple of the model's alignment"):
        ArtifactLayout(MODEL, chunk)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_a_deepseek_v4_checkpoint_omits_compressor_state_that_is_not_read(name: str) -> None:
    """A ratio-128 block has just ended at every boundary; ratio-4 blocks and the indexer's
    overlap with the one before."""
    model = PRESETS[name]()
    compressors = [x for x in model.layers if x.state_type is StateType.TAIL_STATE]
    heavy = {x.layer for x in compressors if x.window == 128}
    light = {x.layer for x in compressors} - heavy
    assert heavy
    assert any(".indexer." in layer for layer in light)
    assert model.alignment % 128 == 0
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    for boundary in (256, 512, 4096):
        stored = {s.layer.layer: s for s in layout.segments(StateType.TAIL_STATE, 0, boundary)}
        assert stored.keys() == light
        assert {s.first_page * 4 for s in stored.values()} == {boundary - 4}
        assert {s.num_pages for s in stored.values()} == {1}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_s_chunk_is_its_bytes_per_token(name: str) -> None:
    model = PRESETS[name]()
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    chunk = sum(layout.rank_bytes(t, 0, layout.chunk_tokens) for t in model.prefix_types)
    assert chunk == model.bytes_per_token * layout.chunk_tokens


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_off_the_grid_the_rows_of_the_open_block_are_kept(name: str) -> None:
    """At 128 n the ratio-128 block has ended, so that a handoff there is as large as on the grid;
    at 128 n + 45 it holds 45 rows, the ratio-4 block one beside the block before it."""
    model = PRESETS[name]()
    assert (model.alignment, model.handoff_step) == (256, 128)
    layout, exact = (ArtifactLayout(x, 256) for x in (model, replace(model, exact_handoffs=True)))
    for kind in model.boundary_types:
        assert exact.artifact_bytes(kind, 0, 1152) == layout.artifact_bytes(kind, 0, 1024)
        assert exact.artifact_bytes(kind, 0, 1024) == layout.max_bytes[kind]
    tokens = {
        (s.layer.window, s.layer.tokens_needed(0, 1152 + 45))
        for kind in model.boundary_types
        for s in exact.segments(kind, 0, 1152 + 45)
    }
    assert tokens == {
        (128, range(1152 + 45 - 127, 1152 + 45)),  # windows
        (128, range(1152, 1152 + 45)),
        (8, range(1152 + 40, 1152 + 45)),
    }


@cache
def preset_layout(name: str, exact: bool) -> ArtifactLayout:
    """Made once: its slots weigh up to a thousand boundaries of every layer."""
    model = replace(PRESETS[name](), exact_handoffs=exact)
    return ArtifactLayout(model, model.default_chunk_tokens())


@pytest.mark.parametrize("name", PRESETS)
@given(boundary=st.integers(1, 2000))
def test_no_handed_off_artifact_is_larger_than_its_slot(name: str, boundary: int) -> None:
    for exact in (False, True):
        layout = preset_layout(name, exact)
        end = boundary * layout.model.handoff_step
        for kind in layout.model.boundary_types:
            assert layout.artifact_bytes(kind, 0, end) <= layout.max_bytes[kind]


@pytest.mark.parametrize(("window", "block"), [(128, 256), (47, 16), (100, 64)])
def test_no_handed_off_artifact_is_larger_than_its_slot_for_odd_windows(
    window: int, block: int
) -> None:
    full = replace(FULL, block_tokens=block)
    windows = replace(WINDOW, block_tokens=block, window=window, boundary_tokens=window - 1)
    model = ModelSpec((full, windows), alignment=block, tp_size=2, exact_handoffs=True)
    layout = ArtifactLayout(model, 4 * block)
    assert model.handoff_step == 1
    sizes = {layout.artifact_bytes(SWA, 0, end) for end in range(1, 4 * (window + block))}
    assert max(sizes) == layout.max_bytes[SWA]


def test_the_boundaries_of_handoffs() -> None:
    dense = replace(MODEL, layers=(FULL,))
    assert (dense.handoff_step, MODEL.handoff_step) == (1, 16)
    assert replace(MODEL, alignment=48).handoff_step == 48  # no local chunk ends there
    assert replace(MODEL, exact_handoffs=True).handoff_step == 1
    recurrent = replace(
        WINDOW, state_type=StateType.RECURRENT, restore_rule=RestoreRule.AT_BOUNDARY
    )
    model = replace(MODEL, layers=(FULL, recurrent), alignment=48, exact_handoffs=True)
    assert model.handoff_step == 48


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("others", [(FULL,), (FULL, WINDOW)])
def test_a_model_with_rings_is_handed_off_on_its_grid(
    others: tuple[LayerSpec, ...], exact: bool
) -> None:
    """A ring has the rows of an open compression block, which are not stored."""
    ring = replace(FULL, state_type=StateType.TAIL_STATE, restore_rule=RestoreRule.NOTHING)
    model = replace(MODEL, layers=(*others, ring), alignment=48, exact_handoffs=exact)
    assert (model.handoff_step, model.handoff_end(1002)) == (48, 960)
