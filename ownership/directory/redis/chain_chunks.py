"""The records of a chain that was looked up, and its workers, decoded when they are asked for.

A chain of a million tokens has thousands of records, a fleet hundreds of workers, and most callers
need a few. A record that cannot be decoded counts as absent, and is reported.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from hetero_connector.errors import RecordError
from ownership.directory.contract import ChunkRecords, WorkerState
from ownership.directory.identifiers import Epoch
from ownership.directory.redis.encoding import chunk_records, run_entries, worker_state

_NOTHING: ChunkRecords = {}


class ChainChunks(Sequence[ChunkRecords]):
    """The records of each chunk of a chain. Not thread-safe."""

    def __init__(
        self,
        length: int,
        spans: Sequence[int],
        runs: Sequence[bytes],
        fetched: Mapping[int, bytes | None],
        on_bad_record: Callable[[RecordError], None],
    ) -> None:
        """`spans`, `runs`: as `lookup.lua` returns them. `fetched`: runs by their first index.
        `on_bad_record`: called with the error when a record cannot be decoded.
        """
        self._length = length
        self._spans = spans
        self._starts = spans[::4]
        self._runs = runs
        self._fetched = fetched
        self._on_bad_record = on_bad_record
        self._entries: dict[int, list[bytes]] = {}
        """The entries of each span's run."""
        self._decoded: dict[int, ChunkRecords] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> ChunkRecords: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkRecords]: ...
    def __getitem__(self, index: int | slice) -> ChunkRecords | list[ChunkRecords]:
        """Return the records of one chunk, or of several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        at = index + self._length if index < 0 else index
        if not 0 <= at < self._length:
            raise IndexError(f"chunk {index} of a chain of {self._length}")
        records = self._decoded.get(at)
        if records is None:
            records = self._decoded[at] = self._decode(at)
        return records

    def _decode(self, index: int) -> ChunkRecords:
        nearest = bisect_right(self._starts, index) - 1
        if nearest < 0:
            return _NOTHING
        first, position, count, _ = self._spans[4 * nearest : 4 * nearest + 4]
        if index >= first + count:
            return _NOTHING
        try:
            return chunk_records(self._entries_of(nearest)[position + index - first])
        except RecordError as error:
            self._on_bad_record(error)
        except IndexError as error:
            self._on_bad_record(RecordError(str(error)))
        return _NOTHING

    def _entries_of(self, span: int) -> list[bytes]:
        entries = self._entries.get(span)
        if entries is None:
            first, position, _, run = self._spans[4 * span : 4 * span + 4]
            packed = self._fetched.get(first - position) if run < 0 else self._runs[run]
            entries = self._entries[span] = run_entries(packed or b"")
        return entries


class WorkerStates(Mapping[Epoch, WorkerState]):
    """The epochs of a fleet. One that cannot be decoded counts as ended. Not thread-safe."""

    def __init__(self, fields: Sequence[bytes], now_s: float) -> None:
        """`fields`: as `lookup.lua` returns them. `now_s`: directory time."""
        self._packed = dict(zip(fields[::2], fields[1::2], strict=True))
        self._now_s = now_s
        self._decoded: dict[Epoch, WorkerState] = {}

    def __getitem__(self, epoch: Epoch) -> WorkerState:
        state = self._decoded.get(epoch)
        if state is None:
            try:
                state = worker_state(self._packed[b"%d" % epoch], self._now_s)
            except RecordError:
                raise KeyError(epoch) from None
            self._decoded[epoch] = state
        return state

    def __iter__(self) -> Iterator[Epoch]:
        numbers = (Epoch(int(field)) for field in self._packed if field.isdigit())
        return (epoch for epoch in numbers if epoch in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
