"""Shares between engines which chains their sessions use, so that those leave DRAM last.

An engine reports the last chunk of each owner that any of its sessions uses. It counts its sessions
itself: hundreds that come and go are one call, and one that leaves before it was reported costs
none. An owner whose DRAM is full asks who uses the chunks that would leave next, and keeps those
longer, until their last user has left. Both are one period late at most, unless the directory is
slow: users order evictions, and correctness does not depend on them.

Only the directory's thread calls it. One turn of that thread makes at most two calls for it, and
every other turn makes none, so renewals, lookups and claims go between, however much there is to
report.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory import Directory
from ownership.directory.identifiers import NO_EPOCH, Epoch
from ownership.member.directory_thread import DirectoryThread
from ownership.member.shared_store import SharedStore

_NAME = "sessions"
"""All sessions of an engine count as one user. The epoch identifies the engine."""
_CHUNKS_PER_CALL = 256
_MAX_SESSIONS = 8_192
"""Twice as many as a store counts. The session that changed least recently is forgotten first: its
chain then leaves its owner's DRAM as if this engine did not use it."""
_DEADLINE_S = 5.0
_VALID_PERIODS = 3.0
"""An answer is used for so many periods: two questions in a row may fail."""


class ChainUserExchange:
    """The chain users of one worker, and other workers' users of the chains it owns."""

    def __init__(
        self,
        store: SharedStore,
        thread: DirectoryThread,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._thread = thread
        self._period_s = period_s
        self._clock = clock
        self._sessions: dict[str, tuple[ChunkKey, ...]] = {}
        """The ends of the chains each session uses; the least recently changed session first."""
        self._counts: Counter[ChunkKey] = Counter()
        """Sessions that use a chain up to each chunk; no count is zero."""
        self._reported: set[ChunkKey] = set()
        """Chunks for which the directory may count this engine, under `_epoch`."""
        self._to_report: dict[ChunkKey, None] = {}
        """Chunks that are used and not reported yet, or reported and not used any more."""
        self._epoch = NO_EPOCH
        self._has_to_ask = False
        self._job: Future[None] | None = None
        self._period_at_s = clock()
        self._resume_at_s = clock()

    def on_records_lost(self) -> None:
        """Report everything again in the next period."""
        self._epoch = NO_EPOCH

    def run_due(self) -> float:
        """Report and ask, once each period; return the seconds until the next call."""
        now_s = self._clock()
        if self._job is not None:
            self._check_job(self._job)
            return 0.0
        if now_s >= self._period_at_s:
            self._period_at_s = now_s + self._period_s
            self._take_changes()
            self._has_to_ask = True
        if (self._has_to_ask or self._to_report) and now_s >= self._resume_at_s:
            self._job = self._thread.call(self._ask_or_report, _DEADLINE_S)
            return 0.0
        return self._period_at_s - now_s

    def _check_job(self, job: Future[None]) -> None:
        """Allow the next job one turn after this one, or in the next period if it has failed."""
        if job.done():
            self._job = None
            if job.exception() is not None:
                self._resume_at_s = self._period_at_s

    def _take_changes(self) -> None:
        """Take the store's changes, also without a directory: the store's list is bounded, too."""
        for session, chunks in self._store.take_changed_users().items():
            self._remove(session)
            if chunks:
                self._add(session, chunks)
        while len(self._sessions) > _MAX_SESSIONS:
            self._remove(next(iter(self._sessions)))

    def _add(self, session: str, chunks: tuple[ChunkKey, ...]) -> None:
        self._sessions[session] = chunks
        for chunk in chunks:
            self._counts[chunk] += 1
            if self._counts[chunk] == 1:
                self._to_report[chunk] = None

    def _remove(self, session: str) -> None:
        for chunk in self._sessions.pop(session, ()):
            self._counts[chunk] -= 1
            if not self._counts[chunk]:
                del self._counts[chunk]
                if chunk in self._reported:
                    self._to_report[chunk] = None
                else:
                    self._to_report.pop(chunk, None)

    def _ask_or_report(self, directory: Directory, epoch: Epoch) -> None:
        """One job: at most two calls."""
        if epoch != self._epoch:  # users end with their worker's epoch
            self._epoch = epoch
            self._reported.clear()
            self._to_report = dict.fromkeys(self._counts)
        chunks = self._store.next_victims(_CHUNKS_PER_CALL) if self._has_to_ask else []
        self._has_to_ask = False
        if chunks:
            self._ask(directory, chunks)
        else:
            self._report(directory, epoch)

    def _ask(self, directory: Directory, chunks: list[ChunkKey]) -> None:
        is_used = {
            chunk: num_users > self._is_counted(chunk)
            for chunk, num_users in zip(chunks, directory.count_users(chunks), strict=True)
        }
        self._store.set_foreign_users(is_used, _VALID_PERIODS * self._period_s)

    def _is_counted(self, chunk: ChunkKey) -> bool:
        """Return True if this engine is one of the users that the directory counts."""
        return chunk in self._reported and chunk not in self._to_report

    def _report(self, directory: Directory, epoch: Epoch) -> None:
        """Report one batch. A call without an answer is repeated: the directory may have acted.

        Users that have left go first: a directory whose memory is full takes no others.
        """
        gone = (chunk for chunk in self._to_report if chunk not in self._counts)
        if left := list(islice(gone, _CHUNKS_PER_CALL)):
            unused = directory.remove_chain_user(epoch, _NAME, left)
            self._reported.difference_update(left)
            self._settle(left)
            self._store.set_foreign_users(dict.fromkeys(unused, False), 0.0)
        new = (chunk for chunk in self._to_report if chunk in self._counts)
        if used := list(islice(new, _CHUNKS_PER_CALL)):
            self._reported.update(used)
            directory.add_chain_user(epoch, _NAME, used)
            self._settle(used)

    def _settle(self, chunks: list[ChunkKey]) -> None:
        for chunk in chunks:
            del self._to_report[chunk]
