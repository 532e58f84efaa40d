"""The file that remembers resets: torn, damaged, missing, slow, full."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.generation import FIRST, Generation
from hetero_connector.store.ssd.generation_file import (
    GenerationFile,
    GenerationKeeper,
    read_generation,
)

BLOCK = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "generation"


def reopened(path: Path) -> Generation:
    file = GenerationFile.open(path, is_new=False)
    file.close()
    return file.found


def written(path: Path, *generations: Generation) -> None:
    file = GenerationFile.open(path, is_new=True)
    for generation in generations:
        file.write(generation)
    file.close()


def damage(path: Path, block: int) -> None:
    with path.open("r+b") as file:
        file.seek(block * BLOCK + 20)
        file.write(b"\xff\xff")


def test_what_was_written_last_is_found(path: Path) -> None:
    parted = FIRST.after_own_reset()
    for kept in (FIRST, parted, parted.with_fleet(7), Generation(2**53)):
        written(path, kept)
        assert reopened(path) == kept == read_generation(path)


def test_it_is_rewritten_in_place(path: Path) -> None:
    """A full disk has no block for a file that grows, nor for another in its place."""
    written(path)
    before = path.stat()
    written(path, *(Generation(i) for i in range(9)))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (
        before.st_ino,
        before.st_size,
        before.st_blocks,
    )


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_torn_write_leaves_the_one_before(path: Path, rounds: int) -> None:
    written(path, *(Generation(i + 1) for i in range(rounds)))
    latest = max(range(2), key=lambda block: path.read_bytes()[block * BLOCK + 5])
    damage(path, latest)
    assert reopened(path) == Generation(rounds - 1)


def test_a_write_that_fails_again_leaves_the_one_before(path: Path) -> None:
    file, write = GenerationFile.open(path, is_new=True), os.pwrite
    file.write(Generation(1))

    def tear(fd: int, block: bytes, offset: int) -> int:
        write(fd, b"torn" * 20, offset)
        raise OSError("Input/output error")

    with patch.object(os, "pwrite", tear):
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output"):
                file.write(Generation(2))
            assert read_generation(path) == Generation(1)
    file.write(Generation(3))
    file.close()
    assert reopened(path) == Generation(3)


def test_where_nothing_can_be_read_nothing_of_before_is_used(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(path, Generation(3), Generation(4))
    for block in range(2):
        damage(path, block)
    found = reopened(path)
    assert found.private
    assert "damaged" in caplog.text
    assert reopened(path) == found, "and the next process goes on with it"


def test_a_file_that_is_gone_is_not_taken_for_the_first(path: Path) -> None:
    assert reopened(path).private
    path.unlink()
    file = GenerationFile.open(path, is_new=True)
    file.close()
    assert file.found == FIRST


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        GenerationFile.open(path, is_new=False)
    assert victim.read_bytes() == b"precious"


def test_a_keeper_without_a_file_keeps_at_once() -> None:
    keeper = GenerationKeeper()
    parted = keeper.start_own_reset()
    assert keeper.latest is parted
    assert keeper.wait_kept(0.0)


def test_a_disk_that_hangs_keeps_nobody_and_ends_with_what_was_wanted_last(path: Path) -> None:
    goes_on, synced = threading.Event(), os.fdatasync

    def hang(fd: int) -> None:
        goes_on.wait(60)
        synced(fd)

    keeper = GenerationKeeper(GenerationFile.open(path, is_new=True))
    with patch.object(os, "fdatasync", hang):
        keeper.start_own_reset()
        assert not keeper.wait_kept(0.01)
        last = keeper.start_own_reset()
        assert not keeper.wait_kept(0.01)
        keeper.close()
        goes_on.set()
        keeper.wait_kept(20)
    assert keeper.latest is last
    assert read_generation(path) != FIRST


def test_a_late_write_does_not_undo_a_later_one(path: Path) -> None:
    goes_on, synced = threading.Event(), os.fdatasync

    def hang(fd: int) -> None:
        goes_on.wait(60)
        synced(fd)

    keeper = GenerationKeeper(GenerationFile.open(path, is_new=True))
    with patch.object(os, "fdatasync", hang):
        keeper.start_own_reset()
        last = keeper.start_own_reset()
        goes_on.set()
        assert keeper.wait_kept(20)
    keeper.close()
    assert reopened(path) == last


def test_a_disk_that_fails_is_told_of_and_asked_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = GenerationKeeper(GenerationFile.open(path, is_new=True))
    with patch.object(os, "pwrite", side_effect=OSError("Input/output error")):
        keeper.start_own_reset()
        assert not keeper.wait_kept(20)
        assert "Input/output error" in caplog.text
        assert keeper.kept is not keeper.latest
    last = keeper.start_own_reset()
    assert keeper.wait_kept(20)
    keeper.close()
    assert reopened(path) == last


def test_what_the_fleet_said_before_a_reset_is_no_answer_after_it(path: Path) -> None:
    """Else a reset of the fleet from before the engine's own would bring it together with peers
    that hold what it was reset for."""
    keeper = GenerationKeeper()
    asked = keeper.latest
    parted = keeper.start_own_reset()
    keeper.note_fleet(6, asked)
    assert keeper.latest is parted
    keeper.note_fleet(6, parted)
    assert keeper.latest.tag == parted.tag
    keeper.note_fleet(7, keeper.latest)
    assert keeper.latest == Generation(7)
