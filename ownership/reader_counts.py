"""Whose chains are read: told to the directory, and asked of it before they leave DRAM.

An engine names, for each of its sessions, the last chunk that it reads of each owner's. An owner
whose DRAM is full asks who reads what would leave next: it keeps that longer, until its last reader
has gone. Both are a period late at most, and wrong by no more than that when a call fails: readers
order evictions, nothing rests on them.

Only the directory's thread comes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from itertools import islice
from typing import Protocol

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory import Directory
from ownership.directory_thread import DirectoryThread
from ownership.identifiers import NOBODY, Epoch

_READERS_PER_CALL = 64
_CHUNKS_ASKED = 256
_DEADLINE_S = 5.0
_BELIEVED_PERIODS = 3.0
"""So many periods an answer counts: two may fail."""


class ReadStore(Protocol):
    """The worker's store: `hetero_connector.store.sharing.Sharing`."""

    def take_readers(self) -> Mapping[str, tuple[ChunkKey, ...]]:
        """Readers that came, went on or left since the last call: where their chains end."""
        ...

    def soon_to_leave(self, count: int) -> list[ChunkKey]:
        """Chunks of which it matters now whether others read them."""
        ...

    def read_elsewhere(self, is_read: Mapping[ChunkKey, bool], for_s: float) -> None:
        """Whether others read up to these chunks."""
        ...


class ReaderCounts:
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
        """What each reader reads now."""
        self._told: dict[str, tuple[ChunkKey, ...]] = {}
        """What the directory was told of each, under `_epoch`."""
        self._untold: dict[str, None] = {}
        self._epoch = NOBODY
        self._telling: Future[None] | None = None
        self._tell_at_s = clock()

    def keep(self) -> float:
        """Tell and ask, once in a period; seconds until the next time."""
        now_s = self._clock()
        is_telling = self._telling is not None and not self._telling.done()
        if now_s >= self._tell_at_s and not is_telling:
            self._tell_at_s = now_s + self._period_s
            self._telling = self._thread.call(self._tell, _DEADLINE_S)
        return max(0.0, self._tell_at_s - now_s) if not is_telling else self._period_s

    def _tell(self, directory: Directory, epoch: Epoch) -> None:
        self._take(epoch)
        for reader in list(islice(self._untold, _READERS_PER_CALL)):
            told, reads = self._told.get(reader, ()), self._reads.get(reader, ())
            unread: list[ChunkKey] = []
            if came := [chunk for chunk in reads if chunk not in told]:
                directory.add_reader(epoch, reader, came)
            if left := [chunk for chunk in told if chunk not in reads]:
                unread = directory.remove_reader(epoch, reader, left)
            self._settled(reader, reads)
            self._store.read_elsewhere(dict.fromkeys(unread, False), 0.0)
        self._ask(directory)

    def _take(self, epoch: Epoch) -> None:
        """What has changed; all of it under a new epoch, for readers end with their worker's."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._told.clear()
            self._untold.update(dict.fromkeys(self._reads))
        for reader, chunks in self._store.take_readers().items():
            self._reads[reader] = chunks
            self._untold[reader] = None

    def _settled(self, reader: str, reads: Iterable[ChunkKey]) -> None:
        del self._untold[reader]
        if reads:
            self._told[reader] = tuple(reads)
        else:
            self._told.pop(reader, None)
            self._reads.pop(reader, None)

    def _ask(self, directory: Directory) -> None:
        chunks = self._store.soon_to_leave(_CHUNKS_ASKED)
        if chunks:
            usage = directory.usage(chunks)
            is_read = {c: u.num_readers > 0 for c, u in zip(chunks, usage, strict=True)}
            self._store.read_elsewhere(is_read, _BELIEVED_PERIODS * self._period_s)
