"""The arrays agree with the layout and the index, chunk by chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier, distinct_tiers
from hetero_connector.planner.boundaries import ChunkGrid, ChunkTiers
from hetero_connector.spec.presets import PRESETS
from tests.planner.chains import HYBRID, KV, LLAMA4, SWA, chain_of, in_tier, layout_of


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("times", [1, 3])
def test_bytes_of_presets_equal_the_layouts(name: str, times: int) -> None:
    model = PRESETS[name]()
    layout = ArtifactLayout(model, times * model.default_chunk_tokens())
    check(ChunkGrid(layout), layout, [0, 1, 2, 3, 7, 20, 100])


@pytest.mark.parametrize("model", [HYBRID, LLAMA4])
def test_bytes_equal_the_layouts_while_windows_fill_and_repeat(model: object) -> None:
    layout = layout_of(model)  # type: ignore[arg-type]
    check(ChunkGrid(layout), layout, list(range(12)))


def check(grid: ChunkGrid, layout: ArtifactLayout, indices: list[int]) -> None:
    size = layout.chunk_tokens
    columns = grid.columns(0, max(indices) + 1)
    for index in indices:
        end = (index + 1) * size
        assert grid.ends(index, 1) == [end]
        for t, row in zip(layout.model.boundary_types, grid.boundary_bytes, strict=True):
            assert row[columns[index]] == layout.artifact_bytes(t, end - size, end)
        for t, prefix_bytes in grid.prefix_bytes.items():
            assert prefix_bytes == layout.artifact_bytes(t, end - size, end)


def test_the_grid_grows_with_the_prompt() -> None:
    grid = ChunkGrid(layout_of(HYBRID))
    assert grid.ends(5000, 2).tolist() == [5001 * 64, 5002 * 64]
    assert grid.ordinals(9000)[-1] == 9000
    assert len(grid.columns(20_000, 3)) == 3


MIXTURES = [
    in_tier(Tier.DRAM, KV, SWA),
    in_tier(Tier.SSD, KV, SWA),
    in_tier(Tier.DRAM, KV),
    in_tier(Tier.SSD, KV) | in_tier(Tier.DRAM, SWA),
]


@given(st.lists(st.sampled_from(MIXTURES), min_size=1, max_size=30), st.booleans())
def test_the_code_of_each_chunk_names_its_mapping(
    mappings: list[dict[object, Tier]], shared: bool
) -> None:
    chunks = chain_of(mappings, shared=shared)  # type: ignore[arg-type]
    tiers = ChunkTiers.of(chunks)
    assert [tiers.distinct[code] for code in tiers.codes] == mappings
    assert [mappings[first] for first in tiers.firsts] == tiers.distinct
    for count in range(1, len(chunks) + 1):
        part = tiers.up_to(count)
        assert [part.distinct[code] for code in part.codes] == mappings[:count]
        assert tiers.distinct_up_to(count) == part.distinct
        if shared:
            assert part.distinct == distinct_tiers(chunks[:count])


def test_unnumbered_chunks_among_numbered_ones_keep_their_own_tiers() -> None:
    """A request whose read has failed plans over chunks that it made itself."""
    chunks = chain_of([MIXTURES[0], MIXTURES[1], MIXTURES[0]])
    chunks[1] = StoredChunk(chunks[1].chunk, MIXTURES[2])
    tiers = ChunkTiers.of(chunks)
    assert [tiers.distinct[code] for code in tiers.codes] == [
        MIXTURES[0], MIXTURES[2], MIXTURES[0],
    ]  # fmt: skip
