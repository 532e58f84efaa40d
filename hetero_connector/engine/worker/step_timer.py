"""Measure a worker's forward passes for the cost model, and its loads also for the metrics."""

from __future__ import annotations

from collections.abc import Callable

from hetero_connector.engine.messages import StepTiming
from hetero_connector.engine.worker.devices import Device, Stopwatch
from hetero_connector.metrics import Recorder


class StepTimer:
    """Times one step after another. Never waits for a device that finishes a step later."""

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._step: int | None = None
        self._forward, self._copies = device.time_forward(), device.time_copies()
        self._has_copies = False
        self._end_forward: Callable[[], None] = _nothing
        self._ended: list[tuple[int | None, Stopwatch, Stopwatch]] = []

    def begin(self, step: int) -> None:
        """Begin to time a step's forward; its loads are timed in any case."""
        self._step = step
        self._end_forward = self._forward.start()

    def start_wait(self) -> Callable[[], None]:
        """Stop the forward's time while it waits for loads; call the result when it continues."""
        if self._step is None:
            return _nothing
        self._end_forward()
        return self._continue_forward

    def start_copies(self) -> Callable[[], None]:
        """Begin a stretch of copies; call the result at its end."""
        self._has_copies = True
        return self._copies.start()

    def end(self) -> None:
        """End the step: its forward and its copies have been issued."""
        if self._step is None and not self._has_copies:
            return
        if self._step is not None:
            self._end_forward()
        self._ended.append((self._step, self._forward, self._copies))
        self._forward, self._copies = self._device.time_forward(), self._device.time_copies()
        self._step, self._has_copies = None, False

    def take(self) -> list[StepTiming]:
        """Take the timings of steps that the device has finished, oldest first.

        Only steps that were begun have a timing; the loads of all steps are recorded.
        """
        taken = []
        while self._ended:
            step, forward, copies = self._ended[0]
            forward_s, load_s = forward.seconds(), copies.seconds()
            if forward_s is None or load_s is None:
                break
            if load_s:
                self._recorder.observe("heterocache_load_seconds", load_s)
            if step is not None:
                taken.append(StepTiming(step, forward_s, load_s))
            del self._ended[0]
        return taken

    def _continue_forward(self) -> None:
        self._end_forward = self._forward.start()


def _nothing() -> None:
    pass
