"""A request's prediction is recorded once, with the observed time."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_connector.metrics import HISTOGRAMS, Payload
from hetero_connector.planner.decision import RestoreDecision
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import Engine, tokens


class Watched:
    """An engine with 192 of 200 tokens stored, a clock for the test, and recorded decisions."""

    def __init__(self) -> None:
        self.engine = Engine(DENSE, mode="cost")
        self.engine.run(FakeRequest("a", tokens(200)))
        self.engine.recorder.drain()
        self.now_s = 100.0
        self.made: list[RestoreDecision] = []
        predictions = self.engine.side.predictions
        predictions._clock = lambda: self.now_s
        decided = predictions.on_decision

        def keep(request_id: str, decision: RestoreDecision, *rest: Any) -> None:
            self.made.append(decision)
            decided(request_id, decision, *rest)

        predictions.on_decision = keep  # type: ignore[method-assign,assignment]

    def admitted(self) -> FakeRequest:
        request = FakeRequest("b", tokens(200))
        assert self.engine.admit(request) == 192
        return request

    def timings(self, payload: Payload | None = None) -> dict[str, list[float]]:
        payload = payload or self.engine.recorder.drain() or {}
        return {
            name.removeprefix("heterocache_"): values
            for name, values in payload.get(HISTOGRAMS, {}).items()
            if "ttft" in name or "benefit" in name
        }


@pytest.fixture
def watched() -> Any:
    watched = Watched()
    yield watched
    watched.engine.side.close()


def test_the_observed_benefit_is_the_predicted_one_minus_the_delay(
    watched: Watched,
) -> None:
    request = watched.admitted()
    watched.engine.step(b=8)
    watched.now_s += 3.0
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    (decision,) = watched.made
    recorded = watched.engine.recorder.drain() or {}
    assert recorded["counters"]["heterocache_lost_restores{}"] == 1, "three seconds are too long"
    timings = watched.timings(recorded)
    assert timings["ttft_seconds{kind=observed}"] == [3.0]
    assert timings["ttft_seconds{kind=predicted}"] == [decision.predicted.ttft_s]
    assert timings["reuse_benefit_seconds{kind=predicted}"] == [decision.reuse_benefit_s]
    ratio = recorded["histograms"]["heterocache_prediction_ratio{choice=load}"]
    assert ratio == [3.0 / decision.predicted.ttft_s]
    late_s = 3.0 - decision.predicted.ttft_s
    assert timings["reuse_benefit_seconds{kind=observed}"] == [0.0]
    assert timings["reuse_benefit_seconds{kind=lost}"] == [
        pytest.approx(late_s - decision.reuse_benefit_s)
    ]
    watched.engine.step(b=1)
    assert watched.timings() == {}, "once a request"


def test_a_restore_that_is_faster_than_computing_is_not_lost(watched: Watched) -> None:
    request = watched.admitted()
    watched.engine.step(b=8)
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    recorded = watched.engine.recorder.drain() or {}
    assert "heterocache_lost_restores{}" not in recorded["counters"]
    (decision,), timings = watched.made, watched.timings(recorded)
    assert timings["reuse_benefit_seconds{kind=lost}"] == [0.0]
    assert timings["reuse_benefit_seconds{kind=observed}"] == [
        pytest.approx(decision.reuse_benefit_s + decision.predicted.ttft_s)
    ]


def recorded_after_a_wait(watched: Watched, awaits: str | None) -> Any:
    """Admit a request three seconds after its answer; return what is recorded at its first token.

    `awaits`: the request whose load it has waited for, if any.
    """
    watched.engine.side._restorer._clock = lambda: watched.now_s
    request = FakeRequest("b", tokens(200))
    assert watched.engine.ask(request) == 192
    watched.engine.side._trackers["b"].awaits = awaits
    watched.now_s += 3.0
    assert watched.engine.admit(request) == 192
    watched.engine.step(b=8)
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    return watched.engine.recorder.drain()


def test_waiting_for_pages_is_no_loss(watched: Watched) -> None:
    recorded = recorded_after_a_wait(watched, None)
    assert "heterocache_lost_restores{}" not in recorded["counters"]
    (decision,), timings = watched.made, watched.timings(recorded)
    assert timings["ttft_seconds{kind=observed}"] == [3.0]
    assert timings["reuse_benefit_seconds{kind=observed}"] == [
        pytest.approx(decision.reuse_benefit_s + decision.predicted.ttft_s)
    ]


def test_waiting_for_the_load_of_another_request_is_a_loss(watched: Watched) -> None:
    recorded = recorded_after_a_wait(watched, "a")
    (decision,) = watched.made
    assert watched.timings(recorded)["reuse_benefit_seconds{kind=lost}"] == [
        pytest.approx(3.0 - decision.predicted.ttft_s - decision.reuse_benefit_s)
    ]


@pytest.mark.parametrize("planned", [False, True])
def test_a_request_that_restores_nothing_saves_and_loses_nothing(
    watched: Watched, planned: bool
) -> None:
    request = FakeRequest("b", tokens(200))
    assert watched.engine.answered(request) == 192
    if planned:  # vLLM does not admit what was found
        watched.engine.requests["b"] = request
        watched.engine.side.on_allocated(request, 0)  # type: ignore[arg-type]
    else:
        assert watched.engine.admit(request, local=192) == 0
    watched.engine.step(b=200 if planned else 8)
    watched.now_s += 3.0
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    recorded = watched.engine.recorder.drain() or {}
    assert "heterocache_lost_restores{}" not in recorded["counters"]
    assert watched.timings(recorded).keys() == {
        "ttft_seconds{kind=predicted}",
        "ttft_seconds{kind=observed}",
    }


def test_a_reset_does_not_delay_the_record_of_the_first_token(watched: Watched) -> None:
    request = watched.admitted()
    watched.engine.step(b=8)
    watched.engine.side.reset()
    watched.now_s += 3.0
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    watched.now_s += 60.0
    request.all_token_ids.append(7)
    watched.engine.finish(request)
    assert watched.timings()["ttft_seconds{kind=observed}"] == [3.0]
    watched.engine.step()


def test_a_request_preempted_while_decoding_waits_for_a_token_again(watched: Watched) -> None:
    request = watched.admitted()
    watched.engine.step(b=8)
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    assert watched.timings()
    request.num_computed_tokens = 0
    assert watched.engine.admit(request) == 192
    watched.now_s += 3.0
    watched.engine.step(b=9)
    assert watched.timings() == {}, "it has no new token yet"
    request.all_token_ids.append(7)
    watched.engine.step(b=1)
    assert watched.timings()["ttft_seconds{kind=observed}"] == [3.0]


def test_a_request_aborted_before_its_first_token_is_not_recorded(watched: Watched) -> None:
    request = watched.admitted()
    watched.engine.step(b=8)  # its prompt counts as computed now
    watched.engine.finish(request)
    assert watched.timings() == {}
    watched.engine.step()
