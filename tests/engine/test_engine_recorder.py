"""A recording has what the engine did meanwhile; without one nothing is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_connector.engine.scheduler import engine_recorder
from hetero_connector.engine.scheduler.engine_recorder import EngineRecorder
from hetero_connector.errors import CommandError
from hetero_connector.tools.recording import timeline_of
from tests.chrome_trace import read_trace
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import Engine, in_use, tokens
from tests.waiting import until


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(DENSE, ssd_dir=tmp_path, ssd_bytes=1 << 20, spill_delay_s=0.0)
    yield engine
    engine.side.close()


def recorder(engine: Engine) -> EngineRecorder:
    return engine.side._engine_recorder


def recorded(engine: Engine, work: Callable[[], None]) -> dict[str, Any]:
    """Record the engine while it does this."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(recorder(engine).record({})))
    thread.start()
    until(lambda: recorder(engine)._is_on)
    work()
    recorder(engine).close()
    thread.join(60)
    return answers[0]


def test_steps_loads_saves_and_requests_are_recorded(engine: Engine, tmp_path: Path) -> None:
    def work() -> None:
        engine.run(FakeRequest("a", tokens(200)))
        request = FakeRequest("b", tokens(200))
        engine.admit(request)
        engine.step(b=8)
        request.all_token_ids.append(7)
        engine.step(b=1)
        engine.finish(request)
        assert engine.store.flush(20)

    began = time.time()
    answer = recorded(engine, work)
    assert answer["is_complete"]
    assert [x["request_id"] for x in answer["requests"]] == ["a", "b"]
    timeline_of({"e": answer}).write(tmp_path / "t.json")
    slices = read_trace(tmp_path / "t.json")
    tracks = {x.track for x in slices}
    assert {"engine", "loads from DRAM", "saves to DRAM", "SSD writes", "requests"} <= tracks
    steps = [x.args for x in slices if x.track == "engine"]
    assert steps == [{"requests": 1, "tokens": n} for n in (200, 8, 1)]
    (load,) = (x for x in slices if x.track == "loads from DRAM")
    assert load.args == {"request": "b", "from_token": 0, "to_token": 192}
    for activity in answer["activities"]:
        assert began <= activity["begin_s"] <= activity["end_s"] <= time.time()


def test_an_engine_that_is_not_recorded_keeps_nothing(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    assert recorded(engine, lambda: None)["activities"] == []


def test_with_async_scheduling_a_step_begins_when_the_one_before_has_ended(engine: Engine) -> None:
    request = FakeRequest("a", tokens(200))
    engine.admit(request)
    before = engine.order(a=64)

    def work() -> None:
        first = engine.order(a=65)
        engine.report(before)
        second = engine.order(a=66)
        engine.report(first)
        engine.report(second)

    steps = [x for x in recorded(engine, work)["activities"] if x["track"] == "engine"]
    assert [x["details"]["tokens"] for x in steps] == [65, 66]
    assert steps[0]["end_s"] == steps[1]["begin_s"]
    engine.finish(request)
    engine.step()


def test_only_one_client_records_at_a_time(engine: Engine) -> None:
    def work() -> None:
        with pytest.raises(CommandError, match="already"):
            recorder(engine).record({"seconds": 1})

    recorded(engine, work)


@pytest.mark.parametrize("seconds", [0, -1, 61, "5", True, float("nan")])
def test_another_time_is_refused_and_recording_goes_on_to_work(
    engine: Engine, seconds: object
) -> None:
    with pytest.raises(CommandError):
        recorder(engine).record({"seconds": seconds})
    assert recorder(engine).record({"seconds": 0.01})["is_complete"]


def test_what_is_kept_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_recorder, "_MAX_ACTIVITIES", 2)
    answer = recorded(engine, lambda: engine.run(FakeRequest("a", tokens(200))))
    assert len(answer["activities"]) == 2
    assert not answer["is_complete"]


def test_a_recorder_that_fails_loses_no_load_and_no_report(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.run(FakeRequest("a", tokens(200)))
    for hook in ("on_step", "on_report"):

        def fail(*_: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(recorder(engine), hook, fail)
    request = FakeRequest("b", tokens(200))
    assert engine.admit(request) == 192
    meta = engine.order(b=8)
    assert len(meta.loads) == 1
    with pytest.raises(RuntimeError):  # which the connector counts
        engine.report(meta)
    assert engine.store.flush(20), "writes use artifacts, too"
    assert in_use(engine) == []
