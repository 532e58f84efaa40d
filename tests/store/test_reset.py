"""Nothing from before a reset is served after it: by this process, or after a kill at any step."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.generation import Generation
from hetero_connector.errors import StoreError
from hetero_connector.store import artifact_store
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.ssd.generation_file import GenerationFile
from hetero_connector.store.ssd.journal import Journal
from tests.store.filling import Bench, Disk, begin, chain, ids_of, intact, put, stored, wait
from tests.waiting import until

CHUNKS = chain("a", 4)


def served(store: ArtifactStore, name: str) -> int:
    """Artifacts of a chain that a restore gets, by name or without asking `match`."""
    restore = wait(begin(store, ids_of(chain(name, 2))))
    assert intact(store, restore)
    count = len(restore.offsets)
    restore.release()
    return count


@contextmanager
def reopened(bench: Bench) -> Iterator[ArtifactStore]:
    store = bench.open()
    yield store
    store.close()


def test_a_reset_outlives_a_journal_that_cannot_forget(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    with patch.object(Journal, "clear", side_effect=StoreError("database or disk is full")):
        assert store.reset()
        assert not stored(store, CHUNKS)
        store.close()
    with reopened(bench) as store:
        assert not stored(store, CHUNKS)


def test_rows_of_another_generation_go_from_the_journal(bench: Bench) -> None:
    """They could not be found, and would keep their slots for ever."""
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    with patch.object(Journal, "clear", side_effect=StoreError("database or disk is full")):
        assert store.reset()
        store.close()
    with reopened(bench) as store:
        until(lambda: not store.catalog.tiers.journal_stale)
        put(store, chain("b", 1))
        assert store.flush(60)
    assert bench.root is not None
    journal = Journal.open_existing(next(bench.root.glob("*/journal.sqlite")))
    assert {row.chunk for row in journal.load()} == {chain("b", 1)[0]}
    journal.close()


def test_what_is_stored_after_a_reset_is_found_by_the_next_process(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    assert store.reset()
    put(store, chain("b", 3))
    assert store.flush(60)
    generation = store.generation
    store.close()
    with reopened(bench) as store:
        assert store.generation == generation
        assert stored(store, chain("b", 3)) == 3
        assert not stored(store, CHUNKS)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_disk_that_cannot_be_told_makes_the_reset_false(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(artifact_store, "_KEEP_S", 0.05)
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)

    answers = threading.Event()

    def bad(file: GenerationFile, generation: Generation) -> None:
        if how == "fails":
            raise OSError("Read-only file system")
        answers.wait(60)

    with patch.object(GenerationFile, "write", bad):
        assert not store.reset()
        answers.set()
        until(lambda: not store._generations._is_writing)
    assert not stored(store, CHUNKS), "this process forgets all the same"
    assert served(store, "a") == 0
    (line,) = [r for r in caplog.records if "will not outlive" in r.message]
    assert str(bench.root) in line.getMessage()
    monkeypatch.setattr(artifact_store, "_KEEP_S", 60.0)
    assert store.reset(), "and the next reset is told"
    store.close()


def test_a_full_disk_does_not_refuse_a_reset(bench: Bench) -> None:
    """Only what is allocated already is written."""
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    with (
        patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")),
        patch.object(os, "open", side_effect=OSError(28, "No space left on device")),
        patch.object(Journal, "clear", side_effect=StoreError("database or disk is full")),
    ):
        assert store.reset()
        store.close()
    with reopened(bench) as store:
        assert not stored(store, CHUNKS)


def test_the_fleets_reset_is_followed_and_kept(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    store._generations.note_fleet(5, store.generation)
    assert store.generation == Generation(5)
    assert store.catch_up() == Generation(5)
    assert not stored(store, CHUNKS)
    put(store, chain("b", 2))
    assert store.catch_up() == Generation(5)
    assert stored(store, chain("b", 2)) == 2, "it is followed once"
    assert store._generations.wait_kept(20)
    store.close()
    with reopened(bench) as store:
        assert store.generation == Generation(5)
        assert not stored(store, CHUNKS)


@dataclass
class KillPoints:
    """Copies a store's directory at each step that a kill may come between, and notes what must
    not be served from the copy."""

    root: Path
    forbidden: frozenset[str] = frozenset()
    copies: list[tuple[Path, frozenset[str]]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """One step at a time, whichever thread's: a copy is of one moment."""

    def here(self) -> None:
        forbidden = self.forbidden
        to = self.root.with_name(f"copy{len(self.copies)}")
        shutil.copytree(self.root, to)
        self.copies.append((to, forbidden))

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in (
                (GenerationFile, "write"),
                (Journal, "clear"),
                (Journal, "record"),
                (Journal, "forget"),
                (Journal, "close"),
            ):
                stack.enter_context(patch.object(owner, name, self._around(owner, name)))
            yield

    def _around(self, owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def around(*args: Any) -> Any:
            with self.lock:
                self.here()
                answer = original(*args)
                self.here()
            return answer

        return around


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(["put", "put", "flush", "reset", "fleet", "reopen"]), max_size=7))
def test_killed_at_any_step_nothing_from_before_a_reset_is_served(steps: list[str]) -> None:
    with TemporaryDirectory() as folder:
        points = KillPoints(Path(folder) / "ssd")
        bench, names = Bench(points.root), list[str]()
        with points.watching():
            store = bench.open(dram_chunks=32, ssd_chunks=8)
            for step in ["put", "flush", *steps]:
                if step == "put":
                    names.append(f"c{len(names)}")
                    put(store, chain(names[-1], 2))
                elif step == "flush":
                    store.flush(60)
                elif step == "reset":
                    assert store.reset()
                    points.forbidden = frozenset(names)
                elif step == "fleet":  # it takes two numbers after a reset of its own
                    for _ in range(2):
                        store._generations.note_fleet(store.generation.fleet + 1, store.generation)
                    assert not store.catch_up().private
                    assert store._generations.wait_kept(20)
                    points.forbidden = frozenset(names)
                else:
                    store.close()
                    store = bench.open(dram_chunks=32, ssd_chunks=8)
                assert not [name for name in points.forbidden if served(store, name)]
            store.close()
        for copy, forbidden in points.copies:
            found = Bench(copy).open(dram_chunks=32, ssd_chunks=8)
            assert not [name for name in forbidden if served(found, name)]
            found.check_integrity()
            found.close()


ROOT = Path(__file__).parents[2]
CHILD = """
import sys
from pathlib import Path
from tests.store.filling import Bench, chain, put
store = Bench(Path(sys.argv[1])).open(dram_chunks=32, ssd_chunks=24)
print("open", flush=True)
i = int(sys.argv[2])
while True:
    put(store, chain(f"c{i}", 2))
    print(f"put {i}\\n", end="", flush=True)  # in one piece: the parent kills at any moment
    if i % 3 == 0:
        store.flush(60)
    if i % 4 == 3:
        assert store.reset()
        print(f"reset {i}\\n", end="", flush=True)
    i += 1
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "rounds", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_around_resets(tmp_path: Path, rounds: int) -> None:
    rng = random.Random(11)
    root, forbidden, allowed, found = tmp_path / "ssd", -1, -1, 0
    for played in range(10 * rounds):
        if played >= rounds and found:
            break  # in a few rounds it may be that each kill comes right after a reset
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(allowed + 1)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        said = [child.stdout.readline() for _ in range(rng.randrange(1, 30))]
        time.sleep(rng.random() * 0.01)
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
        assert child.wait() == -signal.SIGKILL, f"it ended before, after {said[-3:]}"
        child.stdout.close()
        lines = [line.split() for line in said]
        assert all(len(line) == 2 for line in lines), said[-3:]
        for what, number in lines:
            allowed = max(allowed, int(number))
            if what == "reset":
                forbidden = int(number)
        allowed += 1  # it may have begun with the next
        store = Bench(root).open(dram_chunks=32, ssd_chunks=24)
        store.check_integrity()
        assert not [i for i in range(forbidden + 1) if served(store, f"c{i}")]
        found += sum(served(store, f"c{i}") for i in range(forbidden + 1, allowed + 1))
        store.close()
    assert found, "nothing was ever there after a kill: the test shows nothing"


def test_nothing_of_a_batch_under_way_is_listed_after_a_reset(bench: Bench, disk: Disk) -> None:
    store = bench.open()
    disk.files.hang_next()
    put(store, CHUNKS[:2])
    until(lambda: bool(store.catalog.writes.num_writing))
    assert store.reset()
    disk.files.resume()
    assert store.flush(60)
    store.close()
    with reopened(bench) as store:
        assert served(store, "a") == 0
