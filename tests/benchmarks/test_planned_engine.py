"""A benchmark steers the connector's planner."""

from benchmarks.planned_engine import SteeredPlanner
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import Engine, tokens


def test_a_restore_ends_at_the_last_boundary_before_the_limit() -> None:
    engine = Engine(DENSE, mode="always_load")
    engine.run(FakeRequest("a", tokens(200)))
    restorer = engine.side._restorer
    steered = restorer._planner = SteeredPlanner(restorer._planner)  # type: ignore[assignment]
    steered.limit_tokens = 150
    assert engine.admit(FakeRequest("b", tokens(200))) == 144
    assert steered.first is not None
    assert steered.first.plan is not None
    assert steered.first.plan.resume_tokens == 144
    steered.limit_tokens = None
    assert engine.admit(FakeRequest("c", tokens(200))) == 192
    assert steered.first.plan.resume_tokens == 144, "the first decision is kept"
    engine.side.close()
