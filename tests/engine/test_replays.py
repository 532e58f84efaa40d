"""A replay step by step: pages are loaded, protected, cleared, hidden and saved."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.engine.messages import StepMetadata
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.spec import Family, ModelSpec, StateType
from tests.engine.fakes import FakeRequest, layer, scheduled
from tests.engine.stepped import Engine, artifacts_of, in_use, tokens

MODEL = ModelSpec(
    (
        layer("full", 0),
        *(layer(f"swa.{i}", 1, StateType.WINDOW_SWA, window=32) for i in range(3)),
    ),
    alignment=16,
)
REPLAY = WindowReplay.of(MODEL)  # 93 tokens, 96 on the grid
BLOCK = 16
STORED = 400
"""Tokens of the request before, all in full blocks."""
RESUME = STORED - 96
KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA


def new_engine() -> Engine:
    """Return an engine with prefix-proportional state of `STORED` tokens, no checkpoint, and
    replays."""
    engine = Engine(MODEL, window_replay=REPLAY)
    engine.side.planner.replay_when_missing = True
    engine.run(FakeRequest("before", tokens(STORED)))
    forget_checkpoints(engine)
    return engine


def forget_checkpoints(engine: Engine) -> None:
    with engine.store.catalog.locked():
        for artifact in list(engine.store.catalog.tiers.index.artifacts()):
            if artifact.state_type.family is Family.BOUNDARY:
                engine.store.catalog.tiers.forget(artifact)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = new_engine()
    yield engine
    assert in_use(engine) == []
    assert (engine.side._replays._running, engine.side._admissions.loading) == ({}, {})
    assert not engine.side.has_work
    engine.store.check_integrity()
    engine.side.close()


def request(name: str = "a", num_tokens: int = 450) -> FakeRequest:
    return FakeRequest(name, [*tokens(STORED), *tokens(num_tokens - STORED, seed=3)])


def schedule(engine: Engine, **num_tokens: int) -> tuple[StepMetadata, Any]:
    """Return a step whose report comes later, and vLLM's output for it."""
    output: Any = scheduled(**num_tokens)
    meta = engine.side.order_step(output)
    for name, count in num_tokens.items():
        engine.requests[name].num_computed_tokens += count
    return meta, output


def loaded(meta: StepMetadata) -> set[int]:
    """Return the block ids of the full-attention group that the step loads."""
    ids: set[int] = set()
    for load in meta.loads:
        assert set(load.blocks) == {(KV, 0)}, "windows are rebuilt, not loaded"
        blocks = load.blocks[KV, 0]
        pages = range(blocks.first_page, blocks.first_page + len(blocks.ids))
        covered = {p for x in artifacts_of(load) for p in range(x.start // BLOCK, x.end // BLOCK)}
        assert covered >= set(pages), "a page without bytes"
        ids.update(blocks.ids)
    return ids


def pages(engine: Engine, group: int, start: int, stop: int, name: str = "a") -> set[int]:
    """Return the block ids of the pages with the tokens [`start`, `stop`)."""
    return set(engine.tables.ids[name][group][start // BLOCK : -(-stop // BLOCK)])


def test_nothing_is_replayed_unless_asked(engine: Engine) -> None:
    engine.side.planner.replay_when_missing = False
    assert engine.admit(request()) == 0
    engine.step(a=450)
    engine.finish(engine.requests["a"])
    engine.step()


def test_one_step_loads_protects_and_clears(engine: Engine) -> None:
    engine.counters()
    assert engine.admit(request()) == RESUME
    meta, output = schedule(engine, a=450 - RESUME)
    assert loaded(meta) == pages(engine, 0, 0, STORED)
    assert {g: set(ids) for g, ids in meta.protected.items()} == {
        0: pages(engine, 0, RESUME, STORED)
    }
    assert {g: set(ids) for g, ids in meta.cleared.items()} == {
        1: pages(engine, 1, RESUME - 31, RESUME)
    }
    assert output.has_sync_kv_loads
    engine.report(meta)
    counted = engine.counters()
    assert counted["heterocache_hit_tokens{tier=dram}"] == RESUME
    assert counted["heterocache_replayed_tokens{}"] == 96
    assert counted["heterocache_restored_tokens{state_type=dense_kv,tier=dram}"] == STORED
    engine.finish(engine.requests["a"])
    engine.step()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, RESUME // BLOCK - 1), st.lists(st.integers(1, 90), min_size=8, max_size=60))
def test_a_replay_is_exact_in_steps_of_any_size(local_blocks: int, cuts: list[int]) -> None:
    engine, local = new_engine(), local_blocks * BLOCK
    assert engine.admit(request(), local) == RESUME - local
    computed, so_far, cleared = RESUME, set[int](), []
    for count in [*cuts, 450]:
        count = min(count, 450 - computed)
        if not count:
            break
        replaying = computed < STORED
        meta, output = schedule(engine, a=count)
        computed += count
        so_far |= loaded(meta)
        assert so_far == pages(engine, 0, local, min(computed, STORED))
        protected = set(meta.protected.get(0, ()))
        assert protected == pages(engine, 0, computed - count, min(computed, STORED))
        assert output.has_sync_kv_loads == bool(meta.loads) == replaying
        cleared.append(set(meta.cleared.get(1, ())))
        engine.report(meta)
    assert cleared[0] == pages(engine, 1, max(local, RESUME - 31), RESUME)
    assert not any(cleared[1:])
    assert in_use(engine) == []
    engine.side.close()


def test_inexact_windows_are_taken_out_of_the_engine_s_prefix_cache(engine: Engine) -> None:
    engine.tables.published[1]["a"] = 20
    engine.admit(request())
    # The last window layer is exact from two windows after the start on: token 366.
    assert engine.tables.evicted == pages(engine, 1, 0, 368)
    assert engine.tables.published == ({}, {"a": 23})
    engine.step(a=450 - RESUME)
    engine.finish(engine.requests["a"])
    engine.step()


def test_the_engine_s_own_windows_stay_published(engine: Engine) -> None:
    assert engine.admit(request(), local=288) == RESUME - 288
    assert engine.tables.evicted == pages(engine, 1, 288, 368)
    engine.step(a=450 - RESUME)
    engine.finish(engine.requests["a"])
    engine.step()


def test_only_exact_windows_are_saved(engine: Engine) -> None:
    engine.admit(request())
    meta = engine.step(a=450 - RESUME)
    saved = [(x.state_type, x.end) for save in meta.saves for x in save.copy.artifacts]
    assert saved == [(KV, 448), (SWA, 448)]  # neither 320 nor 384
    engine.finish(engine.requests["a"])
    engine.step()


def test_a_vllm_whose_prefix_cache_cannot_be_corrected_is_not_replayed(engine: Engine) -> None:
    other: Any = SimpleNamespace(get_blocks=engine.tables.get_blocks, coordinator=None)
    engine.side.bind(other)
    assert engine.admit(request()) == 0
    engine.step(a=450)
    engine.finish(engine.requests["a"])
    engine.step()


def test_a_later_checkpoint_is_better_than_a_replay(engine: Engine) -> None:
    engine.run(request("x", 420))
    assert engine.admit(request("a", 450)) == 416
    engine.step(a=450 - 416)
    engine.finish(engine.requests["a"])
    engine.step()


def test_replayed_artifacts_are_pinned_until_the_last_load_is_reported(engine: Engine) -> None:
    engine.admit(request())
    steps = [schedule(engine, a=50)[0] for _ in range(2)]
    engine.report(steps[0])
    assert in_use(engine)
    engine.report(steps[1])
    assert not in_use(engine)
    engine.step(a=46)
    engine.finish(engine.requests["a"])
    engine.step()


@pytest.mark.parametrize("reported", [False, True])
def test_aborted_in_the_middle_keeps_no_pins(engine: Engine, reported: bool) -> None:
    """With async scheduling a request can end before its last step is reported."""
    engine.admit(request())
    meta, _ = schedule(engine, a=50)
    if reported:
        engine.report(meta)
    engine.finish(engine.requests["a"])
    if not reported:
        engine.report(meta)
    assert not in_use(engine)
    engine.step()


def test_preempted_in_the_middle_and_admitted_again(engine: Engine) -> None:
    engine.admit(request())
    first, _ = schedule(engine, a=50)
    engine.requests["a"].num_computed_tokens = 0
    output: Any = scheduled()
    output.preempted_req_ids = {"a"}
    second = engine.side.order_step(output)
    assert second.loads == []
    engine.report(first)
    assert not in_use(engine)
    assert engine.admit(engine.requests["a"]) == RESUME
    third, _ = schedule(engine, a=450 - RESUME)
    assert loaded(third) == pages(engine, 0, 0, STORED)
    engine.report(third)
    engine.finish(engine.requests["a"])
    engine.step()


def test_a_local_hit_that_overtakes_the_start_drops_the_replay(engine: Engine) -> None:
    engine.requests["a"] = request()
    ask = engine.side.match
    assert ask(engine.requests["a"], 0) == (RESUME, False)  # type: ignore[arg-type]
    assert ask(engine.requests["a"], RESUME) == (0, False)  # type: ignore[arg-type]
    engine.side.on_finished(engine.requests["a"], ([], []))  # type: ignore[arg-type]


def test_prompts_with_images_are_not_replayed(engine: Engine) -> None:
    odd = request()
    tracker = engine.side._track(odd)  # type: ignore[arg-type]
    assert tracker is not None
    odd.mm_features = [object()]
    assert engine.side._restorer.stage(tracker, 0) == 0
    odd.mm_features = []
    assert engine.side._restorer.stage(tracker, 0) == RESUME
    engine.side.on_finished(odd, ([], []))  # type: ignore[arg-type]
