"""What steps, loads and reads took reaches the cost model; what it says decides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.v1.request import RequestStatus

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.messages import StepMetadata, StepTiming, WorkerReport
from hetero_connector.metrics import TIMINGS
from hetero_connector.planner.compute_model import attention_work
from hetero_connector.spec import StateType
from hetero_connector.store.base import ReadTiming
from tests.engine.fakes import DENSE, FakeRequest, scheduled
from tests.engine.test_scheduler_side import Engine, tokens

KV = StateType.DENSE_KV


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(DENSE, mode="cost")
    yield engine
    engine.side.close()


def step(engine: Engine, **num_tokens: int) -> StepMetadata:
    return engine.side.step(scheduled(**num_tokens))  # type: ignore[arg-type]


def timed(engine: Engine, meta: StepMetadata, forward_s: float, load_s: float = 0.0) -> None:
    assert meta.timed_as is not None
    report = WorkerReport(timings=[StepTiming(meta.timed_as, forward_s, load_s)])
    engine.side.reported(report)


def taught(engine: Engine, token_s: float, byte_s: float) -> None:
    """Let the model see many steps and loads of these costs."""
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
    (asked,) = engine.side._learner._asked.values()
    assert asked.new_tokens == 192
    assert asked.work == attention_work(128, 0) + attention_work(64, 64)
    assert meta.timed_as is not None


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


def test_a_load_teaches_its_tier_and_no_compute(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    before = engine.costs.compute.samples
    for number in range(20):
        name = f"b{number}"
        assert engine.admit(FakeRequest(name, tokens(200))) == 192
        meta = step(engine, **{name: 8})
        timed(engine, meta, 0.0, load_s=0.01)
        engine.report(meta)
    assert engine.costs.compute.samples == before
    assert engine.costs.load.errors(Tier.DRAM).count == 20
    pages = {KV: 12 * 256}
    assert engine.costs.load.predict(Tier.DRAM, pages) == pytest.approx(0.01, rel=0.1)


def test_reads_of_the_store_teach_the_ssd(engine: Engine) -> None:
    for _ in range(20):
        engine.store._state.timings.append(ReadTiming(Tier.SSD, {KV: 1 << 20}, 0, 0.125))
        engine.side.reported(WorkerReport())
    assert engine.costs.load.errors(Tier.SSD).count == 20
    assert engine.costs.load.predict(Tier.SSD, {KV: 1 << 20}) == pytest.approx(0.125, rel=0.1)


def test_steps_that_are_never_reported_are_forgotten(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(20_000)))
    for _ in range(200):
        step(engine, a=16)
    assert len(engine.side._learner._asked) <= 64
    engine.side.reported(WorkerReport(timings=[StepTiming(1, 9.0, 0.0)]))
    assert engine.costs.compute.samples == 0


@pytest.mark.parametrize(("token_s", "byte_s", "restored"), [(1e-3, 1e-9, 192), (1e-6, 1e-3, 0)])
def test_cheap_loads_are_loaded_and_dear_ones_computed(
    engine: Engine, token_s: float, byte_s: float, restored: int
) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    taught(engine, token_s, byte_s)
    assert engine.admit(FakeRequest("b", tokens(200))) == restored


def test_what_was_predicted_is_reported_with_what_came(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    engine.recorder.drain()
    request = FakeRequest("b", tokens(200))
    engine.admit(request)
    step(engine, b=8)
    request.num_computed_tokens = 200
    step(engine, b=1)
    payload = engine.recorder.drain()
    assert payload is not None
    assert payload["counters"]["heterocache_decisions{choice=load}"] == 1
    for name in ("ttft", "reuse_benefit"):
        for kind in ("predicted", "observed"):
            (seconds,) = payload[TIMINGS][f"heterocache_{name}_seconds{{kind={kind}}}"]
            assert isinstance(seconds, float)


def test_a_tier_that_was_turned_down_is_trusted_less_once_a_request(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    taught(engine, token_s=1e-6, byte_s=1e-3)
    slow_s = engine.costs.load.predict(Tier.DRAM, {KV: 4096})
    request = FakeRequest("b", tokens(200))
    for _ in range(50):
        assert engine.side.matched_tokens(request, 0)[0] == 0  # type: ignore[arg-type]
    assert engine.costs.load.predict(Tier.DRAM, {KV: 4096}) == slow_s
    assert engine.admit(request) == 0
    request.num_computed_tokens = 200
    step(engine, b=1)
    assert engine.costs.load.predict(Tier.DRAM, {KV: 4096}) < slow_s


def test_the_engine_s_load_counts_running_requests(engine: Engine) -> None:
    for name, computed in (("a", 150), ("b", 200), ("c", 0)):
        engine.admit(FakeRequest(name, tokens(200)))
        engine.requests[name].num_computed_tokens = computed
        engine.requests[name].status = RequestStatus.RUNNING
    engine.requests["c"].status = RequestStatus.WAITING
    load = engine.side._engine_load()
    assert (load.queued_tokens, load.running_decodes) == (50, 1)
    assert load.layerwise
    assert load.in_flight_bytes == {}
