"""Keep what an engine has learned in its SSD directory, for the next one.

The file is a profile, as `heterocache calibrate` writes it, with the pace of sessions and the reuse
of prompts. One engine at a time uses such a directory, so no other writes it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.store.ssd.private_files import read_private, replace_private

logger = logging.getLogger("vllm.heterocache")

MIN_SAMPLES = 8
"""Fewer samples are chance, which would outlive the engine: they are not kept."""
_INTERVAL_S = 30.0
_CLOSE_S = 2.0
"""A disk that hangs delays the end of an engine no longer than that."""
MAX_LEARNED_BYTES = 1 << 20


def read_learned(path: Path, subject: ProfileSubject) -> CostProfile | None:
    """Return what an earlier engine learned here; None if none did.

    Raises ValueError that says why it cannot be used: it is damaged, of another version, or of
    another model or machine.
    """
    try:
        profile = CostProfile.from_json(read_private(path, MAX_LEARNED_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    if differences := profile.subject.differences(subject):
        raise ValueError("; ".join(differences))
    return profile


def recall(path: Path, subject: ProfileSubject) -> CostProfile | None:
    """Return what an earlier engine learned here, if it can be used, and say so in the log."""
    try:
        profile = read_learned(path, subject)
    except ValueError as error:
        logger.warning("what was learned before is not used, from %s: %s", path, error)
        return None
    if profile is not None:
        logger.info("HeteroConnector: the planner starts from costs %s", profile.origin)
    return profile


class LearnedKeeper:
    """Writes what is learned to a file: twice a minute if it has changed, and at the end."""

    def __init__(
        self,
        path: Path,
        learned: Callable[[], CostProfile | None],
        interval_s: float = _INTERVAL_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`learned` is called by the keeper's thread; None: nothing worth keeping yet.

        What it returns now is what the engine starts from: that need not be kept.
        """
        self._path = path
        self._learned = learned
        self._interval_s = interval_s
        self._now = now
        self._kept = learned()
        self._has_warned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heterocache-learned", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the latest and end the thread; a write that hangs is not waited for. Idempotent."""
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._keep()
        self._keep()

    def _keep(self) -> None:
        learned = self._learned()
        if learned is None or learned == self._kept:
            return
        try:
            replace_private(self._path, replace(learned, learned_until=self._now()).as_bytes())
            self._kept = learned
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("what is learned cannot be kept in %s: %s", self._path, error)
