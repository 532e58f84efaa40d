from __future__ import annotations

import builtins
import errno
import gc
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero_connector.errors import StoreClosedError, StoreError, TransferError
from hetero_connector.transfer import choose, nixl_files
from hetero_connector.transfer.base import (
    BLOCK_BYTES,
    Direction,
    Extent,
    FileTransfer,
    OpenFile,
    Transfer,
    TransferState,
)
from hetero_connector.transfer.checksum import CHECKSUM_BYTES, checksum
from hetero_connector.transfer.choose import choose_file_transfer, probe
from hetero_connector.transfer.nixl_backends import working_backends
from hetero_connector.transfer.nixl_files import NixlFiles, open_agent
from hetero_connector.transfer.pread_files import PreadFiles
from tests.transfer.memory_files import MemoryFiles
from tests.waiting import until

B = BLOCK_BYTES


def uring_works() -> bool:
    try:
        open_agent("uring")
    except StoreError:
        return False
    return True


needs_uring = pytest.mark.skipif(not uring_works(), reason="no NIXL POSIX backend on io_uring")


def arena(size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def wait(transfer: Transfer) -> TransferState:
    until(lambda: transfer.poll() is not TransferState.PENDING, pause_s=1e-4)
    return transfer.poll()


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[NixlFiles, int]]:
    """NixlFiles over an empty pipe, whose read hangs until the test writes, and a file."""
    read_end, write_end = os.pipe()
    path = tmp_path / "a.slab"
    path.write_bytes(b"\x05" * 4 * B)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    transfer = NixlFiles(arena(8 * B), [OpenFile(read_end, B), OpenFile(fd, 4 * B)])
    yield transfer, write_end
    os.write(write_end, bytes(B))
    assert transfer.close()
    for each in (read_end, write_end, fd):
        os.close(each)


@needs_uring
def test_a_dropped_read_is_quarantined_until_it_ends(stuck: tuple[NixlFiles, int]) -> None:
    transfer, write_end = stuck
    hung = transfer.submit(Direction.READ, [Extent(0, 0, 0, B)])
    assert hung.poll() is TransferState.PENDING
    alive = weakref.ref(hung)
    del hung
    gc.collect()
    assert alive() is not None, "a handle collected while PROC corrupts the next transfer"
    for _ in range(20):
        other = transfer.submit(Direction.READ, [Extent(1, 0, 4 * B, 4 * B)])
        assert wait(other) is TransferState.DONE
        assert (transfer._memory[4 * B :] == 5).all()
    assert not alive().terminal
    os.write(write_end, b"\x07" * B)
    after = transfer.submit(Direction.READ, [Extent(1, 0, 4 * B, B)])
    assert wait(after) is TransferState.DONE
    assert transfer.close()
    assert (transfer._memory[:B] == 7).all()


@needs_uring
def test_close_stops_waiting_at_its_timeout_and_keeps_transfers_in_flight(
    stuck: tuple[NixlFiles, int],
) -> None:
    transfer, write_end = stuck
    hung = transfer.submit(Direction.READ, [Extent(0, 0, 0, B)])
    assert transfer.close(timeout_s=0.05) is False
    assert any(kept is transfer for kept in nixl_files._leaked)
    assert not hung.terminal
    with pytest.raises(StoreClosedError):
        transfer.submit(Direction.READ, [Extent(1, 0, 0, B)])
    os.write(write_end, bytes(B))
    assert wait(hung) is TransferState.DONE
    assert transfer.close()
    nixl_files._leaked.remove(transfer)


@needs_uring
def test_reads_are_posted_before_waiting_writes(tmp_path: Path) -> None:
    size = 64 << 20
    path = tmp_path / "a.slab"
    path.write_bytes(b"\x01" * size)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    transfer = NixlFiles(arena(2 * size), [OpenFile(fd, size)])
    spill = transfer.submit(Direction.WRITE, [Extent(0, 0, 0, size)])
    read = transfer.submit(Direction.READ, [Extent(0, size - B, size, B)])
    assert transfer._queued[0] is read or not read.waiting
    assert wait(read) is TransferState.DONE
    assert wait(spill) is TransferState.DONE
    assert transfer.close()
    os.close(fd)


def test_the_fake_fails_hangs_and_corrupts_on_demand() -> None:
    files = MemoryFiles(arena(4 * B), [np.full(4 * B, 9, np.uint8)])
    files.fail_next(code=errno.EIO)
    failed = files.submit(Direction.READ, [Extent(0, 0, 0, B)])
    assert failed.poll() is TransferState.FAILED
    assert failed.error is not None
    assert failed.error.errno == errno.EIO
    assert not files.memory.any()
    files.hang_next()
    hung = files.submit(Direction.READ, [Extent(0, 0, 0, B)])
    assert [hung.poll() for _ in range(3)] == [TransferState.PENDING] * 3
    assert not hung.terminal
    assert files.close() is False
    files.resume()
    assert hung.poll() is TransferState.DONE
    assert files.close() is True


def test_the_fake_corrupts_one_bit() -> None:
    files = MemoryFiles(arena(4 * B), [np.full(4 * B, 9, np.uint8)])
    files.corrupt_next()
    transfer = files.submit(Direction.READ, [Extent(0, 0, 0, B), Extent(0, B, B, B)])
    assert transfer.poll() is TransferState.DONE
    wrong = files.memory[: 2 * B] ^ 9
    assert int(np.unpackbits(wrong).sum()) == 1


def test_pread_names_the_errno_of_a_refused_write(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(B))
    fd = os.open(path, os.O_RDONLY)
    transfer = PreadFiles(arena(B), [OpenFile(fd, B)])
    failed = transfer.submit(Direction.WRITE, [Extent(0, 0, 0, B)])
    assert wait(failed) is TransferState.FAILED
    assert failed.error is not None
    assert failed.error.errno == errno.EBADF
    assert transfer.close()
    os.close(fd)


@pytest.mark.parametrize("size", [1, 4096, 100_000, 4 << 20])
def test_checksum_depends_on_every_part_and_on_the_seed(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    whole = checksum(data, 2**64 - 1)
    assert len(whole) == CHECKSUM_BYTES
    assert whole == checksum(data.copy(), 2**64 - 1)
    assert whole != checksum(data, 2**64 - 2)
    for at in (0, size // 2, size - 1):
        flipped = data.copy()
        flipped[at] ^= 0x10
        assert checksum(flipped, 2**64 - 1) != whole


def test_checksum_is_the_published_xxh3_128() -> None:
    # Empty input, seed 0: the reference value of the xxHash specification.
    assert checksum(np.empty(0, np.uint8), 0).hex() == "99aa06d3014798d86001c324468d497f"


@needs_uring
def test_nixl_is_chosen_where_it_works(tmp_path: Path) -> None:
    chosen = choose_file_transfer(arena(B), [], tmp_path)
    assert chosen.transfer.name == "nixl-posix-uring"
    assert chosen.transfer.close()
    assert list(tmp_path.iterdir()) == []


def test_without_nixl_pread_is_chosen_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def no_nixl(name, *args, **kwargs):  # type: ignore[no-untyped-def]
        if name.startswith("nixl"):
            raise ImportError("No module named 'nixl'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_nixl)
    chosen = choose_file_transfer(arena(B), [], tmp_path)
    assert chosen.transfer.name == "pread"
    assert "No module named 'nixl'" in chosen.reason
    assert chosen.transfer.close()


def test_nixl_that_returns_wrong_bytes_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupting(memory, files, queue):  # type: ignore[no-untyped-def]
        fake = MemoryFiles(memory, [np.zeros(f.size_bytes, np.uint8) for f in files])
        fake.corrupt_next()
        return fake

    monkeypatch.setattr(choose, "NixlFiles", corrupting)
    chosen = choose_file_transfer(arena(B), [], tmp_path)
    assert chosen.transfer.name == "pread"
    assert "differ" in chosen.reason
    assert chosen.transfer.close()


def test_a_hanging_probe_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_PROBE_TIMEOUT_S", 0.05)

    def hanging(memory: np.ndarray, files: list[OpenFile]) -> FileTransfer:
        fake = MemoryFiles(memory, [np.zeros(f.size_bytes, np.uint8) for f in files])
        fake.hang_next()
        return fake

    with pytest.raises(TransferError) as caught:
        probe(tmp_path, hanging)
    assert caught.value.errno == errno.ETIMEDOUT


_NOISY = """
import mmap, os, sys, numpy as np
from pathlib import Path
from hetero_connector.transfer.base import Direction, Extent, OpenFile, TransferState
from hetero_connector.transfer.choose import choose_file_transfer
path = Path(sys.argv[1], "a.slab")
path.write_bytes(bytes(4096))
fd = os.open(path, os.O_RDWR | os.O_DIRECT)
memory = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
transfer = choose_file_transfer(memory, [OpenFile(fd, 8192)], path.parent).transfer
assert transfer.name == "nixl-posix-uring"
failed = transfer.submit(Direction.READ, [Extent(0, 0, 0, 8192)])
while failed.poll() is TransferState.PENDING:
    pass
assert failed.poll() is TransferState.FAILED
assert transfer.close()
assert "NIXL_LOG_LEVEL" not in os.environ
"""


@needs_uring
def test_nixl_prints_nothing_even_on_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NOISY, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("script", "message"),
    [("exit 3", "exit 3"), ("echo cannot start >&2; kill -9 $$", "cannot start")],
)
def test_a_crash_of_nixl_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(StoreError, match=message):
        working_backends()
