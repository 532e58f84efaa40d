"""The plan is the deepest boundary that can be restored exactly, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.plan import RestorePlan, WindowReplay
from hetero_connector.planner.planner import Mode, RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from tests.planner.chains import chain_of, costs_of, deepest, in_tier, layout_of
from tests.planner.stored_chunks import CHUNK, DENSE, HYBRID, KV, SWA, stored


def test_dense_takes_every_chunk_up_to_the_limit() -> None:
    chain = [stored(i, KV) for i in range(4)]
    plan = deepest(DENSE, chain, local_tokens=0, limit_tokens=3 * CHUNK + 5)
    assert plan is not None
    assert plan.boundary == 3 * CHUNK
    assert [x.chunk.start for x in plan.chunks] == [0, CHUNK, 2 * CHUNK]


def test_at_least_one_token_is_left_to_compute() -> None:
    chain = [stored(0, KV)]
    assert deepest(HYBRID, [stored(0, KV, SWA)], 0, CHUNK - 1) is None
    for limit, boundary in ((CHUNK, CHUNK), (CHUNK - 1, CHUNK - 16), (16, 16)):
        plan = deepest(DENSE, chain, 0, limit)
        assert plan is not None
        assert (plan.boundary, list(plan.chunks)) == (boundary, chain)
    assert deepest(DENSE, chain, 0, 15) is None


def test_a_chunk_is_cut_only_after_the_local_tokens() -> None:
    chain = [stored(0, KV), stored(1, KV)]
    plan = deepest(DENSE, chain, local_tokens=2 * CHUNK - 32, limit_tokens=2 * CHUNK - 1)
    assert plan is not None
    assert (plan.boundary, list(plan.chunks)) == (2 * CHUNK - 16, chain[1:])
    assert deepest(DENSE, chain, local_tokens=2 * CHUNK - 16, limit_tokens=2 * CHUNK - 1) is None


def test_a_plan_that_is_cut_has_what_lies_before() -> None:
    chain = [stored(i, KV, SWA) for i in range(4)]
    plan = deepest(HYBRID, chain, 0, 4 * CHUNK)
    assert plan is not None
    cut = plan.cut_to(2 * CHUNK + 16)
    assert (cut.boundary, list(cut.chunks), cut.boundary_types) == (2 * CHUNK + 16, chain[:3], ())


def test_a_chunk_that_reaches_past_the_local_tokens_is_loaded() -> None:
    chain = [stored(i, KV) for i in range(3)]
    plan = deepest(DENSE, chain, local_tokens=CHUNK + 16, limit_tokens=3 * CHUNK)
    assert plan is not None
    assert [x.chunk.start for x in plan.chunks] == [CHUNK, 2 * CHUNK]


def test_a_hole_in_the_prefix_ends_the_plan() -> None:
    chain = [stored(0, KV, SWA), stored(1, SWA), stored(2, KV, SWA)]
    plan = deepest(HYBRID, chain, 0, 3 * CHUNK)
    assert plan is not None
    assert plan.boundary == CHUNK


def test_a_hole_below_the_local_hit_does_not_matter() -> None:
    chain = [stored(0, SWA), stored(1, KV, SWA)]
    plan = deepest(HYBRID, chain, local_tokens=CHUNK, limit_tokens=2 * CHUNK)
    assert plan is not None
    assert plan.boundary == 2 * CHUNK


def test_boundary_state_is_loaded_at_the_boundary_only() -> None:
    chain = [stored(0, KV, SWA), stored(1, KV), stored(2, KV, SWA), stored(3, KV)]
    plan = deepest(HYBRID, chain, 0, 4 * CHUNK)
    assert plan is not None
    assert plan.boundary == 3 * CHUNK
    assert plan.boundary_types == (SWA,)
    assert plan.chunks[-1].chunk.start == 2 * CHUNK


def test_nothing_when_no_boundary_is_complete() -> None:
    assert deepest(HYBRID, [stored(0, KV), stored(1, KV)], 0, 2 * CHUNK) is None
    assert deepest(HYBRID, [], 0, 2 * CHUNK) is None


def test_a_tail_is_a_boundary_like_any_other() -> None:
    chain = [stored(0, KV, SWA), stored(1, KV, SWA, end=CHUNK + 16)]
    plan = deepest(HYBRID, chain, 0, CHUNK + 17)
    assert plan is not None
    assert plan.boundary == CHUNK + 16


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8),
    st.integers(0, 8 * CHUNK),
    st.integers(0, 9 * CHUNK),
)
def test_the_plan_is_complete_and_as_deep_as_possible(
    stored_types: list[tuple[bool, bool]], local: int, limit: int
) -> None:
    chain = [
        stored(i, *([KV] if kv else []), *([SWA] if swa else []))
        for i, (kv, swa) in enumerate(stored_types)
    ]
    plan = deepest(HYBRID, chain, local, limit)

    def complete(boundary: int) -> bool:
        if not local < boundary <= limit:
            return False
        last = boundary // CHUNK - 1
        prefix = all(stored_types[i][0] for i in range(last + 1) if (i + 1) * CHUNK > local)
        return prefix and stored_types[last][1]

    possible = [b for b in range(CHUNK, len(stored_types) * CHUNK + 1, CHUNK) if complete(b)]
    assert (plan.boundary if plan else None) == (max(possible) if possible else None)


def window_layer(index: int, window: int) -> LayerSpec:
    return LayerSpec(
        layer=f"layers.{index}",
        group=1,
        state_type=StateType.WINDOW_SWA,
        tokens_per_state=1,
        block_tokens=4,
        page_bytes=64,
        page_stride_bytes=64,
        dtype="uint8",
        restore_rule=RestoreRule.WINDOW,
        window=window,
        boundary_tokens=window - 1,
    )


def exact_states(windows: list[int], start: int, end: int) -> list[list[bool]]:
    """By layer and token: whether its window state is exact when computed from `start` on.

    What lies before `start` is missing. A layer's state is computed from its input; its
    output is exact where it sees only exact states, from its own input on.
    """
    inputs = [token >= start for token in range(end)]
    layers = []
    for window in windows:
        layers.append(list(inputs))
        inputs = [
            inputs[t] and all(inputs[max(0, t - window + 1) : t + 1]) and t >= start
            for t in range(end)
        ]
    return layers


@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.integers(10, 20))
def test_the_reach_is_the_error_that_layers_pass_on(windows: list[int], start: int) -> None:
    model = ModelSpec(tuple(window_layer(i, w) for i, w in enumerate(windows)), alignment=4)
    replay = WindowReplay.of(model)
    end = start + replay.reach_tokens + 10
    layers = exact_states(windows, start, end)

    def exact_at(boundary: int) -> bool:
        return all(
            all(states[boundary - window + 1 : boundary])
            for states, window in zip(layers, windows, strict=True)
        )

    first = replay.first_exact_boundary(start)
    assert all(exact_at(boundary) for boundary in range(first, end))
    assert not exact_at(first - 1)  # and not one token less
    assert all(all(states[replay.first_exact_token(start) :]) for states in layers)


@given(st.integers(1, 300), st.sampled_from([16, 64, 256]))
def test_a_replay_begins_on_the_grid(reach: int, alignment: int) -> None:
    tokens = WindowReplay(reach, 1, alignment).tokens
    assert tokens % alignment == 0
    assert 0 <= tokens - reach < alignment


def test_a_replay_resumes_before_the_deepest_boundary() -> None:
    chain = [stored(i, KV) for i in range(4)]
    plan = deepest(HYBRID, chain, 0, 4 * CHUNK, replay_tokens=80)
    assert plan is not None
    assert (plan.boundary, plan.replay_tokens, plan.resume_tokens) == (256, 80, 176)
    assert (plan.prefix_types, plan.boundary_types) == ((KV,), ())
    assert list(plan.chunks) == chain


def test_a_hole_in_the_prefix_ends_a_replay() -> None:
    chain = [stored(0, KV, SWA), stored(1, KV), stored(2, KV), stored(3, SWA)]
    plan = deepest(HYBRID, chain, 0, 4 * CHUNK, replay_tokens=80)
    assert plan is not None
    assert (plan.boundary, plan.resume_tokens) == (192, 112)


def test_tokens_that_the_engine_computes_anyway_are_not_replayed() -> None:
    chain = [stored(i, KV) for i in range(4)]
    assert deepest(HYBRID, chain, 175, 4 * CHUNK, 80) is not None
    assert deepest(HYBRID, chain, 176, 4 * CHUNK, 80) is None
    assert deepest(HYBRID, chain[:1], 0, 4 * CHUNK, 80) is None  # shorter than a replay
    assert deepest(HYBRID, [], 0, 4 * CHUNK, 80) is None


def planned(chain: list[StoredChunk], mode: Mode, *, replays: bool, **options: bool) -> RestorePlan:
    planner = RestorePlanner(layout_of(HYBRID), costs_of(HYBRID), mode, replay_tokens=80)
    planner.replay_when_missing = replays
    plan = planner.plan(chain, 0, 4 * CHUNK, 4 * CHUNK + 1, EngineLoad(), **options).plan
    assert plan is not None
    return plan


def test_always_load_replays_only_if_allowed_and_if_that_resumes_later() -> None:
    chain = [stored(0, KV, SWA), *(stored(i, KV) for i in range(1, 4))]
    assert planned(chain, "always_load", replays=False).resume_tokens == 64
    assert planned(chain, "always_load", replays=True).resume_tokens == 176
    chain[2] = stored(2, KV, SWA)
    assert planned(chain, "always_load", replays=True).replay_tokens == 0
    assert planned([stored(0, KV, SWA)], "always_load", replays=True).resume_tokens == 64


def test_a_request_that_cannot_be_replayed_is_not_replayed() -> None:
    chain = [stored(0, KV, SWA), *(stored(i, KV) for i in range(1, 4))]
    for mode in ("always_load", "cost"):
        assert planned(chain, mode, replays=True, may_replay=False).replay_tokens == 0


@pytest.mark.parametrize("mode", ["always_load", "cost"])
def test_a_replay_neither_starts_nor_ends_off_the_grid(mode: Mode) -> None:
    prefix_only = in_tier(Tier.DRAM, KV)
    chain = chain_of([prefix_only] * 4, tail_tokens=7)
    assert chain[-1].chunk.end == 3 * CHUNK + 7
    plan = planned(chain, mode, replays=True)
    assert (plan.boundary, plan.replay_tokens) == (192, 80)
    complete = chain_of(
        [prefix_only, prefix_only, prefix_only, in_tier(Tier.DRAM, KV, SWA)], tail_tokens=7
    )
    plan = planned(complete, mode, replays=True)
    assert (plan.boundary, plan.replay_tokens) == (199, 0)
