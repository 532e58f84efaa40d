"""Layer-wise loading: a second thread loads layers ahead of the forward pass.

The forward calls `ensure` for one layer after another. If the second thread has not reached a
layer, the forward's own thread copies it. So no core is idle, and the forward never waits for more
than one layer's copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

Job = Callable[[], None]


class LayerPipeline:
    """Runs one job per layer, each exactly once, in order except for those ensured earlier."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="heterocache-load")
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._running: dict[str, threading.Event] = {}
        self._background: Future[None] | None = None
        self._error: Exception | None = None

    def start(self, jobs: Sequence[tuple[str, Job]], overlap: bool) -> None:
        """Queue the jobs, layer by layer; with `overlap` begin to run them at once."""
        assert not self._jobs, "the last step's layers were never drained"
        self._jobs.update(jobs)
        if overlap and self._jobs:
            with contextlib.suppress(RuntimeError):  # without a second thread, `ensure` copies
                self._background = self._executor.submit(self._run_ahead)

    @property
    def active(self) -> bool:
        """True while layers of this step have not been copied. Takes no lock."""
        return bool(self._jobs or self._running)

    def ensure(self, layer: str) -> None:
        """Run the layer's job, or wait until it has run."""
        if not self._run(layer):
            event = self._running.get(layer)
            if event is not None:
                event.wait()

    def drain(self) -> None:
        """Run all remaining jobs and wait for them; raise the first error of the step's jobs.

        The forward may leave layers out, but their pages must be complete, too.
        """
        self._run_ahead()
        background, self._background = self._background, None
        if background is not None:
            background.result()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Stop the thread and drop queued jobs."""
        self._jobs.clear()
        self._executor.shutdown()

    def _run(self, layer: str) -> bool:
        """Run the layer's job here, unless another thread has taken it."""
        with self._lock:
            job = self._jobs.get(layer)
            if job is None:
                return False
            done = self._running[layer] = threading.Event()
            del self._jobs[layer]  # last: `active` looks without the lock
        try:
            job()
        except Exception as error:  # `drain` raises it: all loads of the step have failed
            self._error = self._error or error
        finally:
            with self._lock:
                del self._running[layer]
            done.set()
        return True

    def _run_ahead(self) -> None:
        while (layer := self._next()) is not None:
            self._run(layer)

    def _next(self) -> str | None:
        with self._lock:
            return next(iter(self._jobs), None)
