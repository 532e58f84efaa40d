"""The plan is the deepest boundary that can be restored exactly, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.plan import plan_restore
from tests.planner.stored_chunks import CHUNK, DENSE, HYBRID, KV, SWA, stored


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
