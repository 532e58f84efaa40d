"""Timing a worker's steps for the cost model: forward passes, and loads."""

from __future__ import annotations

from collections.abc import Callable

from hetero_connector.engine.messages import StepTiming
from hetero_connector.engine.worker.devices import Device, Stopwatch


class StepTimer:
    """One step at a time. A device may end a step's work later: `take` waits for nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._step: int | None = None
        self._forward = self._copies = device.time_forward()
        self._end_forward: Callable[[], None] = _nothing
        self._ended: list[tuple[int, Stopwatch, Stopwatch]] = []

    def begin(self, step: int) -> None:
        """A step that is to be timed begins."""
        self._step = step
        self._forward, self._copies = self._device.time_forward(), self._device.time_copies()
        self._end_forward = self._forward.start()

    def waiting(self) -> Callable[[], None]:
        """The forward waits for loads from now on; call the result when it goes on."""
        if self._step is None:
            return _nothing
        self._end_forward()
        return self._go_on

    def copying(self) -> Callable[[], None]:
        """A stretch of copies begins; call the result at its end."""
        return _nothing if self._step is None else self._copies.start()

    def end(self) -> None:
        """The step's forward and its copies have been issued."""
        if self._step is None:
            return
        self._end_forward()
        self._ended.append((self._step, self._forward, self._copies))
        self._step = None

    def take(self) -> list[StepTiming]:
        """Timings of steps that the device has finished, oldest first; each once."""
        taken = []
        while self._ended:
            step, forward, copies = self._ended[0]
            forward_s, load_s = forward.seconds(), copies.seconds()
            if forward_s is None or load_s is None:
                break
            taken.append(StepTiming(step, forward_s, load_s))
            del self._ended[0]
        return taken

    def _go_on(self) -> None:
        self._end_forward = self._forward.start()


def _nothing() -> None:
    pass
