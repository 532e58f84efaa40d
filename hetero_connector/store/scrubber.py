"""Scrubbing: every stored artifact is read and checked against its checksum, at a bounded rate.

A checksum is checked whenever an artifact is restored from SSD. What is not restored for months may
be damaged meanwhile, and is found when it is needed: a miss. A scrub finds it before. It runs on a
thread of its own, with a buffer of its own, so a disk that hangs delays nothing but the scrub.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ChunkKey, Tier
from hetero_connector.errors import TransferError
from hetero_connector.store.arena import Arena
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.scrubbing import ScrubbedCopy
from hetero_connector.store.ssd.slab_reader import SlabReader
from hetero_connector.transfer.checksum import checksum

logger = logging.getLogger("vllm.heterocache")

_AGAIN_S = 1.0
"""An error of the disk is believed when the read fails once more so much later."""
_MAX_UNREADABLE = 3
"""After so many artifacts in a row the disk itself is at fault, and nothing more is forgotten."""
_BURST_S = 1.0
"""A delay by the disk is made up for, up to so much."""
_CLOSE_S = 2.0


@dataclass(frozen=True)
class ScrubProgress:
    """The progress of a scrub."""

    state: Literal["running", "complete", "stopped"]
    started: float
    """Unix time, seconds."""
    chunks: int
    """Chunks that were stored at its start."""
    chunks_checked: int = 0
    chunks_skipped: int = 0
    """Chunks that have left since, or have no checksum yet."""
    bytes_checked: int = 0
    damaged: int = 0
    """Artifacts that were forgotten."""
    reason: str | None = None
    """The reason for a stop that was not ordered."""


class _Checked(NamedTuple):
    """A copy that was checked."""

    size_bytes: int
    is_lost: bool


class Scrubber:
    """Runs one scrub at a time. Any thread may call it."""

    def __init__(self, catalog: Catalog, arena: Arena, folder: Path | None) -> None:
        """`folder`: that of the SSD tier; None without one."""
        self._catalog = catalog
        self._arena = arena
        self._folder = folder
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._unreadable = 0
        """Artifacts in a row that could not be read from SSD."""
        self.progress: ScrubProgress | None = None
        """The progress of the last scrub; None before the first."""

    def start(self, bytes_per_s: float) -> bool:
        """Begin a scrub; False if one runs, or the store is closed."""
        with self._lock:
            if self._is_closed or (self._thread is not None and self._thread.is_alive()):
                return False
            self._stopped, self._unreadable = threading.Event(), 0
            self.progress = ScrubProgress("running", time.time(), 0)
            thread = threading.Thread(
                target=self._run,
                args=(bytes_per_s, self._stopped),
                name="heterocache-scrub",
                daemon=True,
            )
            thread.start()
            self._thread = thread
            return True

    def stop(self) -> None:
        """End the scrub that runs, if there is one. A read that hangs is not waited for."""
        with self._lock:
            self._stopped.set()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def close(self) -> None:
        """Stop for good."""
        with self._lock:
            self._is_closed = True
        self.stop()

    def run(self, bytes_per_s: float, stopped: threading.Event) -> ScrubProgress:
        """Scrub on this thread, until `stopped`."""
        tiers, clock = self._catalog.tiers, self._catalog.clock
        keys = list(tiers.index.nodes)[1:]  # one call that no other thread can interrupt
        progress = ScrubProgress("running", time.time(), len(keys))
        pools = [tiers.dram] if tiers.ssd is None else [tiers.dram, tiers.ssd]
        largest = max(n for pool in pools for n in pool.geometry.stride_bytes.values())
        due_s = clock()
        with SlabReader(self._folder or Path(), largest) as slab:
            for key in keys:
                self.progress = progress
                checked = self._check_chunk(key, slab, stopped)
                num_bytes = sum(x.size_bytes for x in checked)
                progress = replace(
                    progress,
                    chunks_checked=progress.chunks_checked + bool(checked),
                    chunks_skipped=progress.chunks_skipped + (not checked),
                    bytes_checked=progress.bytes_checked + num_bytes,
                    damaged=progress.damaged + sum(x.is_lost for x in checked),
                )
                if self._unreadable >= _MAX_UNREADABLE:
                    return replace(progress, state="stopped", reason="the disk cannot be read")
                due_s = max(due_s, clock() - _BURST_S) + num_bytes / bytes_per_s
                if stopped.wait(max(0.0, due_s - clock())):
                    return replace(progress, state="stopped")
        return replace(progress, state="complete")

    def _run(self, bytes_per_s: float, stopped: threading.Event) -> None:
        try:
            progress = self.run(bytes_per_s, stopped)
        except Exception as error:
            logger.exception("a scrub ended by a defect")
            assert self.progress is not None
            progress = replace(self.progress, state="stopped", reason=repr(error))
        self.progress = progress
        logger.info(
            "scrub %s: %d of %d chunks, %d bytes checked, %d chunks without a checksum or gone, "
            "%d damaged artifacts forgotten%s",
            *(progress.state, progress.chunks_checked, progress.chunks, progress.bytes_checked),
            *(progress.chunks_skipped, progress.damaged),
            f": {progress.reason}" if progress.reason else "",
        )

    def _check_chunk(
        self, key: ChunkKey, slab: SlabReader, stopped: threading.Event
    ) -> list[_Checked]:
        """Check what is stored of a chunk, and forget what is damaged."""
        checked, copies = list[_Checked](), self._catalog.begin_scrub(key)
        try:
            while copies and not stopped.is_set():
                failure = self._check(copies[-1], slab, stopped)
                if copies[-1].slot.tier is Tier.SSD:
                    is_unreadable = failure is Failure.IO_ERROR
                    self._unreadable = self._unreadable + 1 if is_unreadable else 0
                copy = copies.pop()
                is_lost = self._catalog.finish_scrub(
                    copy, failure if self._unreadable < _MAX_UNREADABLE else None
                )
                checked.append(_Checked(copy.artifact.size_bytes, is_lost))
        finally:
            for copy in copies:
                self._catalog.finish_scrub(copy, None)
        return checked

    def _check(
        self, copy: ScrubbedCopy, slab: SlabReader, stopped: threading.Event
    ) -> Failure | None:
        """Return the problem with a copy; None if it is intact."""
        size_bytes = copy.artifact.size_bytes
        if copy.slot.tier is Tier.DRAM:
            return _compare(copy, self._arena.view[copy.offset : copy.offset + size_bytes])
        try:
            return _compare(copy, slab.read(copy.offset, size_bytes))
        except TransferError:
            if stopped.wait(_AGAIN_S):
                return None
        try:
            return _compare(copy, slab.read(copy.offset, size_bytes))
        except TransferError:
            return Failure.IO_ERROR


def _compare(copy: ScrubbedCopy, data: npt.NDArray[np.uint8]) -> Failure | None:
    is_intact = checksum(data, copy.artifact.id.seed) == copy.artifact.checksum
    return None if is_intact else Failure.CHECKSUM
