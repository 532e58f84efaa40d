"""The report of a request says what was decided, what came of it, and why nothing was restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from vllm.v1.request import RequestStatus

from hetero_connector.engine.scheduler.request_report import (
    NothingRestored,
    RequestReport,
    report_answer,
)
from hetero_connector.planner.plan import WindowReplay
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, scheduled
from tests.engine.stepped import Engine, in_use, tokens
from tests.engine.test_replays import forget_checkpoints

Engines = Any
WANTED = {"heterocache": {"report": True}}


@pytest.fixture
def engine_of() -> Iterator[Engines]:
    """Engines that have stored 192 of the 200 tokens of seed 0."""
    engines: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        engines.append(engine := Engine(*arguments, **options))
        engine.run(FakeRequest("a", tokens(200)))
        return engine

    yield make
    for engine in engines:
        assert in_use(engine) == []
        engine.side.close()


def first_token(engine: Engine, request: FakeRequest) -> RequestReport:
    """Compute what is left, sample a token, and return the report that status shows."""
    engine.step(**{request.request_id: request.num_tokens - request.num_computed_tokens})
    request.all_token_ids.append(7)
    engine.step(**{request.request_id: 1})
    report = engine.side.predictions.recent()[-1]
    assert report.request_id == request.request_id
    assert report.local_tokens is not None
    restored = sum(report.restored_tokens.values())
    assert report.local_tokens + restored + (report.computed_tokens or 0) == report.prompt_tokens
    assert (report.reason is None) == bool(restored)
    return report


def served(engine: Engine, request: FakeRequest, local: int = 0) -> RequestReport:
    engine.admit(request, local)
    return first_token(engine, request)


def finished(engine: Engine, request: FakeRequest, status: RequestStatus) -> RequestReport:
    """End a request, and return the report that its client gets."""
    request.status, request.kv_transfer_params = status, WANTED
    report = engine.side.on_finished(request, engine.tables.ids.get("b", ([], []))).report
    assert report is not None
    return report


def test_a_restore_is_reported_by_its_source(engine_of: Engines) -> None:
    report = served(engine_of(DENSE), FakeRequest("b", tokens(200)), local=32)
    assert report.restored_tokens == {"dram": 160}
    assert (report.local_tokens, report.computed_tokens, report.boundary) == (32, 8, 192)
    assert (report.choice, report.stored_tokens, report.prompt_tokens) == ("load", 192, 200)
    assert report.predicted_s is not None
    moments = (report.admitted_s, report.loaded_s, report.first_token_s)
    assert all(x is not None for x in moments)
    assert sorted(moments) == list(moments)


def test_replayed_tokens_count_as_computed(engine_of: Engines) -> None:
    engine = engine_of(HYBRID, window_replay=WindowReplay.of(HYBRID))
    engine.side.planner.replay_when_missing = True
    forget_checkpoints(engine)
    report = served(engine, FakeRequest("b", tokens(200)))
    assert (report.choice, report.boundary, report.replayed_tokens) == ("replay", 192, 32)
    assert (report.restored_tokens, report.computed_tokens) == ({"dram": 160}, 40)


def test_fewer_tokens_than_were_offered(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    engine.requests["b"] = request
    assert engine.ask(request) == 192
    engine.grow_table(request)
    engine.side.on_allocated(request, 128)
    request.num_computed_tokens = 128
    report = first_token(engine, request)
    assert (report.restored_tokens, report.boundary) == ({"dram": 128}, 128)


def test_nothing_stored(engine_of: Engines) -> None:
    report = served(engine_of(DENSE), FakeRequest("b", tokens(200, seed=5)), local=16)
    assert report.reason == NothingRestored.NOTHING_STORED
    assert (report.predicted_s, report.computing_s, report.choice) == (None, None, "compute")
    assert (report.local_tokens, report.computed_tokens, report.boundary) == (16, 184, 16)
    assert report.observed_s == report.first_token_s


def test_everything_is_in_the_engine(engine_of: Engines) -> None:
    report = served(engine_of(DENSE), FakeRequest("b", tokens(200)), local=192)
    assert (report.reason, report.stored_tokens) == (NothingRestored.IN_ENGINE, 192)


def test_no_more_is_stored_than_was_asked_for(engine_of: Engines) -> None:
    engine = engine_of(DENSE)
    engine.run(FakeRequest("c", tokens(250, seed=3), num_prompt_tokens=150))
    report = served(engine, FakeRequest("b", tokens(150, seed=3)))
    assert (report.prompt_tokens, report.boundary, report.stored_tokens) == (150, 144, 150)


def test_no_boundary(engine_of: Engines) -> None:
    engine = engine_of(HYBRID)
    forget_checkpoints(engine)
    report = served(engine, FakeRequest("b", tokens(200)))
    assert (report.reason, report.stored_tokens) == (NothingRestored.NO_BOUNDARY, 192)


def test_computing_is_faster(engine_of: Engines) -> None:
    engine = engine_of(DENSE, mode="cost")
    for _ in range(100):
        engine.costs.compute.observe(64, 0, 1e-9)
    report = served(engine, FakeRequest("b", tokens(200)))
    assert report.reason == NothingRestored.COMPUTING_IS_FASTER
    assert report.predicted_s == report.computing_s


def test_the_planner_never_loads(engine_of: Engines) -> None:
    report = served(engine_of(DENSE, mode="never_load"), FakeRequest("b", tokens(200)))
    assert report.reason == NothingRestored.NEVER_LOAD


def test_the_request_must_not_read(engine_of: Engines) -> None:
    request = FakeRequest("b", tokens(200), skip_reading_prefix_cache=True)
    assert served(engine_of(DENSE), request).reason == NothingRestored.NOT_ASKED_FOR


def test_vllm_admits_none_of_the_tokens(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    engine.requests["b"] = request
    assert engine.ask(request) == 192
    engine.grow_table(request)
    engine.side.on_allocated(request, 0)
    report = first_token(engine, request)
    assert (report.reason, report.choice) == (NothingRestored.NOT_ADMITTED, "load")


def test_a_load_that_is_lost(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    engine.admit(request)
    with patch.object(engine.side._restorer, "build_load", side_effect=RuntimeError("a defect")):
        engine.step()
    request.num_computed_tokens = 0
    report = first_token(engine, request)
    assert (report.reason, report.computed_tokens) == (NothingRestored.LOAD_LOST, 200)


def test_a_closed_connector(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    engine.side.close()
    assert served(engine, request).reason == NothingRestored.STOPPED


def test_the_first_of_two_waits_is_the_report_of_a_preempted_request(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    first = served(engine, request)
    request.num_computed_tokens = 0
    meta = engine.side.order_step(preempting("b"))
    engine.report(meta)
    assert engine.admit(request) == 192
    assert first_token(engine, request) == first
    ended = finished(engine, request, RequestStatus.FINISHED_STOPPED)
    assert (ended.first_token_s, ended.preemptions) == (first.first_token_s, 1)
    assert (ended.finish, ended.output_tokens) == ("stop", 2)
    engine.step()


def test_a_request_that_ends_without_a_token(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    assert engine.ask(request) == 192
    ended = finished(engine, request, RequestStatus.FINISHED_ABORTED)
    assert (ended.admitted_s, ended.first_token_s, ended.observed_s) == (None, None, None)
    assert (ended.restored_tokens, ended.reason, ended.output_tokens) == ({}, None, 0)
    assert ended.finish == "abort"


@pytest.mark.parametrize(
    ("params", "is_answered"),
    [
        (WANTED, True),
        ({"heterocache": {"report": {"boundary": 192}}}, True),  # a proxy has forwarded it
        ({"heterocache": {"report": False}}, False),
        ({"heterocache": {"report": "yes"}}, False),
        ({"heterocache": {}}, False),
        ({"heterocache": [True]}, False),
        ({"report": True}, False),
        (None, False),
    ],
)
def test_only_a_client_that_asks_gets_a_report(
    engine_of: Engines, params: Any, is_answered: bool
) -> None:
    engine = engine_of(DENSE)
    request = FakeRequest("b", tokens(200), kv_transfer_params=params)
    shown = served(engine, request)
    ended = engine.side.on_finished(request, engine.tables.ids["b"]).report
    assert (ended is not None) == is_answered
    if ended is not None:
        assert ended.restored_tokens == shown.restored_tokens == {"dram": 192}
        assert engine.side.predictions.recent() == [ended], "status shows how it ended"
        plain = report_answer(ended)["heterocache"]["report"]
        assert msgspec.json.decode(msgspec.json.encode(plain)) == plain
    engine.step()


def test_the_report_of_a_request_that_cannot_be_identified(engine_of: Engines) -> None:
    engine = engine_of(DENSE)
    request = FakeRequest("b", tokens(200), resumable=True, kv_transfer_params=WANTED)
    assert engine.side.match(request, 0) == (0, False)
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 200
    report = engine.side.on_finished(request, ([], [])).report
    assert (report.reason, report.finish) == (NothingRestored.UNIDENTIFIED, "length")
    assert (report.local_tokens, report.computed_tokens, report.prompt_tokens) == (None, None, 200)


def test_the_time_in_the_queue_is_not_of_the_observed_time(engine_of: Engines) -> None:
    report = served(engine_of(DENSE), FakeRequest("b", tokens(200), arrival_time=time.time() - 100))
    assert 100 <= report.queued_s < 110
    assert report.first_token_s is not None
    assert report.first_token_s < 10


def test_a_report_that_fails_costs_the_report_alone(engine_of: Engines) -> None:
    engine = engine_of(DENSE)
    request = FakeRequest("b", tokens(256, seed=3), kv_transfer_params=WANTED)
    engine.admit(request)
    engine.step(b=256)
    with patch.object(engine.side.predictions, "finish", side_effect=RuntimeError("a defect")):
        assert engine.side.on_finished(request, engine.tables.ids["b"]).report is None
    engine.step()
    assert engine.counters()["heterocache_hook_errors{hook=report}"] == 1
    assert engine.ask(FakeRequest("c", tokens(257, seed=3))) == 256
    engine.finish(FakeRequest("c", []))  # releases what was staged


def test_a_metric_that_fails_leaves_nothing_pinned(engine_of: Engines) -> None:
    engine, request = engine_of(DENSE), FakeRequest("b", tokens(200))
    engine.admit(request)
    counter = engine.side._admissions._counter
    with patch.object(counter, "count", side_effect=RuntimeError("a defect")):
        engine.step(b=8)
    assert in_use(engine) == []
    assert engine.side._admissions.loading == {}
    assert engine.counters()["heterocache_hook_errors{hook=restore metrics}"] == 1


def preempting(*request_ids: str) -> Any:
    output = scheduled()
    output.preempted_req_ids = set(request_ids)
    return output
