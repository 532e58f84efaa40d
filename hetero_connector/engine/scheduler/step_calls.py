"""Run functions on the scheduler's thread at the end of a step, for threads that wait for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from hetero_connector.errors import CommandError

logger = logging.getLogger("vllm.heterocache")

_Result = TypeVar("_Result")
NOT_DONE = "not carried out: "
"""The beginning of an error after which nothing was done."""


class StepCalls:
    """Calls that wait for the next step. The scheduler's thread runs them; any thread may call."""

    def __init__(self, request_step: Callable[[], None]) -> None:
        """`request_step` lets an idle engine step. It raises CommandError if it must not."""
        self._request_step = request_step
        self._calls = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._left = deque[Callable[[], object]]()
        """Run by the next step, whenever that is: the engine is not asked for it."""
        self._is_closed = False

    @property
    def has_any(self) -> bool:
        """True while a call waits: the engine must step."""
        return bool(self._calls)

    def call(self, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """Have the next step run `function`, and return its result.

        Raises CommandError if no step came in time; then the function is never run.
        """
        future: Future[_Result] = Future()
        entry = (future, function)
        self._calls.append(entry)
        if self._is_closed:
            self._refuse_all()
        try:
            self._request_step()
            return future.result(timeout_s)
        except TimeoutError:
            if not future.cancel():  # it runs now, and ends
                return future.result()
            raise CommandError(
                f"{NOT_DONE}the engine has not stepped for {timeout_s:.0f} s. It may be "
                "paused, or compute one long step: repeat the command later. An engine inside the "
                "caller's process steps only while it has requests"
            ) from None
        except CommandError:
            future.cancel()
            raise
        finally:
            if future.cancelled():
                with suppress(ValueError):  # a step, or the end of the engine, has taken it
                    self._calls.remove(entry)

    def leave(self, function: Callable[[], object]) -> None:
        """Have the next step run `function`. Nothing waits for it."""
        self._left.append(function)

    def run(self) -> None:
        """Run the calls that wait. Belongs to the scheduler's thread."""
        while self._left:
            try:
                self._left.popleft()()
            except Exception:
                logger.exception("a command could not be carried out to its end")
        while self._calls:
            future, function = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # its caller's to handle
                    future.set_exception(error)

    def close(self) -> None:
        """Refuse the calls that wait, and all later ones."""
        self._is_closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self._calls:
            future, _ = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(CommandError(f"{NOT_DONE}the engine is ending"))
