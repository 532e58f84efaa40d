"""Whose chains are read: told to the directory, and asked of it before they leave DRAM.

An engine names the last chunk that any of its sessions reads of each owner's: it counts its
sessions itself, so that hundreds that come and go are one call, and one that leaves before it was
told costs none. An owner whose DRAM is full asks who reads what would leave next: it keeps that
longer, until its last reader has gone. Both are a period late at most, unless the directory is
slow: readers order evictions, nothing rests on them.

Only the directory's thread comes here. A turn of that thread makes two calls at most for it, and
every other turn none, so that renewals, lookups and claims go between however much is to be told.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import islice
from typing import Protocol

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory import Directory
from ownership.directory.identifiers import NO_EPOCH, Epoch
from ownership.member.directory_thread import DirectoryThread

_NAME = "sessions"
"""All of an engine's, as one reader; the epoch says whose."""
_CHUNKS_PER_CALL = 256
_MAX_READERS = 8_192
"""Twice what a store counts. The one that changed longest ago is forgotten first: its chain then
leaves its owner's DRAM as if nobody here read it."""
_DEADLINE_S = 5.0
_BELIEVED_PERIODS = 3.0
"""So many periods an answer counts: two may fail."""


class ReadStore(Protocol):
    """The worker's store: `hetero_connector.store.peers.sharing.Sharing`."""

    def take_readers(self) -> Mapping[str, tuple[ChunkKey, ...]]:
        """Readers that came, went on or left since the last call: where their chains end."""
        ...

    def soon_to_leave(self, count: int) -> list[ChunkKey]:
        """Chunks of which it matters now whether others read them, twice `count` or fewer."""
        ...

    def read_elsewhere(self, is_read: Mapping[ChunkKey, bool], for_s: float) -> None:
        """Whether others read up to these chunks."""
        ...


class ChainUserExchange:
    """The readers of one worker, and others' readers of what it owns."""

    def __init__(
        self,
        store: ReadStore,
        thread: DirectoryThread,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._thread = thread
        self._period_s = period_s
        self._clock = clock
        self._reads: dict[str, tuple[ChunkKey, ...]] = {}
        """What each reader reads now; that which changed longest ago first."""
        self._counts: Counter[ChunkKey] = Counter()
        """How many of them read up to each chunk; none is zero."""
        self._told: set[ChunkKey] = set()
        """What the directory may think is read here, under `_epoch`."""
        self._untold: dict[ChunkKey, None] = {}
        """Read and not told yet, or told and not read any more."""
        self._epoch = NO_EPOCH
        self._has_to_ask = False
        self._job: Future[None] | None = None
        self._period_at_s = clock()
        self._go_on_at_s = clock()

    def records_lost(self) -> None:
        """What was told is told again, in the next period."""
        self._epoch = NO_EPOCH

    def keep(self) -> float:
        """Tell and ask, in each period; seconds until there is something to do again."""
        now_s = self._clock()
        if self._job is not None:
            self._look_at_job(self._job)
            return 0.0
        if now_s >= self._period_at_s:
            self._period_at_s = now_s + self._period_s
            self._take()
            self._has_to_ask = True
        if (self._has_to_ask or self._untold) and now_s >= self._go_on_at_s:
            self._job = self._thread.call(self._ask_or_tell, _DEADLINE_S)
            return 0.0
        return self._period_at_s - now_s

    def _look_at_job(self, job: Future[None]) -> None:
        """Once it is done the next may follow, a turn later; after a failure in the next period."""
        if job.done():
            self._job = None
            if job.exception() is not None:
                self._go_on_at_s = self._period_at_s

    def _take(self) -> None:
        """What has changed. Also while the directory is gone: the store's list is bounded, too."""
        for reader, chunks in self._store.take_readers().items():
            self._leave(reader)
            if chunks:
                self._come(reader, chunks)
        while len(self._reads) > _MAX_READERS:
            self._leave(next(iter(self._reads)))

    def _come(self, reader: str, chunks: tuple[ChunkKey, ...]) -> None:
        self._reads[reader] = chunks
        for chunk in chunks:
            self._counts[chunk] += 1
            if self._counts[chunk] == 1:
                self._untold[chunk] = None

    def _leave(self, reader: str) -> None:
        for chunk in self._reads.pop(reader, ()):
            self._counts[chunk] -= 1
            if not self._counts[chunk]:
                del self._counts[chunk]
                if chunk in self._told:
                    self._untold[chunk] = None
                else:
                    self._untold.pop(chunk, None)

    def _ask_or_tell(self, directory: Directory, epoch: Epoch) -> None:
        """One job: two calls at most."""
        if epoch != self._epoch:  # readers end with their worker's epoch
            self._epoch = epoch
            self._told.clear()
            self._untold = dict.fromkeys(self._counts)
        asked = self._store.soon_to_leave(_CHUNKS_PER_CALL) if self._has_to_ask else []
        self._has_to_ask = False
        if asked:
            self._ask(directory, asked)
        else:
            self._tell(directory, epoch)

    def _ask(self, directory: Directory, chunks: list[ChunkKey]) -> None:
        is_read = {
            chunk: usage.num_users > self._is_told(chunk)
            for chunk, usage in zip(chunks, directory.usage(chunks), strict=True)
        }
        self._store.read_elsewhere(is_read, _BELIEVED_PERIODS * self._period_s)

    def _is_told(self, chunk: ChunkKey) -> bool:
        """Whether one of the readers that the directory counts is this engine."""
        return chunk in self._told and chunk not in self._untold

    def _tell(self, directory: Directory, epoch: Epoch) -> None:
        """Whatever was not answered is told again: the directory may have heard it or not."""
        chunks = list(islice(self._untold, _CHUNKS_PER_CALL))
        if came := [chunk for chunk in chunks if chunk in self._counts]:
            self._told.update(came)
            directory.add_chain_user(epoch, _NAME, came)
            self._settled(came)
        if left := [chunk for chunk in chunks if chunk not in self._counts]:
            unread = directory.remove_chain_user(epoch, _NAME, left)
            self._told.difference_update(left)
            self._settled(left)
            self._store.read_elsewhere(dict.fromkeys(unread, False), 0.0)

    def _settled(self, chunks: list[ChunkKey]) -> None:
        for chunk in chunks:
            del self._untold[chunk]
