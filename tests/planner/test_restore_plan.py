"""The plan is the deepest boundary that can be restored exactly, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.planner.restore_plan import plan_restore
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType

CHUNK = 64


def layer(state_type: StateType, group: int) -> LayerSpec:
    window = state_type is StateType.WINDOW_SWA
    return LayerSpec(
        layer=f"layers.{group}",
        group=group,
        state_type=state_type,
        tokens_per_state=1,
        block_tokens=16,
        page_bytes=1024,
        page_stride_bytes=1024,
        dtype="uint8",
        restore_rule=RestoreRule.WINDOW if window else RestoreRule.EVERY_TOKEN,
        window=32 if window else None,
        boundary_tokens=31 if window else 0,
    )


DENSE = ModelSpec((layer(StateType.DENSE_KV, 0),), alignment=16)
HYBRID = ModelSpec((layer(StateType.DENSE_KV, 0), layer(StateType.WINDOW_SWA, 1)), alignment=16)


def stored(
    index: int, *types: StateType, tier: Tier = Tier.DRAM, end: int | None = None
) -> StoredChunk:
    start = index * CHUNK
    key, parent = ChunkKey(bytes([index + 1] * 16)), ChunkKey(bytes([index] * 16))
    return StoredChunk(
        ChunkRange(key, parent, start, end or start + CHUNK), dict.fromkeys(types, tier)
    )


KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA


def test_dense_takes_every_chunk_up_to_the_limit() -> None:
    chain = [stored(i, KV) for i in range(4)]
    plan = plan_restore(DENSE, chain, local_tokens=0, limit_tokens=3 * CHUNK + 5)
    assert plan is not None
    assert plan.boundary == 3 * CHUNK
    assert [x.chunk.start for x in plan.chunks] == [0, CHUNK, 2 * CHUNK]


def test_at_least_one_token_is_left_to_compute() -> None:
    chain = [stored(0, KV)]
    assert plan_restore(DENSE, chain, 0, CHUNK - 1) is None
    assert plan_restore(DENSE, chain, 0, CHUNK) is not None


def test_local_tokens_are_not_loaded_again_but_their_chunk_is_if_it_reaches_past_them() -> None:
    chain = [stored(i, KV) for i in range(3)]
    plan = plan_restore(DENSE, chain, local_tokens=CHUNK + 16, limit_tokens=3 * CHUNK)
    assert plan is not None
    assert [x.chunk.start for x in plan.chunks] == [CHUNK, 2 * CHUNK]


def test_a_hole_in_the_prefix_ends_the_plan() -> None:
    chain = [stored(0, KV, SWA), stored(1, SWA), stored(2, KV, SWA)]
    plan = plan_restore(HYBRID, chain, 0, 3 * CHUNK)
    assert plan is not None
    assert plan.boundary == CHUNK


def test_a_hole_below_the_local_hit_does_not_matter() -> None:
    chain = [stored(0, SWA), stored(1, KV, SWA)]
    plan = plan_restore(HYBRID, chain, local_tokens=CHUNK, limit_tokens=2 * CHUNK)
    assert plan is not None
    assert plan.boundary == 2 * CHUNK


def test_boundary_state_is_loaded_at_the_boundary_only() -> None:
    chain = [stored(0, KV, SWA), stored(1, KV), stored(2, KV, SWA), stored(3, KV)]
    plan = plan_restore(HYBRID, chain, 0, 4 * CHUNK)
    assert plan is not None
    assert plan.boundary == 3 * CHUNK
    assert plan.boundary_types == (SWA,)
    assert plan.chunks[-1].chunk.start == 2 * CHUNK


def test_nothing_when_no_boundary_is_complete() -> None:
    assert plan_restore(HYBRID, [stored(0, KV), stored(1, KV)], 0, 2 * CHUNK) is None
    assert plan_restore(HYBRID, [], 0, 2 * CHUNK) is None


def test_a_tail_is_a_boundary_like_any_other() -> None:
    chain = [stored(0, KV, SWA), stored(1, KV, SWA, end=CHUNK + 16)]
    plan = plan_restore(HYBRID, chain, 0, CHUNK + 17)
    assert plan is not None
    assert plan.boundary == CHUNK + 16


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8),
    st.integers(0, 8 * CHUNK),
    st.integers(0, 9 * CHUNK),
)
def test_the_plan_is_always_complete_and_never_shallower_than_need_be(
    held: list[tuple[bool, bool]], local: int, limit: int
) -> None:
    chain = [
        stored(i, *([KV] if kv else []), *([SWA] if swa else []))
        for i, (kv, swa) in enumerate(held)
    ]
    plan = plan_restore(HYBRID, chain, local, limit)

    def complete(boundary: int) -> bool:
        if not local < boundary <= limit:
            return False
        last = boundary // CHUNK - 1
        prefix = all(held[i][0] for i in range(last + 1) if (i + 1) * CHUNK > local)
        return prefix and held[last][1]

    possible = [b for b in range(CHUNK, len(held) * CHUNK + 1, CHUNK) if complete(b)]
    assert (plan.boundary if plan else None) == (max(possible) if possible else None)
