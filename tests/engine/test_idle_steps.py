"""An idle engine steps once when it has something to report, and otherwise not."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from hetero_connector.engine.scheduler import idle_steps
from hetero_connector.engine.scheduler.idle_steps import IdleSteps, Loop
from hetero_connector.errors import UnsupportedVersionError
from hetero_connector.metrics import Recorder


class Engine:
    """Counts how often it is woken; `look` is a look of the thread after some seconds."""

    def __init__(self) -> None:
        self.now_s, self.wakes, self.is_asleep = 0.0, 0, False
        self.recorder = Recorder()
        self.idle = IdleSteps(self.recorder.has_news, 1.0, lambda: self.now_s)

    def look(self, after_s: float) -> int:
        self.now_s += after_s
        self.idle.look(Loop(self._wake, lambda: self.is_asleep))
        return self.wakes

    def step(self) -> None:
        self.idle.on_step()
        self.recorder.drain()

    def _wake(self) -> None:
        assert self.idle.is_due, "the engine would wait again at once"
        self.wakes += 1


def test_an_idle_engine_is_woken_once_for_its_news() -> None:
    engine = Engine()
    assert engine.look(after_s=5.0) == 0, "there is nothing to report"
    engine.recorder.set("heterocache_bytes", 7, tier="dram", state_type="dense_kv")
    assert engine.look(after_s=1.0) == 1
    engine.step()
    assert not engine.idle.is_due
    assert engine.look(after_s=5.0) == 1, "everything is reported"


def test_an_engine_that_steps_is_not_woken() -> None:
    engine = Engine()
    for _ in range(20):
        engine.recorder.add("heterocache_hits")
        assert engine.look(after_s=0.3) == 0
        engine.step()
    engine.recorder.add("heterocache_hits")
    assert engine.look(after_s=1.0) == 1


def test_a_busy_engine_is_asked_for_its_news_too() -> None:
    """The step's end takes what `has_news` has published."""
    asked: list[bool] = []
    idle = IdleSteps(lambda: bool(asked.append(True)), 1.0, lambda: 0.5)
    idle.on_step()
    idle.look(Loop(lambda: pytest.fail("it was woken"), lambda: False))
    assert asked == [True]


def test_a_sleeping_engine_is_not_woken() -> None:
    engine = Engine()
    engine.is_asleep = True
    engine.recorder.add("heterocache_hits")
    assert engine.look(after_s=5.0) == 0
    assert not engine.idle.is_due, "a message that wakes it would make it step"
    engine.is_asleep = False
    assert engine.look(after_s=0.0) == 1


def test_a_closed_engine_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = IdleSteps(lambda: True)
    idle.close()
    idle.start(Loop(lambda: pytest.fail("it was woken"), lambda: False))
    assert idle._thread is None


class Connector:
    """Takes the function that wakes its engine."""

    loop: Loop

    def on_loop_started(self, loop: Loop) -> None:
        self.loop = loop


def core_with(connector: object) -> Any:
    """Return an engine core whose loop can wait for requests."""
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.input_queue = queue.Queue()
    core.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)
    core.model_executor = SimpleNamespace(is_sleeping=False)
    return core


def test_the_loop_gives_its_connectors_the_message_that_ends_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = []
    monkeypatch.setattr(EngineCoreProc, "_process_input_queue", waits.append)
    monkeypatch.delattr(EngineCoreProc, "heterocache_observes_waits", raising=False)
    idle_steps.observe()
    idle_steps.observe()
    inner = Connector()
    core = core_with(SimpleNamespace(_connectors=[object(), inner]))
    core._process_input_queue()
    core._process_input_queue()
    assert waits == [core, core], "the wait itself is unchanged"
    assert not inner.loop.is_asleep()
    inner.loop.wake()
    assert core.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    core._handle_client_request(EngineCoreRequestType.WAKEUP, None)  # vLLM ignores it otherwise
    core.model_executor.is_sleeping = True
    assert inner.loop.is_asleep()
    monkeypatch.delattr(EngineCoreProc, "heterocache_observes_waits")


def test_a_vllm_without_the_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineCoreProc, "heterocache_observes_waits", raising=False)
    monkeypatch.delattr(EngineCoreProc, "_process_input_queue")
    with pytest.raises(UnsupportedVersionError, match="_process_input_queue"):
        idle_steps.observe()
