"""Calls that may hang in the kernel, made beside the I/O thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result]) -> Future[Result]:
    """Make the call on a daemon: one that never ends does not keep the process from exiting."""
    ended = Future[Result]()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(result)

    threading.Thread(target=run, name="heterocache-sync", daemon=True).start()
    return ended
