"""Steps are timed as the device reaches their ends, each reported once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hetero_connector.engine.messages import StepTiming, WorkerReport
from hetero_connector.engine.worker.host_device import HostDevice, HostStopwatch
from hetero_connector.engine.worker.step_timer import StepTimer
from hetero_connector.metrics import HISTOGRAMS, Recorder


class LateStopwatch:
    """A stopwatch that has its seconds only when the device has finished."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._stretches = 0

    def start(self) -> Callable[[], None]:
        return self._stop

    def _stop(self) -> None:
        self._stretches += 1

    def seconds(self) -> float | None:
        return float(self._stretches) if self._device.done or not self._stretches else None


class LateDevice(HostDevice):
    done = False

    def time_forward(self) -> LateStopwatch:  # type: ignore[override]
        return LateStopwatch(self)

    def time_copies(self) -> LateStopwatch:  # type: ignore[override]
        return LateStopwatch(self)


class CountingClock:
    """A clock that advances a second at every call."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_step_without_loads_times_the_forward() -> None:
    timer = StepTimer(HostDevice(), Recorder())
    timer.begin(7)
    timer.end()
    (timing,) = timer.take()
    assert timing.step == 7
    assert timing.forward_s > 0
    assert timing.load_s == 0
    assert timer.take() == []


def test_a_forward_is_not_timed_while_it_waits_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, clock = StepTimer(HostDevice(), Recorder()), CountingClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    timer.begin(8)
    go_on = timer.start_wait()
    for _ in range(3):
        timer.start_copies()()
    clock.now_s += 100.0
    go_on()
    timer.start_wait()()
    timer.end()
    (timing,) = timer.take()
    assert timing.forward_s == 3.0  # a second before, between and after the two waits
    assert timing.load_s == 3.0


def seconds_of(recorder: Recorder) -> list[float]:
    payload = recorder.drain()
    assert payload is not None
    samples: list[float] = payload[HISTOGRAMS]["heterocache_load_seconds{}"]
    return samples


def test_of_a_step_without_an_order_only_the_loads_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost model learns from chosen steps; the metric is of all."""
    recorder = Recorder()
    timer = StepTimer(HostDevice(), recorder)
    monkeypatch.setattr(time, "perf_counter", CountingClock())
    for copies in (2, 0, 3):
        for _ in range(copies):
            timer.start_copies()()
        timer.start_wait()()
        timer.end()
    timer.begin(1)
    timer.end()
    assert timer.take() == [StepTiming(1, 1.0, 0.0)]
    assert seconds_of(recorder) == [2.0, 3.0]


def test_a_slow_device_is_not_waited_for() -> None:
    device, recorder = LateDevice(), Recorder()
    timer = StepTimer(device, recorder)
    timer.begin(1)
    timer.end()
    timer.begin(2)
    timer.start_copies()()
    timer.start_copies()()
    timer.end()
    assert timer.take() == []
    assert recorder.drain() is None
    device.done = True
    assert timer.take() == [StepTiming(1, 1.0, 0.0), StepTiming(2, 1.0, 2.0)]
    assert seconds_of(recorder) == [2.0], "of the step that has loads"


def test_stretches_of_a_stopwatch_add_up() -> None:
    watch = HostStopwatch()
    assert watch.seconds() == 0
    watch.start()()
    once = watch.seconds()
    watch.start()()
    assert once is not None
    assert once < (watch.seconds() or 0)


def test_ranks_reports_keep_one_rank_s_timings() -> None:
    timing = StepTiming(3, 0.1, 0.0)
    merged = WorkerReport(timings=[timing]).aggregate(WorkerReport(timings=[timing]))
    assert merged.timings == [timing]
    assert WorkerReport().aggregate(WorkerReport(timings=[timing])).timings == [timing]
    assert WorkerReport().aggregate(WorkerReport(timed_step=3)).timed_step == 3
    assert WorkerReport(timed_step=3).aggregate(WorkerReport()).timed_step == 3
