"""Decisions as lines of JSON, written by a thread: a slow disk delays no request.

The format is `ownership.decisions.records`.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.containers import BoundedDict
from ownership.decisions.records import DecisionRecord, FleetRecord
from ownership.router.identity import PromptChain
from ownership.scheduling.fleet import FleetView

_MOST = 10_000
"""Lines that may wait. More are lost, and counted."""
_MOST_CHUNKS = 1 << 19
"""Chunks whose numbers are kept, about 60 MB."""
_MOST_FLEETS = 128
"""Fleets that are remembered, as the figures change while requests run. A reader keeps more."""

_log = logging.getLogger(__name__)


class _Line(NamedTuple):
    """A decision to be written."""

    record: DecisionRecord
    chain: PromptChain | None
    fleet: FleetRecord | None
    """The fleet that the decision names; None if it names none."""


class DecisionLog:
    """Appends to one file. Several processes may append to it. Raises OSError if it cannot.

    The file may be renamed or removed: what follows is in a new one at its path.
    """

    def __init__(self, path: Path, on_lost: Callable[[], object] = lambda: None) -> None:
        """`on_lost`: called for each line that is not written, by any thread."""
        self._path, self._on_lost = path, on_lost
        self._file = path.open("ab", buffering=0)
        self._process = secrets.token_hex(4)
        self._numbers = ChunkNumbers(_MOST_CHUNKS)
        self._fleet: FleetView | None = None
        self._fleet_name = ""
        self._fleets = BoundedDict[str, FleetRecord](_MOST_FLEETS)
        """The newest fleets, by name."""
        self._in_file = BoundedDict[str, None](_MOST_FLEETS)
        """The names of those that the open file has. The thread's own."""
        self._is_torn = self._is_losing = False
        self._waiting = queue.Queue[_Line | None](_MOST)
        self._thread = threading.Thread(target=self._run, name="router-decisions", daemon=True)
        self._thread.start()

    def note_fleet(self, fleet: FleetView, record: DecisionRecord) -> None:
        """Add the loads of the fleet that a decision was made on, and remember its figures."""
        if fleet is not self._fleet:
            told = FleetRecord.of(fleet)
            self._fleet, self._fleet_name = fleet, told.fleet
            self._fleets[told.fleet] = told
        record.note_fleet(fleet, self._fleet_name)
        record.process = self._process

    def write(self, record: DecisionRecord, chain: PromptChain | None) -> None:
        """Write a line soon, after that of its fleet. It never waits.

        `chain`: the prompt's chunks, if they are known.
        """
        try:
            self._waiting.put_nowait(_Line(record, chain, self._fleets.get(record.fleet)))
        except queue.Full:
            self._drop("the disk is too slow")

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            record, chain, fleet = item
            if chain is not None:
                record.chunk_tokens = chain.chunk_tokens
                record.chunks = self._numbers.runs(chain.keys)
            try:
                self._follow_path()
                if fleet is not None and fleet.fleet not in self._in_file:
                    self._append(fleet)
                    self._in_file[fleet.fleet] = None
                self._append(record)
            except OSError as error:
                self._drop(str(error))

    def _append(self, record: DecisionRecord | FleetRecord) -> None:
        """Write a line. One that the disk took a part of spoils no other."""
        line = msgspec.json.encode(record) + b"\n"
        line = b"\n" + line if self._is_torn else line
        written = self._file.write(line)
        if written < len(line):
            self._is_torn = True
            raise OSError("the disk is full")
        self._is_torn = False
        if self._is_losing and self._waiting.empty():  # so a slow disk is no flood of warnings
            self._is_losing = False
            _log.warning("decisions are in %s again", self._path)

    def _follow_path(self) -> None:
        try:
            is_same = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            old, self._file = self._file, self._path.open("ab", buffering=0)
            self._is_torn = False
            self._in_file.clear()
            old.close()

    def _drop(self, why: str) -> None:
        if not self._is_losing:
            self._is_losing = True
            _log.warning("decisions are not all in %s: %s", self._path, why)
        self._on_lost()


class ChunkNumbers:
    """Numbers chunks in the order in which they are first met, so that a prompt is few runs.

    A chunk that was not met for long gets another number; then no prefix is shared with it.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: chunks that are remembered, at least the later half of them."""
        self._half = capacity // 2
        self._recent, self._older = dict[ChunkKey, int](), dict[ChunkKey, int]()
        self._next = 0

    def __len__(self) -> int:
        """Return the number of chunks that are remembered."""
        return len(self._recent.keys() | self._older.keys())

    def runs(self, keys: Iterable[ChunkKey]) -> list[tuple[int, int]]:
        """Return the numbers of a prompt's chunks as `(first, count)` runs."""
        runs: list[tuple[int, int]] = []
        first, end = -1, -1
        for key in keys:
            number = self._number(key)
            if number != end:
                if first >= 0:
                    runs.append((first, end - first))
                first = number
            end = number + 1
        if first >= 0:
            runs.append((first, end - first))
        return runs

    def _number(self, key: ChunkKey) -> int:
        number = self._recent.get(key)
        if number is None:
            number = self._older.get(key)
            if number is None:
                number, self._next = self._next, self._next + 1
            if len(self._recent) >= self._half:
                self._older, self._recent = self._recent, {}
            self._recent[key] = number
        return number
