"""What stands in for the planner in a benchmark answers the connector as the planner does."""

from benchmarks.cost_errors import _Heard
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


def test_a_planner_that_is_listened_to_is_cut_like_any_other() -> None:
    engine = Engine(DENSE, mode="cost")
    engine.run(FakeRequest("a", tokens(200)))
    restorer = engine.side._restorer
    heard = _Heard(restorer._planner)
    restorer._planner = _Cut(heard, limit=150)  # type: ignore[assignment]
    heard.mode = "never_load"
    assert engine.admit(FakeRequest("b", tokens(200))) == 128
    assert heard.planner.mode == "never_load"
    assert heard.first is not None
    assert heard.first.plan is not None
    assert heard.first.plan.resume_tokens == 128
    engine.side.close()
