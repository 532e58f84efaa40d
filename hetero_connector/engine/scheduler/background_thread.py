"""A thread that finds out what the scheduler's thread must not wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_MOST_JOBS = 1024


class BackgroundThread:
    """Runs jobs one after another. A job that never ends keeps only later jobs from running.

    The thread starts with the first job and is a daemon: a process exits whatever it reads.
    `submit` and `late_s` are called from one thread.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._began_s: float | None = None
        """When the job that is running began."""

    @property
    def late_s(self) -> float:
        """For how long the running job has been running; 0 if none is."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def submit(self, job: Callable[[], _T]) -> Future[_T] | None:
        """Run `job` when its turn comes; None if too many are waiting."""
        if self._jobs.qsize() >= _MOST_JOBS:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[_T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """End the thread when it has nothing more to run; it is not waited for."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            self._began_s = self._clock()
            try:
                future.set_result(job())
            except Exception as error:  # whoever asks for the result gets it
                future.set_exception(error)
            finally:
                self._began_s = None
            del entry, future, job  # nothing is kept alive while it waits
