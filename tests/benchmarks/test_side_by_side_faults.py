"""Faults of stored state, on engines that are made up: each first shows that there is state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side import faults
from benchmarks.side_by_side.contestants import CONTESTANTS, Place
from benchmarks.side_by_side.environments import Environment
from benchmarks.side_by_side.faults import run_fault
from benchmarks.side_by_side.rows import Outcome, Row
from benchmarks.side_by_side.work import Arena, Case
from examples.serving import Reply

PIECE = 64 << 10
_STATE_BYTES = 2 * PIECE
ROW = Row("x", "1", "dense", power=1.0)


class MadeUp(Arena):
    """A contestant that keeps one answer, and is its own server, service and reference."""

    weights = "first"

    def __init__(
        self, folder: Path, *, keeps: str, verifies: bool = False, by_weights: bool = False
    ) -> None:
        """`keeps`: state in "files", the "service", the "engine", or "nothing"."""
        self.folder, self.checkpoint = folder, folder
        self.contestant = replace(
            CONTESTANTS["heterocache"],
            has_files=keeps == "files",
            services=lambda _: [self] if keeps == "service" else [],  # type: ignore[list-item]
        )
        self.case = Case("dense", 1100, 2048, blocks=500, rounds=1)
        (folder / "files").mkdir()
        self.place = Place(folder / "files", Environment(folder), [1])
        self.server = self  # type: ignore[assignment]
        self.services: list[Any] = []
        self.is_running = self.has_local = False
        self.log: list[str] = []
        self.in_memory: dict[str, bytes] = {}
        self._keeps, self._verifies, self._by_weights = keeps, verifies, by_weights

    def start_services(self) -> None:
        self.services += self.contestant.services(self.place)

    def stop_services(self) -> None:
        self.kill_services()

    def kill_services(self) -> None:
        if self.services and self._keeps == "service":
            self.in_memory.clear()
        self.services.clear()

    def start(self) -> float:
        self.log += [] if self.is_running else ["start"]
        self.is_running = True
        return 0.0

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.is_running = self.has_local = False
        if self._keeps == "engine":
            self.in_memory.clear()

    def reset_prefix_cache(self) -> None:
        self.has_local = False

    def answer(self, round_: int) -> Reply:
        return self._reply(self._right, 0)

    @property
    def _right(self) -> bytes:
        return self.weights.encode() * (_STATE_BYTES // len(self.weights))

    def complete(self, prompt: Sequence[int], *_: Any) -> Reply:
        assert self.is_running
        right = self._right
        if self.has_local:
            return self._reply(right, 1000)
        self.has_local = True
        found = self._found()
        if self._verifies and found not in (None, right):
            self.log.append("refused")
            found = None
        if found is None:
            self._store(right)
        return self._reply(found or right, 1000 if found else 0)

    @property
    def _name(self) -> str:
        return self.weights if self._by_weights else "model"

    def _found(self) -> bytes | None:
        path = self.place.folder / self._name
        if self._keeps == "files" and path.exists():
            with path.open("rb") as file:
                return os.pread(file.fileno(), _STATE_BYTES, 1 << 20).rstrip(b"\0")
        alive = self._keeps != "service" or self.services
        return self.in_memory.get(self._name) if alive else None

    def _store(self, state: bytes) -> None:
        if self._keeps == "files":
            for path in self.place.folder.iterdir():
                path.unlink()  # no room for two
            # Nothing but this prompt's state is written of a preallocated file.
            with (self.place.folder / self._name).open("wb") as file:
                file.truncate(256 << 20)
                os.pwrite(file.fileno(), state, 1 << 20)
        elif self._keeps != "nothing":
            self.in_memory[self._name] = state

    def _reply(self, state: bytes, cached: int) -> Reply:
        logprob = 0.0 if state == self._right else -5.0
        return Reply([1], [{"token_id:1": logprob}], 0.1, cached)

    def change_weights(self, _: Path) -> None:
        self.weights = "other" if self.weights == "first" else "first"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SETTLE_S", 0.0)


def outcome(name: str, arena: MadeUp) -> Outcome:
    reference: Any = arena
    return run_fault(name, arena, reference, ROW)


def other_weights(arena: MadeUp, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    class Plain:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Plain:
            return self

        def __exit__(self, *_: object) -> None: ...

        def complete(self, *_: Any) -> Reply:
            return arena.answer(0)

    monkeypatch.setattr(faults, "Server", Plain)
    monkeypatch.setattr(faults, "_change_weights", arena.change_weights)
    found = outcome("other-weights", arena)
    assert arena.weights == "first"
    return found


def test_corrupted_files_have_the_prompt_that_is_asked_for(tmp_path: Path) -> None:
    """Other weights took the room of the state from before."""
    arena = MadeUp(tmp_path, keeps="files", verifies=True, by_weights=True)
    (arena.place.folder / "other").write_bytes(bytes(2 << 20))
    assert outcome("file-corrupted", arena) is Outcome.COMPUTED
    assert arena.log == ["start", "start", "start", "refused"]


@pytest.mark.parametrize(("keeps", "expected"), [("files", Outcome.WRONG), ("engine", "-")])
def test_a_corrupted_file_that_is_believed(keeps: str, expected: Outcome, tmp_path: Path) -> None:
    assert outcome("file-corrupted", MadeUp(tmp_path, keeps=keeps)) == expected


def test_files_that_are_not_read_again_show_nothing(tmp_path: Path) -> None:
    arena = MadeUp(tmp_path, keeps="nothing")
    arena.contestant = replace(arena.contestant, has_files=True)
    assert outcome("file-corrupted", arena) is Outcome.NOTHING_KEPT


@pytest.mark.parametrize(
    ("keeps", "by_weights", "expected"),
    [
        ("files", True, Outcome.COMPUTED),
        ("files", False, Outcome.WRONG),
        ("service", False, Outcome.WRONG),
        ("engine", False, Outcome.NOTHING_KEPT),
    ],
)
def test_other_weights_are_tried_where_state_outlives_its_engine(
    keeps: str,
    by_weights: bool,
    expected: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = MadeUp(tmp_path, keeps=keeps, by_weights=by_weights)
    assert other_weights(arena, monkeypatch) is expected


def test_a_control_that_is_wrong_ends_the_fault(tmp_path: Path) -> None:
    arena = MadeUp(tmp_path, keeps="service")
    arena.start_services()
    arena.start()
    arena.in_memory["model"] = b"broken"
    assert outcome("process-killed", arena) is Outcome.WRONG
    assert arena.log == ["start"]


def test_a_process_is_killed_after_it_had_the_state(tmp_path: Path) -> None:
    arena = MadeUp(tmp_path, keeps="service")
    assert outcome("process-killed", arena) is Outcome.COMPUTED
    assert arena.log == ["start"], "the engine itself goes on"


def test_a_process_that_has_nothing_shows_nothing(tmp_path: Path) -> None:
    arena = MadeUp(tmp_path, keeps="service")
    arena._keeps = "nothing"
    assert outcome("process-killed", arena) is Outcome.NOTHING_KEPT


def test_every_piece_of_a_file_that_was_written_is_hit(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    written = {0: b"a" * (3 * PIECE), 50 * PIECE: b"b" * PIECE, 90 * PIECE: b"c" * (PIECE + 10)}
    # It is not read here before: pages of preallocated space that someone has read count as data.
    before = bytearray(91 * PIECE + 10)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 80 * PIECE)
        for at, data in written.items():
            os.pwrite(file.fileno(), data, at)
            before[at : at + len(data)] = data
    faults._corrupt(path)
    after = path.read_bytes()
    assert len(after) == len(before)
    for at, data in written.items():
        for piece in range(at, at + len(data) - PIECE + 1, PIECE):
            assert after[piece : piece + PIECE] != before[piece : piece + PIECE]
    assert after[: PIECE // 4] == before[: PIECE // 4], "a header at the start is left"
    assert after[10 * PIECE : 40 * PIECE] == before[10 * PIECE : 40 * PIECE], "holes are left"
