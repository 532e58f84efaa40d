"""Times of steps, loads and reads reach the cost model, which then decides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.engine.messages import (
    ArtifactSpan,
    Load,
    StepMetadata,
    StepTiming,
    WorkerReport,
)
from hetero_connector.engine.scheduler.cost_learner import CostLearner, _step_mix
from hetero_connector.metrics import HISTOGRAMS
from hetero_connector.planner.compute_model import ComputeCoefficients, StepMix, attention_work
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.spec import ModelSpec, RestoreRule, StateType
from hetero_connector.store.base import ReadTiming
from tests.clock import Clock
from tests.engine.fakes import DENSE, FakeRequest, layer, scheduled
from tests.engine.stepped import Engine, tokens

KV = StateType.DENSE_KV


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(DENSE, mode="cost")
    yield engine
    engine.side.close()


def step(engine: Engine, **num_tokens: int) -> StepMetadata:
    return engine.side.order_step(scheduled(**num_tokens))  # type: ignore[arg-type]


def timed(engine: Engine, meta: StepMetadata, forward_s: float, load_s: float = 0.0) -> None:
    assert meta.timed_as is not None
    report = WorkerReport(timings=[StepTiming(meta.timed_as, forward_s, load_s)])
    engine.side.on_report(report)


def taught(engine: Engine, token_s: float, byte_s: float) -> None:
    """Teach the model many steps and loads of these costs."""
    for new in (16, 64, 256, 1024) * 8:
        engine.costs.compute.observe(new, 0, 1e-4 + token_s * new)
        engine.costs.load.observe(Tier.DRAM, {KV: 256 * new}, 1e-5 + byte_s * 256 * new)


def test_a_prefill_step_teaches_compute(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(200)))
    for _ in range(20):
        timed(engine, step(engine, a=128), 0.25)
    assert engine.costs.compute.samples == 20
    assert engine.costs.compute.predict(128, 0) == pytest.approx(0.25, rel=0.05)


def test_work_is_summed_over_the_requests_of_a_step(engine: Engine) -> None:
    for name in "ab":
        engine.admit(FakeRequest(name, tokens(200)))
    engine.requests["b"].num_computed_tokens = 64
    meta = step(engine, a=128, b=64)
    (asked,) = engine.side._learner._timed.values()
    assert asked.mix == (192, attention_work(128, 0) + attention_work(64, 64), 0, 0)
    assert meta.timed_as is not None


def test_a_step_teaches_the_cost_of_a_prefill_for_decodes(engine: Engine) -> None:
    """`a` decodes its 201st token while `b` computes 64 tokens of its prompt."""
    for name in "ab":
        engine.admit(FakeRequest(name, tokens(200)))
    engine.requests["a"].num_computed_tokens = 200
    engine.requests["b"].num_computed_tokens = 64
    meta = step(engine, a=1, b=64)
    (asked,) = engine.side._learner._timed.values()
    assert asked.mix == (64, attention_work(64, 64), 1, 200)
    timed(engine, meta, 0.25)
    assert engine.costs.interference.samples == 1
    assert engine.costs.interference.predict(asked.mix) == pytest.approx(0.25, rel=0.05)


def test_an_answer_that_is_computed_again_is_no_decode(engine: Engine) -> None:
    """After a preemption, up to its last token, which is decoded."""
    answered = FakeRequest("a", tokens(9_000), num_prompt_tokens=1_000)
    engine.admit(answered)
    trackers = engine.side._trackers
    answered.num_computed_tokens = 2_048
    work = attention_work(2_048, 2_048)
    assert _step_mix({"a": 2_048}, trackers) == StepMix(2_048, work, 0, 0)
    answered.num_computed_tokens = 8_999
    assert _step_mix({"a": 1}, trackers) == StepMix(0, 0.0, 1, 8_999)


def test_decodes_do_not_teach_the_attention_of_prefills(engine: Engine) -> None:
    """A context token of a decode takes twenty times as long as one of a prefill's attention."""
    prefill = ComputeCoefficients(8e-3, 3e-5, 1e-9)
    rng = random.Random(0)
    for name in ("decodes", "computes"):
        engine.admit(FakeRequest(name, tokens(40_000, len(name))))
    for number in range(1200):
        context = rng.randrange(1_000, 30_000)
        size = rng.choice((64, 256, 1024, 4096)) if number % 4 == 0 else 0
        engine.requests["decodes"].num_computed_tokens = 40_000 + context
        engine.requests["computes"].num_computed_tokens = rng.randrange(30_000)
        decoding_s = 2e-8 * (40_000 + context)
        if size:
            over = engine.requests["computes"].num_computed_tokens
            meta = step(engine, decodes=1, computes=size)
            timed(engine, meta, prefill.prompt_s(size, over) + decoding_s)
        elif (meta := step(engine, decodes=1)).timed_as is not None:
            timed(engine, meta, prefill.step_s + decoding_s)
    learned = engine.costs.compute
    for size, context in ((64, 30_000), (256, 30_000), (4096, 0), (4096, 30_000)):
        assert learned.predict(size, context) == pytest.approx(
            prefill.prompt_s(size, context), rel=0.1
        )


def test_a_step_with_an_unknown_request_teaches_nothing(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(200)))
    assert step(engine, a=128, stranger=64).timed_as is None


def test_few_decode_steps_are_timed(engine: Engine) -> None:
    request = FakeRequest("a", tokens(200))
    engine.admit(request)
    step(engine, a=200)
    request.num_computed_tokens = 200
    timed_steps = [step(engine, a=1).timed_as for _ in range(64)]
    assert sum(x is not None for x in timed_steps) == 4


def test_a_step_that_loads_teaches_its_tier_and_compute(engine: Engine) -> None:
    """Only steps after a restore compute few tokens over a long context."""
    engine.run(FakeRequest("a", tokens(200)))
    for number in range(20):
        name = f"b{number}"
        assert engine.admit(FakeRequest(name, tokens(200))) == 192
        meta = step(engine, **{name: 8})
        timed(engine, meta, 0.03, load_s=0.01)
        engine.report(meta)
    assert engine.costs.load.errors(Tier.DRAM).count == 20
    pages = {KV: 12 * 256}
    assert engine.costs.load.predict(Tier.DRAM, pages) == pytest.approx(0.01, rel=0.1)
    assert engine.costs.compute.samples == 20
    assert engine.costs.compute.predict(8, 192) == pytest.approx(0.03, rel=0.1)


def test_a_step_that_only_loads_teaches_the_load() -> None:
    """Recurrent state on an idle engine: its load has a step of its own."""
    recurrent = layer("gdn", 1, StateType.RECURRENT, block=64)
    recurrent = replace(recurrent, restore_rule=RestoreRule.AT_BOUNDARY)
    engine = Engine(ModelSpec((layer("full", 0), recurrent), alignment=16), mode="cost")
    size = engine.layout.artifact_bytes(KV, 0, 64)
    load = Load("a", [ArtifactSpan(KV, 0, 192, 64, [0, 4096, 8192])], {}, True, 192)
    for _ in range(20):
        meta = StepMetadata(loads=[load])
        engine.side._learner.request_timing(scheduled(), {}, meta)  # type: ignore[arg-type]
        timed(engine, meta, 0.001, load_s=0.01)
    assert engine.costs.load.predict(Tier.DRAM, {KV: 3 * size}) == pytest.approx(0.01, rel=0.1)
    assert engine.costs.compute.samples == 0
    nothing = StepMetadata()
    engine.side._learner.request_timing(scheduled(), {}, nothing)  # type: ignore[arg-type]
    assert nothing.timed_as is None
    engine.side.close()


def learner(engine: Engine) -> tuple[CostLearner, Clock]:
    """Return a learner and its clock."""
    clock = Clock()
    return CostLearner(engine.costs, engine.layout, engine.store, clock), clock


def asked(learner: CostLearner, engine: Engine, name: str, num_tokens: int) -> int:
    meta = StepMetadata()
    learner.request_timing(scheduled(**{name: num_tokens}), engine.side._trackers, meta)  # type: ignore[arg-type]
    assert meta.timed_as is not None
    return meta.timed_as


def test_the_time_of_a_step_beyond_its_forward_is_learned(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(20_000)))
    learning, clock = learner(engine)
    for _ in range(40):
        number = asked(learning, engine, "a", 128)
        clock.passes(0.030)
        report = WorkerReport(timings=[StepTiming(number, 0.020, 0.0)], timed_step=number)
        learning.on_report(report)
        clock.passes(5.0)  # idle
    assert engine.costs.compute.predict(128, 0) == pytest.approx(0.030, rel=0.02)


def test_steps_scheduled_ahead_do_not_count_each_other_s_time(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(20_000)))
    learning, clock = learner(engine)
    running = asked(learning, engine, "a", 128)
    for _ in range(40):
        ahead = asked(learning, engine, "a", 128)
        clock.passes(0.030)
        timings = [StepTiming(running, 0.020, 0.0)]
        learning.on_report(WorkerReport(timings=timings, timed_step=running))
        running = ahead
    assert engine.costs.compute.predict(128, 0) == pytest.approx(0.030, rel=0.02)


def test_a_late_timing_is_compared_with_its_own_step(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(20_000)))
    learning, clock = learner(engine)
    late: list[StepTiming] = []
    for _ in range(40):
        number = asked(learning, engine, "a", 128)
        clock.passes(0.030)
        learning.on_report(WorkerReport(timings=late, timed_step=number))
        late = [StepTiming(number, 0.020, 0.0)]
        clock.passes(0.5)
        learning.on_report(WorkerReport())
    assert engine.costs.compute.predict(128, 0) == pytest.approx(0.030, rel=0.02)


def test_reads_of_the_store_teach_the_ssd(engine: Engine) -> None:
    for _ in range(20):
        engine.store.catalog.loads.timings.append(ReadTiming(Tier.SSD, {KV: 1 << 20}, 0, 0.125))
        step(engine)
    assert engine.costs.load.errors(Tier.SSD).count == 20
    assert engine.costs.load.predict(Tier.SSD, {KV: 1 << 20}) == pytest.approx(0.125, rel=0.1)


def test_reads_while_computing_are_learned_apart_from_idle_ones(
    engine: Engine,
) -> None:
    """A read that ends while nothing computes is learned in the next step."""
    engine.admit(FakeRequest("a", tokens(20_000)))
    for _ in range(20):
        step(engine, a=1)
        engine.store.catalog.loads.timings.append(ReadTiming(Tier.SSD, {KV: 1 << 20}, 0, 0.25))
        step(engine)
        engine.store.catalog.loads.timings.append(ReadTiming(Tier.SSD, {KV: 1 << 20}, 0, 0.125))
        step(engine, a=1)
    load = engine.costs.load
    assert load.predict(Tier.SSD, {KV: 1 << 20}) == pytest.approx(0.125, rel=0.1)
    assert load.predict(Tier.SSD, {KV: 1 << 20}, while_computing=True) == pytest.approx(
        0.25, rel=0.1
    )


def test_reads_that_were_given_up_are_lower_bounds(engine: Engine) -> None:
    size = {KV: 1 << 20}
    for seconds in (1.0, 1e-6):
        for _ in range(4):
            timing = ReadTiming(Tier.SSD, size, 0, seconds, whole=False)
            engine.store.catalog.loads.timings.append(timing)
            step(engine)
        assert engine.costs.load.predict(Tier.SSD, size) == pytest.approx(1.0, rel=0.1)


def test_steps_that_are_never_reported_are_forgotten(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(20_000)))
    for _ in range(200):
        step(engine, a=16)
    assert len(engine.side._learner._timed) <= 64
    engine.side.on_report(WorkerReport(timings=[StepTiming(1, 9.0, 0.0)]))
    assert engine.costs.compute.samples == 0


@pytest.mark.parametrize(("token_s", "byte_s", "restored"), [(1e-3, 1e-9, 192), (1e-6, 1e-3, 0)])
def test_cheap_loads_are_loaded_and_expensive_ones_computed(
    engine: Engine, token_s: float, byte_s: float, restored: int
) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    taught(engine, token_s, byte_s)
    assert engine.admit(FakeRequest("b", tokens(200))) == restored


def test_predictions_are_recorded_with_the_observed_values(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    engine.recorder.drain()
    request = FakeRequest("b", tokens(200))
    engine.admit(request)
    step(engine, b=8)
    request.num_computed_tokens = 200
    request.all_token_ids.append(7)
    step(engine, b=1)
    payload = engine.recorder.drain()
    assert payload is not None
    assert payload["counters"]["heterocache_decisions{choice=load}"] == 1
    for name in ("ttft", "reuse_benefit"):
        for kind in ("predicted", "observed"):
            (seconds,) = payload[HISTOGRAMS][f"heterocache_{name}_seconds{{kind={kind}}}"]
            assert isinstance(seconds, float)


def test_a_declined_tier_is_tried_again_after_minutes_not_after_questions() -> None:
    clock = Clock(0.0)
    engine = Engine(DENSE, mode="cost", clock=clock)
    engine.run(FakeRequest("a", tokens(200)))
    taught(engine, token_s=1e-4, byte_s=1e-3)
    engine.costs.load = engine.side.predictions._load = LoadModel([KV])
    for _ in range(20):
        engine.costs.load.observe(Tier.DRAM, {KV: 3 * 4096}, 10.0)
    for minute in range(20):
        slow = engine.costs.load.rates(Tier.DRAM)
        request = FakeRequest(f"b{minute}", tokens(200))
        for _ in range(50):
            found = engine.ask(request)
        assert engine.costs.load.rates(Tier.DRAM) is slow
        if found:
            break
        assert engine.admit(request) == 0
        engine.step(**{request.request_id: 200})
        request.all_token_ids.append(7)
        engine.step(**{request.request_id: 1})
        engine.finish(request)
        clock.passes(60.0)
    assert 1 < minute < 19
    engine.side.close()


def test_declined_chunks_are_evicted_first() -> None:
    slots = 8
    engine = Engine(DENSE, mode="cost", dram_bytes=slots * 4096)
    engine.run(FakeRequest("kept", tokens(128, seed=1)))
    engine.run(FakeRequest("dear", tokens(192)))  # more recent
    taught(engine, token_s=1e-6, byte_s=1e-3)
    request = FakeRequest("again", tokens(200))
    assert engine.admit(request) == 0
    step(engine, again=200)
    request.num_computed_tokens = 200
    request.all_token_ids.append(7)
    step(engine, again=1)
    engine.run(FakeRequest("new", tokens(320, seed=2)))  # needs two slots more than are free
    for prompt, chunks in ((tokens(128, seed=1), 2), (tokens(192), 1)):
        chain = RequestChain(engine.side.root.hasher)
        chain.extend(prompt)
        assert len(engine.store.match(chain.chunks())) == chunks
    engine.side.close()


def test_chunks_that_a_request_must_not_load_do_not_leave_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is in DRAM; the request may not load the others from SSD."""
    engine = Engine(DENSE, mode="cost", ssd_dir=tmp_path, ssd_bytes=1 << 20, spill_delay_s=0.0)
    engine.run(FakeRequest("all", tokens(200)))
    assert engine.store.flush(20.0)
    engine.store.leave_to_ssd()
    first = FakeRequest("first", tokens(70))
    engine.answered(first)
    assert engine.run(first) == 64
    taught(engine, token_s=1e-6, byte_s=1e-3)
    declined: list[StoredChunk] = []
    monkeypatch.setattr(engine.store, "decline", declined.extend)
    request = FakeRequest("b", tokens(200), kv_transfer_params={"kv_load_tiers": []})
    assert engine.admit(request) == 0
    engine.step(b=200)
    request.all_token_ids.append(7)
    engine.step(b=1)
    assert [x.chunk.end for x in declined] == [64]
    engine.side.close()


def test_the_engine_s_load_counts_running_requests(engine: Engine) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        engine.admit(FakeRequest(name, tokens(200, seed)))
    engine.step(a=150, b=200)
    engine.ask(FakeRequest("c", tokens(200)))
    load = engine.side._engine_load(engine.side._trackers["c"], [])
    assert (load.queued_tokens, load.running_decodes, load.waiting_tokens) == (50, 1, 0)
    assert load.hidden_share == 1.0
    assert load.in_flight_bytes == {}


def test_the_contexts_of_two_pipeline_stages_grow_by_turns() -> None:
    engine = Engine(DENSE, num_ranks=2)
    for name, seed in (("a", 1), ("b", 2)):
        engine.admit(FakeRequest(name, tokens(200, seed)))
        engine.step(**{name: 200})
    for _ in range(30):
        engine.step(a=1)
        engine.step(b=1)
    engine.ask(FakeRequest("c", tokens(200)))
    load = engine.side._engine_load(engine.side._trackers["c"], [])
    assert load.decoded_context == pytest.approx(2 * 230, abs=2)
    engine.side.close()


def test_requests_that_were_matched_earlier_are_ahead(engine: Engine) -> None:
    engine.run(FakeRequest("before", tokens(200)))
    taught(engine, token_s=1e-3, byte_s=1e-9)
    for name, seed in (
        ("computes", 1),
        ("restores", 0),
        ("new", 3),
        ("later", 4),
    ):
        request = FakeRequest(name, tokens(200, seed), status=RequestStatus.WAITING)
        assert engine.ask(request, local=32 if name == "computes" else 0) is not None
        engine.requests[name] = request
    trackers = engine.side._trackers
    restore = trackers["restores"].restore
    assert restore is not None
    assert restore.plan.resume_tokens == 192
    left = [(200 - 32), (200 - 192)]
    for name, waiting in (("computes", 0), ("new", sum(left)), ("later", sum(left) + 200)):
        load = engine.side._engine_load(trackers[name], [])
        assert (load.queued_tokens, load.waiting_tokens) == (0, waiting)
    engine.grow_table(engine.requests["computes"])
    engine.side.on_allocated(engine.requests["computes"], 0)  # type: ignore[arg-type]
    load = engine.side._engine_load(trackers["new"], [])
    assert (load.queued_tokens, load.waiting_tokens) == (200, sum(left[1:]))


def test_few_of_the_decode_steps_are_timed_also_with_drafted_tokens(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(200)))
    engine.requests["a"].num_computed_tokens = 200
    output = scheduled(a=4)
    output.scheduled_spec_decode_tokens = {"a": [-1, -1, -1]}
    timed_as = [engine.side.order_step(output).timed_as for _ in range(32)]  # type: ignore[arg-type]
    assert len([x for x in timed_as if x is not None]) == 2
