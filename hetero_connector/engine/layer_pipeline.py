"""Layer-wise loading: a second thread runs ahead of the forward pass.

The forward asks for layer after layer (`ensure`). A layer that the background thread
has not reached is copied by the asker itself, so waiting never wastes a core and the
forward never waits for more than one layer's copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

Job = Callable[[], None]


class LayerPipeline:
    """Runs one job per layer, each exactly once, in order but for those asked for early."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="heterocache-load")
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._running: dict[str, threading.Event] = {}
        self._background: Future[None] | None = None
        self._unasked: set[str] = set()

    def start(self, jobs: Sequence[tuple[str, Job]], overlap: bool) -> None:
        """Queue the jobs, layer by layer; with `overlap` start running them at once."""
        assert not self._jobs, "the last step's layers were never drained"
        self._jobs.update(jobs)
        self._unasked = set(self._jobs)
        if overlap and self._jobs:
            self._background = self._executor.submit(self._run_ahead)

    @property
    def active(self) -> bool:
        """Whether the forward has layers of this step still to ask for."""
        return bool(self._unasked)

    def ensure(self, layer: str) -> None:
        """Return when the layer's job has run; raises what it raised."""
        self._unasked.discard(layer)
        if not self._run(layer):
            event = self._running.get(layer)
            if event is not None:
                event.wait()

    def drain(self) -> None:
        """Run what is left and wait for the background thread; raises what a job raised.

        RuntimeError if the forward never asked for a layer: it may have read that layer's
        pages before they were loaded, and a wrong answer is worse than none.
        """
        self._run_ahead()
        if self._background is not None:
            self._background.result()
            self._background = None
        if self._unasked:
            unasked, self._unasked = self._unasked, set()
            raise RuntimeError(
                f"the forward pass did not wait for layers {sorted(unasked)}; "
                "set layerwise to 'off' for this model and report it"
            )

    def close(self) -> None:
        """Stop the thread. What is queued is dropped."""
        self._jobs.clear()
        self._unasked.clear()
        self._executor.shutdown()

    def _run(self, layer: str) -> bool:
        """Run the layer's job here, if nobody has taken it."""
        with self._lock:
            job = self._jobs.pop(layer, None)
            if job is None:
                return False
            done = self._running[layer] = threading.Event()
        try:
            job()
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
