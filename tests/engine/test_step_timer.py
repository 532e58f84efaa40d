"""Steps are timed as the device reaches their ends, each reported once."""

from __future__ import annotations

from collections.abc import Callable

from hetero_connector.engine.devices import HostDevice, HostStopwatch
from hetero_connector.engine.messages import StepTiming, WorkerReport
from hetero_connector.engine.step_timer import StepTimer


class LateStopwatch:
    """Knows its seconds only once the device is done."""

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


def test_a_step_without_loads_times_the_forward() -> None:
    timer = StepTimer(HostDevice())
    timer.begin(7, loads=False)
    timer.end()
    (timing,) = timer.take()
    assert timing.step == 7
    assert timing.forward_s > 0
    assert timing.load_s == 0
    assert timer.take() == []


def test_a_step_with_loads_times_the_copies_alone() -> None:
    timer = StepTimer(HostDevice())
    timer.begin(8, loads=True)
    for _ in range(3):
        timer.copying()()
    timer.end()
    (timing,) = timer.take()
    assert timing.forward_s == 0
    assert timing.load_s > 0


def test_what_is_not_to_be_timed_is_not() -> None:
    timer = StepTimer(HostDevice())
    timer.copying()()
    timer.end()
    assert timer.take() == []


def test_a_device_that_lags_is_not_waited_for() -> None:
    device = LateDevice()
    timer = StepTimer(device)
    timer.begin(1, loads=False)
    timer.end()
    timer.begin(2, loads=True)
    timer.copying()()
    timer.copying()()
    timer.end()
    assert timer.take() == []
    device.done = True
    assert timer.take() == [StepTiming(1, 1.0, 0.0), StepTiming(2, 0.0, 2.0)]


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
