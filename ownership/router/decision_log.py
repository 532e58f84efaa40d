"""Decisions as lines of JSON, written by a thread: a slow disk delays no request."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_MOST = 10_000
"""Lines that may wait. More are dropped, and counted."""

_log = logging.getLogger(__name__)


class DecisionLog:
    """Appends to one file. Several processes may append to it. Raises OSError if it cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = queue.Queue[bytes | None](_MOST)
        self._thread = threading.Thread(target=self._run, name="router-decisions", daemon=True)
        self._thread.start()
        self.dropped = 0

    def write(self, decision: Mapping[str, Any]) -> None:
        """Write a line soon. It never waits."""
        try:
            self._waiting.put_nowait(msgspec.json.encode(decision) + b"\n")
        except queue.Full:
            self._drop("the disk is too slow")

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._file.write(line)
            except OSError as error:
                self._drop(str(error))

    def _drop(self, why: str) -> None:
        if not self.dropped:
            _log.warning("decisions are not all in %s: %s", self._path, why)
        self.dropped += 1
