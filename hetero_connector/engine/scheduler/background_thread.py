"""A thread for slow work that the scheduler's thread must not wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_MAX_JOBS = 1024


class BackgroundThread:
    """Runs jobs one after another. A job that never ends blocks the jobs after it, nothing else.

    A job whose future was cancelled before its turn is left out.
    The thread starts with the first job. It is a daemon, so a process can exit while a job reads.
    `submit` and `busy_s` are called from one thread.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._job_started_s: float | None = None
        """Start of the running job; None if there is none."""

    @property
    def busy_s(self) -> float:
        """Seconds since the start of the running job; 0 if none is running."""
        started_s = self._job_started_s
        return 0.0 if started_s is None else self._clock() - started_s

    def submit(self, job: Callable[[], _T]) -> Future[_T] | None:
        """Queue `job` and return its future; None if too many jobs are queued."""
        if self._jobs.qsize() >= _MAX_JOBS:
            return None
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # if it cannot start, the next job tries again
            self._thread = thread
        future: Future[_T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """End the thread after the queued jobs. Does not wait for them."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if future.set_running_or_notify_cancel():
                self._job_started_s = self._clock()
                try:
                    future.set_result(job())
                except Exception as error:  # raised by the future's result
                    future.set_exception(error)
                finally:
                    self._job_started_s = None
            del entry, future, job  # so that the thread keeps no object alive while it waits
