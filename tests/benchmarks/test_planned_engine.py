"""The replacements of the planner in benchmarks answer the connector like the planner."""

from benchmarks.cost_errors import _FirstDecision
from benchmarks.planned_engine import _Cut
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import Engine, tokens


def test_a_cut_restore_ends_at_the_last_boundary_before_the_limit() -> None:
    engine = Engine(DENSE, mode="cost")
    engine.run(FakeRequest("a", tokens(200)))
    restorer = engine.side._restorer
    planner = restorer._planner
    restorer._planner = _Cut(planner, limit=150)  # type: ignore[assignment]
    assert engine.admit(FakeRequest("b", tokens(200))) == 128
    assert planner.mode == "cost"
    engine.side.close()


def test_a_recorded_planner_can_be_cut() -> None:
    engine = Engine(DENSE, mode="cost")
    engine.run(FakeRequest("a", tokens(200)))
    restorer = engine.side._restorer
    recorder = _FirstDecision(restorer._planner)
    restorer._planner = _Cut(recorder, limit=150)  # type: ignore[assignment]
    recorder.mode = "never_load"
    assert engine.admit(FakeRequest("b", tokens(200))) == 128
    assert recorder.planner.mode == "never_load"
    assert recorder.first is not None
    assert recorder.first.plan is not None
    assert recorder.first.plan.resume_tokens == 128
    engine.side.close()
