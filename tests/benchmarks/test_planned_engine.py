"""The grid's way to cut a restore answers the connector as the planner does."""

from benchmarks.planned_engine import _Cut
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.test_scheduler_side import Engine, tokens


def test_a_cut_restore_ends_at_the_last_boundary_before_the_limit() -> None:
    engine = Engine(DENSE, mode="cost")
    engine.run(FakeRequest("a", tokens(200)))
    restorer = engine.side._restorer
    planner = restorer._planner
    restorer._planner = _Cut(planner, limit=150)  # type: ignore[assignment]
    assert engine.admit(FakeRequest("b", tokens(200))) == 128
    assert planner.mode == "cost"
    engine.side.close()
