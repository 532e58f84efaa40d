"""The saver stores the boundaries that the checkpoint policy wants, and every turn's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.messages import StepMetadata
from hetero_connector.metrics import COUNTERS
from hetero_connector.planner.checkpoints import (
    Adaptive,
    Boundary,
    CheckpointPolicy,
    CheckpointRates,
    CheckpointSizes,
    Full,
    Periodic,
    Reuse,
    Zero,
)
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.spec import ModelSpec, RestoreRule, StateType
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, layer, scheduled
from tests.engine.stepped import CHUNK, Engine, in_use, tokens

KV, SWA, RECURRENT = StateType.DENSE_KV, StateType.WINDOW_SWA, StateType.RECURRENT

COARSE = replace(HYBRID, alignment=CHUNK)
"""A model with boundaries as far apart as chunks, so without tails (DeepSeek-V4)."""
MAMBA = ModelSpec(
    (
        layer("full", 0),
        replace(layer("mamba", 1, RECURRENT, block=CHUNK), restore_rule=RestoreRule.AT_BOUNDARY),
    ),
    alignment=CHUNK,
)

LOCAL = ModelSpec(
    (
        layer("full", 0),
        replace(
            layer("local", 1, StateType.CHUNKED_LOCAL, window=128),
            restore_rule=RestoreRule.CHUNK_START,
        ),
    ),
    alignment=16,
)


class Recording:
    """Keeps turns' ends, boundaries where matches end, and the given boundaries."""

    def __init__(self, chunks: Sequence[int] = ()) -> None:
        self.chunks = chunks
        self.asked: list[Boundary] = []
        self.observed: list[Reuse] = []

    def should_keep(self, boundary: Boundary) -> bool:
        self.asked.append(boundary)
        at_will = boundary.chunks in self.chunks
        return at_will or boundary.turn_end or boundary.missed_chunks > 0

    def observe(self, reuse: Reuse) -> None:
        self.observed.append(reuse)


class Engines:
    """Builds engines, and checks at the end that each has released everything."""

    def __init__(self) -> None:
        self.built: list[Engine] = []

    def __call__(self, policy: CheckpointPolicy, model: ModelSpec = HYBRID) -> Engine:
        self.built.append(Engine(model, checkpoints=policy))
        return self.built[-1]


@pytest.fixture
def engine_of() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    for engine in engines.built:
        assert in_use(engine) == []
        assert not engine.side.has_work
        assert engine.side._saver._reservations._reserved == {}
        engine.store.check_integrity()
        engine.side.close()


def checkpoints(engine: Engine, kind: StateType = SWA) -> list[int]:
    """Return the boundaries, in tokens, with sealed boundary state."""
    artifacts = engine.store.catalog.tiers.index.artifacts()
    return sorted(a.node.chunk.end for a in artifacts if a.sealed and a.state_type is kind)


def counts_as_kept(engine: Engine, request: FakeRequest, chunks: int) -> bool:
    """True if the boundary after a running request's first chunks counts as kept."""
    chain = engine.side._trackers[request.request_id].chain
    return engine.side._saver._kept.steps_to([chain.ending_at(chunks * CHUNK).key]) == 0


def decode(engine: Engine, request: FakeRequest, count: int) -> None:
    """Decode one token a step."""
    for at in range(count):
        request.all_token_ids.append((request.num_tokens * 13 + at) % 251)
        engine.grow_table(request)
        engine.step(**{request.request_id: 1})


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Full(), [64, 128, 192, 256, 320, 384, 400]),
        (Periodic(2), [128, 256, 384, 400]),
        (Periodic(4), [256, 384, 400]),
        (Zero(), [384, 400]),
    ],
    ids=["full", "periodic:2", "periodic:4", "zero"],
)
@pytest.mark.parametrize("step", [400, 100, 30])
def test_the_policy_s_boundaries_are_stored_and_every_chunk_s_prefix(
    engine_of: Engines, policy: CheckpointPolicy, expected: list[int], step: int
) -> None:
    engine = engine_of(policy)
    request = FakeRequest("a", tokens(400))
    engine.admit(request)
    for start in range(0, 400, step):
        engine.step(a=min(step, 400 - start))
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == expected
    assert checkpoints(engine, KV) == [64, 128, 192, 256, 320, 384, 400]


def test_nothing_is_collected_in_a_step_that_completes_no_chunk(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = engine_of(Full()), FakeRequest("a", tokens(60))
    engine.admit(request)
    engine.step(a=60)
    saver, asked = engine.side._saver, list[int]()
    save_step = saver.save_step

    def noted(tracker: Any, computed: int, *rest: Any) -> Any:
        asked.append(computed)
        return save_step(tracker, computed, *rest)

    monkeypatch.setattr(saver, "save_step", noted)
    decode(engine, request, 80)
    assert asked == [64, 128]
    engine.finish(request)
    engine.step()


def test_the_policy_is_asked_once_for_each_boundary(engine_of: Engines) -> None:
    policy = Recording([2])
    engine = engine_of(policy)
    request = FakeRequest("a", tokens(300))
    engine.admit(request)
    for _ in range(3):
        engine.step(a=100)
    assert policy.asked == [Boundary(n, turn_end=n == 4) for n in (1, 2, 3, 4)]
    assert checkpoints(engine) == [128, 256]
    engine.finish(request)
    engine.step()


def test_a_prompt_that_ends_on_a_boundary_resumes_when_it_is_sent_again(
    engine_of: Engines,
) -> None:
    engine = engine_of(Zero())
    engine.run(FakeRequest("a", tokens(256)))
    assert checkpoints(engine) == [192, 256]
    assert engine.run(FakeRequest("b", tokens(256))) == 192
    assert engine.run(FakeRequest("c", tokens(257))) == 256


def test_the_end_of_a_prompt_on_a_boundary_is_kept_when_a_reply_follows(engine_of: Engines) -> None:
    engine = engine_of(Zero())
    request = FakeRequest("a", tokens(256))
    engine.admit(request)
    engine.step(a=256)
    decode(engine, request, 90)
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == [192, 256, 336]


@pytest.mark.parametrize(
    ("policy", "resumed"), [(Full(), 256), (Periodic(2), 256), (Periodic(3), 192), (Zero(), 0)]
)
def test_a_request_resumes_at_the_last_checkpoint_before_its_prompt_differs(
    engine_of: Engines, policy: CheckpointPolicy, resumed: int
) -> None:
    engine = engine_of(policy)
    engine.run(FakeRequest("a", tokens(400)))
    assert engine.run(FakeRequest("b", [*tokens(300), *tokens(90, seed=8)])) == resumed


def test_the_next_turn_resumes_where_the_last_one_ended_whatever_the_policy(
    engine_of: Engines,
) -> None:
    policy = Recording()
    engine = engine_of(policy)
    request = FakeRequest("a", tokens(150))
    engine.admit(request)
    engine.step(a=150)
    decode(engine, request, 200)
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == [128, 336]
    turn = FakeRequest("b", [*request.all_token_ids, *tokens(50, seed=3)])
    assert engine.run(turn) == 336
    assert policy.observed[-1] == Reuse(matched=5, kept=5, new=1)


def test_a_boundary_where_a_match_ended_gets_a_checkpoint(engine_of: Engines) -> None:
    policy = Recording()
    engine = engine_of(policy)
    common = tokens(300)
    restored = [
        engine.run(FakeRequest(str(seed), [*common, *tokens(200, seed)])) for seed in (1, 2, 3)
    ]
    assert restored == [0, 0, 256]
    left = [x for x in policy.asked if x.missed_chunks]
    assert left == [Boundary(4, missed_chunks=4)]


def test_chunks_it_did_not_have_to_compute_are_not_missed(engine_of: Engines) -> None:
    policy = Recording([2])
    engine = engine_of(policy)
    engine.run(FakeRequest("a", tokens(400)))
    assert engine.run(FakeRequest("b", [*tokens(300), *tokens(90, seed=8)])) == 128
    assert [x for x in policy.asked if x.missed_chunks] == [Boundary(4, missed_chunks=2)]


@pytest.mark.parametrize(
    ("model", "shared", "local", "asked", "resumed"),
    [
        (HYBRID, 300, 256, [Boundary(4, missed_chunks=4)], 256),
        (HYBRID, 300, 272, [], 0),  # page 14, which the window before 256 needs, is not there
        (LOCAL, 200, 208, [Boundary(3, missed_chunks=1)], 192),
    ],
    ids=["window", "recycled", "local"],
)
def test_an_end_of_a_match_that_the_engine_s_own_cache_passes_gets_a_checkpoint(
    engine_of: Engines, model: ModelSpec, shared: int, local: int, asked: list[Boundary],
    resumed: int,
) -> None:  # fmt: skip
    policy = Recording()
    engine = engine_of(policy, model)
    engine.run(FakeRequest("a", tokens(400)))
    request = FakeRequest("b", [*tokens(shared), *tokens(90, seed=8)])
    engine.admit(request, local=local)
    recycled = 8 if model is LOCAL else local // 16 - 2
    engine.tables.ids["b"][1][:recycled] = [0] * recycled
    engine.step(b=shared + 90 - local)
    assert counts_as_kept(engine, request, shared // CHUNK) == bool(asked)
    engine.finish(request)
    engine.step()
    assert [x for x in policy.asked if x.missed_chunks] == asked
    assert engine.run(FakeRequest("c", [*tokens(shared), *tokens(90, seed=9)])) == resumed


@pytest.mark.parametrize(("local", "most"), [(256, 0), (0, 100)])
def test_a_match_that_its_client_has_cut_gets_no_checkpoint_at_its_end(
    engine_of: Engines, local: int, most: int
) -> None:
    """The stored chain goes on there, and the request with it."""
    policy = Recording()
    engine = engine_of(policy)
    engine.run(FakeRequest("a", tokens(600)))
    request = FakeRequest("b", tokens(600), kv_transfer_params={"max_load_tokens": most})
    assert engine.admit(request, local=local) == 0
    engine.step(b=600 - local)
    engine.finish(request)
    engine.step()
    assert [x for x in policy.asked if x.missed_chunks] == []
    assert checkpoints(engine) == [576, 592]


@pytest.mark.parametrize("local", [0, 256], ids=["computed", "in the engine's own cache"])
def test_an_end_of_a_match_that_found_no_place_is_not_kept(
    engine_of: Engines, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Recording()
    engine = engine_of(policy)
    engine.run(FakeRequest("a", tokens(400)))
    request = FakeRequest("b", [*tokens(300), *tokens(90, seed=8)])
    with monkeypatch.context() as full:
        full.setattr(engine.store, "begin_save", lambda *_, **__: None)
        engine.admit(request, local=local)
        engine.step(b=390 - local)
        engine.finish(request)
        engine.step()
    assert [x for x in policy.asked if x.missed_chunks][:1] == [Boundary(4, missed_chunks=4)]
    engine.run(FakeRequest("c", [*tokens(300), *tokens(90, seed=9)]))
    assert policy.observed[-1] == Reuse(matched=4, kept=0, new=2)
    engine.run(FakeRequest("d", [*tokens(300), *tokens(90, seed=10)]))
    assert policy.observed[-1] == Reuse(matched=4, kept=4, new=2)


def test_an_end_of_a_request_that_found_no_place_is_not_kept(
    engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Recording()
    engine = engine_of(policy)
    request = FakeRequest("a", tokens(60), num_prompt_tokens=60)
    engine.admit(request)
    engine.step(a=60)
    decode(engine, request, 132)
    with monkeypatch.context() as full:
        full.setattr(engine.store, "begin_save", lambda *_, **__: None)
        engine.finish(request)
    engine.step()
    engine.run(FakeRequest("b", [*request.all_token_ids, *tokens(50, seed=3)]))
    assert policy.observed[-1].matched == 3
    assert policy.observed[-1].kept == 0


def test_adaptive_learns_where_prompts_share_their_beginning(engine_of: Engines) -> None:
    engine = engine_of(
        Adaptive(
            CheckpointSizes(CHUNK, 1, 1),
            rates=lambda: CheckpointRates(1.0, 0.0, 0.1 / CHUNK),
            prior_requests=0,
        )
    )
    common = tokens(700)
    restored = [
        engine.run(FakeRequest(str(seed), [*common, *tokens(200, seed)])) for seed in (1, 2, 3, 4)
    ]
    assert restored == [0, 0, 0, 0], "ten chunks of 0.1 s do not pay for a write of 1 s"
    engine = engine_of(
        Adaptive(
            CheckpointSizes(CHUNK, 1, 1),
            rates=lambda: CheckpointRates(1.0, 0.0, 0.11 / CHUNK),
            prior_requests=0,
        )
    )
    restored = [
        engine.run(FakeRequest(str(seed), [*common, *tokens(200, seed)])) for seed in (1, 2, 3, 4)
    ]
    assert restored == [0, 0, 640, 640]


def test_the_policy_observes_every_requests_match(engine_of: Engines) -> None:
    policy = Recording()
    engine = engine_of(policy)
    engine.run(FakeRequest("cold", tokens(300)))
    engine.run(FakeRequest("same", [*tokens(300), *tokens(100, seed=1)]))
    engine.run(FakeRequest("left", [*tokens(200), *tokens(200, seed=2)]))
    engine.run(FakeRequest("again", [*tokens(200), *tokens(200, seed=3)]))
    assert policy.observed == [
        Reuse(matched=0, kept=0, new=4),
        Reuse(matched=4, kept=4, new=2),  # resumed at the end of the first, 288
        Reuse(matched=3, kept=0, new=3),
        Reuse(matched=3, kept=3, new=3),  # where the third one differs
    ]


def test_the_local_hit_counts_as_kept(engine_of: Engines) -> None:
    policy = Recording()
    engine = engine_of(policy)
    engine.run(FakeRequest("a", tokens(400)))
    request = FakeRequest("b", [*tokens(300), *tokens(50, seed=1)])
    engine.admit(request, local=144)
    engine.step(b=206)
    engine.finish(request)
    engine.step()
    assert policy.observed[-1] == Reuse(matched=4, kept=2, local=2, new=1)


@pytest.mark.parametrize(("tier", "kept"), [(Tier.DRAM, 0), (Tier.PEER, 4)])
def test_a_checkpoint_that_a_peer_sent_counts_as_kept(
    engine_of: Engines, tier: Tier, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own checkpoint at 256 was kept by the policy, so it does not count."""
    policy = Recording([4])
    engine = engine_of(policy)
    engine.run(FakeRequest("a", tokens(400)))
    saver = engine.side._saver
    restored = saver.on_restored

    def sent(plan: RestorePlan) -> None:
        last = plan.chunks[-1]
        there = replace(last, tiers=dict.fromkeys(last.tiers, tier))
        restored(replace(plan, chunks=[*plan.chunks[:-1], there]))

    monkeypatch.setattr(saver, "on_restored", sent)
    assert engine.run(FakeRequest("b", [*tokens(256), *tokens(100, seed=1)])) == 256
    assert policy.observed[-1] == Reuse(matched=4, kept=kept, new=1)


def test_a_turn_s_end_of_an_earlier_engine_counts_as_kept(tmp_path: Path) -> None:
    tiers = {"ssd_dir": tmp_path, "ssd_bytes": 1 << 20, "spill_delay_s": 0.0}
    before = Engine(HYBRID, checkpoints=Zero(), **tiers)
    before.run(FakeRequest("a", tokens(256)))
    assert before.store.flush(20.0)
    before.side.close()
    policy = Recording()
    engine = Engine(HYBRID, checkpoints=policy, **tiers)
    request = FakeRequest("b", [*tokens(256), *tokens(100, seed=1)])
    engine.answered(request)
    assert engine.run(request) == 256
    assert policy.observed == [Reuse(matched=4, kept=4, new=1)]
    engine.side.close()


def test_a_preempted_request_is_observed_once_as_first_admitted(engine_of: Engines) -> None:
    policy = Recording()
    engine = engine_of(policy)
    request = FakeRequest("a", tokens(200))
    engine.admit(request)
    engine.step(a=200)
    request.num_computed_tokens = 0
    restored = engine.admit(request)
    assert restored == 192
    engine.step(a=8)
    engine.finish(request)
    engine.step()
    assert policy.observed == [Reuse(matched=0, kept=0, new=3)]


def test_a_boundary_without_boundary_state_saves_prefix_state_only(engine_of: Engines) -> None:
    """A local-attention chunk begins at 128 and at 256."""
    engine = engine_of(Full(), LOCAL)
    engine.run(FakeRequest("a", tokens(280)))
    assert checkpoints(engine, StateType.CHUNKED_LOCAL) == [64, 192, 272]
    assert checkpoints(engine, KV) == [64, 128, 192, 256, 272]
    for shared in (128, 256):
        again = FakeRequest(f"b{shared}", [*tokens(shared), *tokens(60, seed=shared)])
        assert engine.run(again) == shared, "nothing of it is missed"


# A request's end without tails


def test_only_the_last_decoded_boundary_is_kept(engine_of: Engines) -> None:
    policy = Recording()
    engine = engine_of(policy, COARSE)
    request = FakeRequest("a", tokens(100))
    engine.admit(request)
    engine.step(a=100)
    seen = []
    for _ in range(3):
        decode(engine, request, 64)
        seen.append(checkpoints(engine))
        assert not engine.side.has_work, "no step is needed for what is undecided"
    assert seen == [[64], [64], [64]]
    assert [a.state_type for a in in_use(engine)] == [SWA]
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == [64, 256]
    assert checkpoints(engine, KV) == [64, 128, 192, 256]
    assert engine.counters()["heterocache_saved_bytes{state_type=window_swa}"] == 2 * 512
    turn = FakeRequest("b", [*request.all_token_ids, *tokens(50, seed=3)])
    assert engine.run(turn) == 256
    assert policy.observed[-1] == Reuse(matched=4, kept=4, new=1)


def test_a_decoded_boundary_that_the_policy_wants_is_kept(engine_of: Engines) -> None:
    engine = engine_of(Periodic(2), COARSE)
    request = FakeRequest("a", tokens(100))
    engine.admit(request)
    engine.step(a=100)
    decode(engine, request, 230)
    assert checkpoints(engine) == [64, 128, 256]
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == [64, 128, 256, 320]


def test_an_undecided_checkpoint_is_dropped_if_the_next_one_is_kept(
    engine_of: Engines,
) -> None:
    engine = engine_of(Periodic(2), COARSE)
    request = FakeRequest("a", tokens(100))
    engine.admit(request)
    engine.step(a=100)
    decode(engine, request, 170)
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == [64, 128, 256]


def reported_late(engine: Engine, request: FakeRequest) -> StepMetadata:
    """Decode the first token after the chunk boundary 128; the step's report comes later."""
    engine.admit(request)
    engine.step(a=100)
    decode(engine, request, 27)
    request.all_token_ids.append(1)
    engine.grow_table(request)
    meta = engine.side.order_step(scheduled(a=1))  # type: ignore[arg-type]
    request.num_computed_tokens += 1
    assert [x.state_type for save in meta.saves for x in save.copy.artifacts] == [KV, SWA]
    return meta


def test_an_end_that_is_copied_later_is_sealed_when_it_is_copied(engine_of: Engines) -> None:
    engine = engine_of(Zero(), COARSE)
    request = FakeRequest("a", tokens(100))
    meta = reported_late(engine, request)
    engine.finish(request)
    assert checkpoints(engine) == [64]
    assert engine.side.has_work
    engine.report(meta)
    assert checkpoints(engine) == [64, 128]


def test_an_undecided_boundary_goes_with_a_reset(engine_of: Engines) -> None:
    engine = engine_of(Zero(), COARSE)
    request = FakeRequest("a", tokens(100))
    meta = reported_late(engine, request)
    engine.side.reset()
    assert engine.side.has_work, "the workers may still write into the slot"
    engine.report(meta)
    assert engine.side._saver._reservations._reserved == {}
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == checkpoints(engine, KV) == []


def test_a_preempted_request_keeps_its_undecided_boundary(engine_of: Engines) -> None:
    engine = engine_of(Zero(), COARSE)
    request = FakeRequest("a", tokens(100))
    engine.report(reported_late(engine, request))
    request.num_computed_tokens = 0
    restored = engine.admit(request)
    assert restored == 64
    engine.step(a=request.num_tokens - restored)
    engine.finish(request)
    engine.step()
    assert checkpoints(engine) == [64, 128]


# Recurrent state


def offered(boundaries: Sequence[int], **num_tokens: int) -> SimpleNamespace:
    """Return a step in which vLLM offers recurrent states at these boundaries."""
    output = scheduled(**num_tokens)
    offers = {name: [(1, 7, boundary) for boundary in boundaries] for name in num_tokens}
    output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=offers)
    return output


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Full(), [64, 128, 192, 256]), (Periodic(2), [128, 256]), (Periodic(3), [192, 256])],
)
def test_recurrent_state_is_kept_where_the_policy_says_and_at_the_prompt_s_last_boundary(
    engine_of: Engines, policy: CheckpointPolicy, expected: list[int]
) -> None:
    engine = engine_of(policy, MAMBA)
    request = FakeRequest("a", tokens(300))
    engine.admit(request)
    engine.report(engine.side.order_step(offered([64, 128, 192, 256], a=300)))  # type: ignore[arg-type]
    request.num_computed_tokens += 300
    engine.finish(request)
    engine.step()
    assert checkpoints(engine, RECURRENT) == expected
    assert checkpoints(engine, KV) == [64, 128, 192, 256]


@pytest.mark.parametrize("offers", [[64, 128, 192, 256], [64, 128, 192]])
def test_an_end_of_a_prompt_is_kept_only_with_its_recurrent_state(
    engine_of: Engines, offers: Sequence[int]
) -> None:
    engine, request = engine_of(Full(), MAMBA), FakeRequest("a", tokens(300))
    engine.admit(request)
    engine.report(engine.side.order_step(offered(offers, a=300)))  # type: ignore[arg-type]
    kept = [chunks for chunks in (1, 2, 3, 4) if counts_as_kept(engine, request, chunks)]
    assert kept == [x // CHUNK for x in offers if x == 256]
    engine.finish(request)
    engine.step()


HANDOFF = {"do_remote_decode": True}
EXACT = replace(HYBRID, exact_handoffs=True)


@pytest.mark.parametrize(
    ("model", "length", "end"),
    [
        (DENSE, 150, 149),  # only prefix-proportional state: any boundary, without cost
        (HYBRID, 150, 144),
        (HYBRID, 145, 144),
        (HYBRID, 144, 128),  # before the last token
        (EXACT, 150, 149),
        (EXACT, 129, 128),
        (EXACT, 40, 39),
        (COARSE, 150, 144),
        (EXACT, 1, 0),
    ],
)
@pytest.mark.parametrize("step", [200, 30])
def test_a_remote_prefill_is_stored_up_to_where_its_decoder_resumes(
    engine_of: Engines, model: ModelSpec, length: int, end: int, step: int
) -> None:
    engine = engine_of(Zero(), model)
    request = FakeRequest("a", tokens(length), kv_transfer_params=HANDOFF)
    engine.admit(request)
    for start in range(0, length, step):
        engine.step(a=min(step, length - start))
    assert engine.finish(request) == end
    engine.step()
    assert engine.run(FakeRequest("b", tokens(length))) == end
    assert engine.run(FakeRequest("c", [*tokens(length)[:-1], 300])) == end


def test_a_prefill_that_decoded_on_is_handed_off_if_its_windows_are_there(
    engine_of: Engines,
) -> None:
    engine = engine_of(Zero(), EXACT)
    request = FakeRequest("a", tokens(150), kv_transfer_params=HANDOFF)
    engine.admit(request)
    engine.step(a=150)
    decode(engine, request, 60)
    engine.tables.ids["a"][1][:10] = [0] * 10
    assert engine.finish(request) == 128
    engine.step()
    assert engine.run(FakeRequest("b", tokens(150))) == 128


@pytest.mark.parametrize(("slots", "kept"), [(1, 64), (2, 128), (3, 144), (4, 149)])
def test_a_prefill_names_the_tokens_that_found_space(slots: int, kept: int) -> None:
    engine = Engine(DENSE, dram_bytes=slots * 4096)
    request = FakeRequest("a", tokens(150), kv_transfer_params=HANDOFF)
    engine.admit(request)
    engine.step(a=150)
    assert engine.finish(request) == kept
    engine.step()
    assert engine.run(FakeRequest("b", tokens(150))) == kept
    engine.side.close()


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("length", [256, 257])
def test_a_prefill_does_not_promise_what_was_evicted_before_it_ended(
    matched: bool, length: int
) -> None:
    engine = Engine(DENSE, dram_bytes=4 * 4096)
    if matched:
        engine.run(FakeRequest("before", tokens(256)))
    request = FakeRequest("a", tokens(length), kv_transfer_params=HANDOFF)
    restored = engine.admit(request)
    engine.step(a=length - restored)
    engine.run(FakeRequest("b", tokens(128, seed=1)))
    assert engine.finish(request) == 128
    engine.step()
    assert engine.run(FakeRequest("c", tokens(length))) == 128
    engine.side.close()


def test_a_local_chunk_that_has_just_begun_is_handed_off_without_its_state(
    engine_of: Engines,
) -> None:
    """With chunks of 128 tokens the boundary at 256 has only prefix-proportional state."""
    engine = engine_of(Zero(), LOCAL)
    request = FakeRequest("a", tokens(257), kv_transfer_params=HANDOFF)
    engine.admit(request)
    engine.step(a=257)
    assert engine.finish(request) == 256
    engine.step()
    assert checkpoints(engine, StateType.CHUNKED_LOCAL) == []
    assert engine.run(FakeRequest("b", tokens(300))) == 256


def test_only_a_handoff_is_stored_off_the_grid(engine_of: Engines) -> None:
    engine = engine_of(Zero(), EXACT)
    request = FakeRequest("a", tokens(150))
    engine.admit(request)
    engine.step(a=150)
    assert engine.finish(request) == 0
    engine.step()
    assert checkpoints(engine) == [128, 144]


WINDOWS = ModelSpec((layer("swa", 0, SWA, window=32),), alignment=16)


def test_a_chunk_that_finds_no_slot_is_counted_once_and_without_it_none_after_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first chunk's window is recycled before there is room, and it has nothing else."""
    engine, request = Engine(WINDOWS, checkpoints=Full()), FakeRequest("a", tokens(400))

    def failures() -> dict[str, float]:
        counted = (engine.recorder.drain() or {}).get(COUNTERS, {})
        return {k: n for k, n in counted.items() if "_failures" in k}

    engine.admit(request)
    with monkeypatch.context() as full:
        full.setattr(engine.store.catalog.tiers, "take_dram", lambda artifact: None)
        engine.step(a=64)
        for _ in range(5):
            engine.step(a=1)
        assert failures() == {"heterocache_failures{cause=no_slot,tier=dram}": 1}
        engine.run(FakeRequest("same", tokens(70)))
        assert failures() == {"heterocache_failures{cause=no_slot,tier=dram}": 1}, "its own"
    engine.tables.ids["a"][0][:4] = [0] * 4
    for _ in range(5):
        engine.step(a=60)
    engine.finish(request)
    engine.step()
    assert failures() == {"heterocache_failures{cause=gone,tier=dram}": 1}
    assert checkpoints(engine) == []
    engine.run(FakeRequest("b", tokens(400, seed=2)))
    assert len(checkpoints(engine)) == 7, "another request"
    engine.side.close()


def test_a_checkpoint_that_is_not_stored_keeps_no_full_chunk_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The boundary that is decoded is wanted only if the request ends there."""
    engine = Engine(replace(WINDOWS, alignment=CHUNK), checkpoints=Zero())
    request = FakeRequest("a", tokens(100))
    engine.admit(request)
    engine.step(a=100)
    tried = list[int]()
    monkeypatch.setattr(engine.store, "begin_save", lambda chunk, *_, **__: tried.append(chunk.end))
    monkeypatch.setattr(engine.store, "known", lambda keys: [])
    decode(engine, request, 40)
    assert tried == [128]
    assert not engine.side._trackers["a"].lacks_parent
    engine.side.close()
