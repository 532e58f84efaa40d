"""Let an idle engine step when it has something to report.

vLLM takes a connector's metrics at the end of a step, and an idle engine takes none: its gauges
would show for hours what was stored before the last request ended. vLLM gives a connector no way to
ask for a step, so `observe` wraps the method in which the loop of its `EngineCoreProc` waits. At
its first call the connector gets a function that ends the wait; later calls are not wrapped.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hetero_connector.engine.scheduler.weight_updates import connectors_of
from hetero_connector.errors import CommandError, UnsupportedVersionError

_WAIT = "_process_input_queue"
_OBSERVED = "heterocache_observes_waits"
_INTERVAL_S = 1.0


class Loop(NamedTuple):
    """The loop of an engine. Any thread may call its functions."""

    wake: Callable[[], None]
    """Ends its wait for requests."""
    is_asleep: Callable[[], bool]
    """Returns True if the engine's memory is released: it must not step."""


class IdleSteps:
    """Wakes an engine that has been idle for an interval and has news.

    `is_due` and `on_step` belong to the scheduler's thread; a thread of its own looks for news.
    """

    def __init__(
        self,
        has_news: Callable[[], bool],
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_news` is called by the thread; `clock` is monotonic."""
        self._has_news = has_news
        self._interval_s = interval_s
        self._clock = clock
        self._stepped_s = clock()
        self._is_due = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: Loop | None = None

    @property
    def is_due(self) -> bool:
        """True if the engine was woken and has not stepped since."""
        return self._is_due

    def start(self, loop: Loop) -> None:
        """Begin to look for news, and wake this loop for it."""
        self._loop = loop
        if self._thread is None and not self._closed.is_set():
            run = functools.partial(self._run, loop)
            self._thread = threading.Thread(target=run, name="heterocache-idle", daemon=True)
            self._thread.start()

    def on_step(self) -> None:
        """Note that a step begins; at its end vLLM takes the news."""
        self._stepped_s = self._clock()
        self._is_due = False

    def look(self, loop: Loop) -> None:
        """Wake the engine if it is idle, not asleep, and has news.

        `has_news` is asked of a busy one, too: the step's end takes what it has published.
        """
        has_news = self._has_news()
        is_idle = self._clock() - self._stepped_s >= self._interval_s
        if is_idle and has_news and not loop.is_asleep():
            self._is_due = True
            loop.wake()

    def request_step(self) -> None:
        """Let the engine step now. Any thread may call this.

        Raises CommandError if its memory is released.
        """
        loop = self._loop
        if loop is None:
            return  # it steps by itself, inside the caller's process or before its first wait
        if loop.is_asleep():
            raise CommandError("the engine sleeps: wake it first (POST /wake_up)")
        self._is_due = True
        loop.wake()

    def close(self) -> None:
        """End the thread. Does not wait for it."""
        self._closed.set()

    def _run(self, loop: Loop) -> None:
        while not self._closed.wait(self._interval_s):
            self.look(loop)


@runtime_checkable
class WakeListener(Protocol):
    """A connector that may wake its engine."""

    def on_loop_started(self, loop: Loop) -> None:
        """Take the loop of the engine."""
        ...


def observe() -> None:
    """Wrap vLLM's method so that connectors in this process can wake their engine. Idempotent.

    Raises UnsupportedVersionError if vLLM lacks the method: metrics would not be true.
    """
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    if hasattr(EngineCoreProc, _OBSERVED):
        return
    original: Any = getattr(EngineCoreProc, _WAIT, None)
    if original is None or not hasattr(EngineCoreRequestType, "WAKEUP"):
        raise UnsupportedVersionError(
            f"this vLLM's EngineCoreProc has no {_WAIT}, or no message that ends it: install a "
            "vLLM version that the README names, or a heterocache release that supports this one"
        )
    setattr(EngineCoreProc, _OBSERVED, True)
    message = (EngineCoreRequestType.WAKEUP, None)

    @functools.wraps(original)
    def wait(self: Any) -> Any:
        loop = Loop(
            lambda: self.input_queue.put_nowait(message),
            lambda: bool(self.model_executor.is_sleeping),
        )
        vars(self)[_WAIT] = functools.partial(original, self)
        for connector in connectors_of(self):
            if isinstance(connector, WakeListener):
                connector.on_loop_started(loop)
        return original(self)

    setattr(EngineCoreProc, _WAIT, wait)
