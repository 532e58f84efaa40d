"""Run a step of another thread between two bytecodes of this one.

A thread may lose the interpreter between any two bytecodes, but does so rarely, so a test that
waits for it by chance proves little. Here the moment is chosen: at each bytecode of some modules,
or at the n-th.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType, ModuleType
from typing import Any

_BLOCKED_AFTER_S = 0.02
"""A step that has not ended by then waits for a lock of this thread, as a rule."""

_LEAST_SHARE = 1 / 128
"""A thread pauses at this share of the lines that it runs, more often at those it runs rarely."""
_PAUSES_S = (0.0, 0.0, 1e-5, 1e-4, 1e-3)


@contextmanager
def at_each_step(step: Callable[[], object], *modules: ModuleType) -> Iterator[None]:
    """Call `step` before each bytecode of these modules that this thread runs inside.

    It stands for a thread that takes no lock: it runs on this one.
    """
    files = {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            step()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _Switch:
    """Runs a step once, on a thread of its own."""

    def __init__(self, step: Callable[[], object], at: int) -> None:
        self._step = step
        self._left = at
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self) -> None:
        if self._left == 0:
            self._thread.start()
            self._thread.join(_BLOCKED_AFTER_S)
        self._left -= 1

    def finish(self) -> bool:
        """Wait for the step and raise its error; return False if its moment never came."""
        if self._left >= 0:
            return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            self._step()
        except BaseException as error:
            self._error = error


def try_every_switch(
    prepare: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
    *modules: ModuleType,
    every: int = 1,
) -> int:
    """Run two calls of two threads, with one switch at each bytecode of the first in turn.

    `prepare` makes both calls anew for each try. The second runs on a thread of its own when the
    first is at a bytecode of `modules`, to its end unless it has to wait for a lock of the first.
    `every`: try each n-th bytecode only. An error of either call is raised. Returns the number of
    tries.
    """
    for tries in count(1):
        first, second = prepare()
        switch = _Switch(second, (tries - 1) * every)
        with at_each_step(switch, *modules):
            first()
        if not switch.finish():
            return tries
    raise AssertionError("unreachable")


@contextmanager
def random_switches(seed: int, package: str) -> Iterator[None]:
    """Let this thread, and all that are started inside, pause at random lines of a package.

    The pauses of each thread follow from the seed and the thread's name; what the other threads do
    meanwhile is up to the machine.
    """
    rngs = threading.local()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if package not in frame.f_code.co_filename:
            return None
        if not hasattr(rngs, "own"):
            rngs.own = random.Random(f"{seed} {threading.current_thread().name}")
            rngs.runs = Counter()
        if event == "line":
            line = frame.f_code, frame.f_lineno
            rngs.runs[line] += 1
            if rngs.own.random() < max(_LEAST_SHARE, 1 / rngs.runs[line]):
                time.sleep(rngs.own.choice(_PAUSES_S))
        return trace

    before, interval_s = sys.gettrace(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
        sys.setswitchinterval(interval_s)
