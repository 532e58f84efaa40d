"""One suite for every `FileTransfer`: NIXL on both queues, preadv, throttled, and in memory."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.throttled_files import ThrottledFiles
from hetero_connector.errors import StoreClosedError, StoreError, TransferError
from hetero_connector.transfer.base import (
    BLOCK_BYTES,
    Direction,
    Extent,
    FileTransfer,
    OpenFile,
    Transfer,
    TransferState,
    split,
)
from hetero_connector.transfer.nixl_files import NixlFiles, open_agent
from hetero_connector.transfer.pread_files import PreadFiles
from tests.transfer.memory_files import MemoryFiles

B = BLOCK_BYTES
FILE_BYTES = 3 << 20
MEMORY_BYTES = 8 << 20


def nixl_works(queue: str) -> bool:
    try:
        open_agent(queue)
    except StoreError:
        return False
    return True


KINDS = [
    "memory",
    "pread",
    "throttled",
    *(
        pytest.param(
            f"nixl-{q}",
            marks=pytest.mark.skipif(not nixl_works(q), reason=f"no NIXL POSIX backend on {q}"),
        )
        for q in ("uring", "aio")
    ),
]


class Bench:
    """A transfer over two files whose content the test can see and spoil."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.memory = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), np.uint8)
        self.paths = [folder / "a.slab", folder / "b.slab"]
        self.fds: list[int] = []
        if kind == "memory":
            self.transfer: FileTransfer = MemoryFiles(
                self.memory, [np.zeros(FILE_BYTES, np.uint8) for _ in self.paths]
            )
            return
        for path in self.paths:
            path.write_bytes(bytes(FILE_BYTES))
            self.fds.append(os.open(path, os.O_RDWR | os.O_DIRECT))
        files = [OpenFile(fd, FILE_BYTES) for fd in self.fds]
        if kind.startswith("nixl-"):
            self.transfer = NixlFiles(self.memory, files, kind.removeprefix("nixl-"))
        else:
            self.transfer = PreadFiles(self.memory, files)
        if kind == "throttled":
            self.transfer = ThrottledFiles(self.transfer, read_bandwidth=1e9)

    def content(self, file: int) -> np.ndarray:
        if isinstance(self.transfer, MemoryFiles):
            return self.transfer.files[file]
        return np.fromfile(self.paths[file], np.uint8)

    def fill(self, file: int, data: np.ndarray) -> None:
        if isinstance(self.transfer, MemoryFiles):
            self.transfer.files[file][:] = data
        else:
            self.paths[file].write_bytes(data.tobytes())

    def truncate(self, file: int, size: int) -> None:
        if isinstance(self.transfer, MemoryFiles):
            self.transfer.files[file] = self.transfer.files[file][:size]
        else:
            os.truncate(self.paths[file], size)

    def wait(self, transfer: Transfer) -> TransferState:
        deadline = time.monotonic() + 30
        while transfer.poll() is TransferState.PENDING:
            assert not transfer.terminal
            assert time.monotonic() < deadline, "the transfer never ended"
            time.sleep(1e-4)
        assert transfer.terminal
        return transfer.poll()

    def move(self, direction: Direction, extents: list[Extent]) -> TransferState:
        return self.wait(self.transfer.submit(direction, extents))

    def close(self) -> None:
        assert self.transfer.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path)
    yield bench
    bench.close()


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_bytes_written_are_read_back(bench: Bench) -> None:
    bench.memory[:FILE_BYTES] = noise(FILE_BYTES)
    whole = Extent(1, 0, 0, FILE_BYTES)
    assert bench.move(Direction.WRITE, [whole]) is TransferState.DONE
    assert np.array_equal(bench.content(1), bench.memory[:FILE_BYTES])
    assert not bench.content(0).any()
    back = Extent(1, 0, FILE_BYTES, FILE_BYTES)
    assert bench.move(Direction.READ, [back]) is TransferState.DONE
    assert np.array_equal(bench.memory[FILE_BYTES : 2 * FILE_BYTES], bench.content(1))


def test_only_the_extents_are_touched(bench: Bench) -> None:
    bench.fill(0, noise(FILE_BYTES))
    assert bench.move(Direction.READ, [Extent(0, 5 * B, 3 * B, 2 * B)]) is TransferState.DONE
    expected = np.zeros(MEMORY_BYTES, np.uint8)
    expected[3 * B : 5 * B] = bench.content(0)[5 * B : 7 * B]
    assert np.array_equal(bench.memory, expected)


def test_many_extents_in_one_transfer_and_many_transfers_at_once(bench: Bench) -> None:
    blocks = FILE_BYTES // B
    bench.fill(0, noise(FILE_BYTES, 1))
    bench.fill(1, noise(FILE_BYTES, 2))
    order = np.random.default_rng(3).permutation(blocks)
    transfers = [
        bench.transfer.submit(
            Direction.READ,
            [Extent(f, int(s) * B, (f * blocks + d) * B, B) for d, s in enumerate(order)],
        )
        for f in (0, 1)
    ]
    assert [bench.wait(t) for t in transfers] == [TransferState.DONE] * 2
    for f in (0, 1):
        got = bench.memory[f * FILE_BYTES : (f + 1) * FILE_BYTES].reshape(blocks, B)
        assert np.array_equal(got, bench.content(f).reshape(blocks, B)[order])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_disjoint_extents_arrive(bench: Bench, data: st.DataObject) -> None:
    blocks = FILE_BYTES // B
    cuts = data.draw(st.lists(st.integers(0, blocks), min_size=2, max_size=12, unique=True))
    cuts.sort()
    pieces = list(pairwise(cuts))
    picked = data.draw(st.permutations(pieces))
    bench.memory[:] = noise(MEMORY_BYTES, len(cuts))
    before = bench.content(0).copy()
    shift = data.draw(st.integers(0, MEMORY_BYTES // B - blocks))
    extents = [Extent(0, lo * B, (lo + shift) * B, (hi - lo) * B) for lo, hi in picked]
    assert bench.move(Direction.WRITE, extents) is TransferState.DONE
    for e in extents:
        before[e.file_offset : e.file_offset + e.size] = bench.memory[
            e.memory_offset : e.memory_offset + e.size
        ]
    assert np.array_equal(bench.content(0), before)


@pytest.mark.parametrize("left", [0, 2 * B, 2 * B + 512, (1 << 20) + B])
def test_a_short_file_fails_the_read_but_not_the_next(bench: Bench, left: int) -> None:
    bench.fill(1, noise(FILE_BYTES))
    bench.truncate(0, left)
    good = bench.transfer.submit(Direction.READ, [Extent(1, 0, FILE_BYTES, FILE_BYTES)])
    bad = bench.transfer.submit(Direction.READ, [Extent(0, 0, 0, FILE_BYTES)])
    assert bench.wait(bad) is TransferState.FAILED
    assert isinstance(bad.error, TransferError)
    assert bench.wait(good) is TransferState.DONE
    assert good.error is None
    assert np.array_equal(bench.memory[FILE_BYTES : 2 * FILE_BYTES], bench.content(1))
    assert bench.move(Direction.READ, [Extent(1, 0, 0, B)]) is TransferState.DONE


def test_a_bad_descriptor_fails_the_transfer(tmp_path: Path, bench: Bench) -> None:
    if bench.kind == "memory":
        assert isinstance(bench.transfer, MemoryFiles)
        bench.transfer.fail_next(code=errno.EBADF)
    else:
        # dup2 swaps the file under the number for one that cannot be read.
        write_only = os.open(tmp_path / "c", os.O_WRONLY | os.O_CREAT)
        os.dup2(write_only, bench.fds[0])
        os.close(write_only)
    failed = bench.transfer.submit(Direction.READ, [Extent(0, 0, 0, 2 * B)])
    assert bench.wait(failed) is TransferState.FAILED
    if not bench.kind.startswith("nixl"):  # NIXL names no errno
        assert failed.error is not None
        assert failed.error.errno == errno.EBADF
    assert bench.move(Direction.READ, [Extent(1, 0, 0, B)]) is TransferState.DONE


def test_a_write_beyond_the_limit_fails(bench: Bench) -> None:
    if bench.kind == "memory":  # it has no kernel to refuse the write
        bench.transfer.fail_next(1, errno.EFBIG)
    else:
        bench.truncate(0, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (B, limits[1]))
        failed = bench.transfer.submit(Direction.WRITE, [Extent(0, 2 * B, 0, B)])
        assert bench.wait(failed) is TransferState.FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    if bench.kind == "pread":
        assert failed.error is not None
        assert failed.error.errno == errno.EFBIG
    assert bench.move(Direction.WRITE, [Extent(0, 2 * B, 0, B)]) is TransferState.DONE


@pytest.mark.parametrize(
    "extents",
    [
        [],
        [Extent(0, 0, 0, 0)],
        [Extent(0, 512, 0, B)],
        [Extent(0, 0, 1, B)],
        [Extent(0, 0, 0, B + 1)],
        [Extent(2, 0, 0, B)],
        [Extent(-1, 0, 0, B)],
        [Extent(0, -B, 0, B)],
        [Extent(0, 0, -B, B)],
        [Extent(0, FILE_BYTES, 0, B)],
        [Extent(0, 0, MEMORY_BYTES, B)],
        [Extent(0, 0, 0, B), Extent(0, 0, 0, FILE_BYTES + B)],
    ],
)
def test_a_wrong_extent_is_refused(bench: Bench, extents: list[Extent]) -> None:
    bench.fill(0, noise(FILE_BYTES))
    with pytest.raises(ValueError, match=r"extent|multiples|file|memory"):
        bench.transfer.submit(Direction.READ, extents)
    assert bench.transfer.close()
    assert not bench.memory.any(), "also the right ones before it"


def test_close_waits_for_dropped_transfers(bench: Bench) -> None:
    bench.memory[: 2 * FILE_BYTES] = noise(2 * FILE_BYTES)
    for f in (0, 1):
        bench.transfer.submit(Direction.WRITE, [Extent(f, 0, f * FILE_BYTES, FILE_BYTES)])
    assert bench.transfer.close()
    for f in (0, 1):
        assert np.array_equal(bench.content(f), bench.memory[f * FILE_BYTES : (f + 1) * FILE_BYTES])
    with pytest.raises(StoreClosedError):
        bench.transfer.submit(Direction.READ, [Extent(0, 0, 0, B)])


@given(st.integers(1, 64), st.integers(1, 20))
def test_split_covers_the_extent_in_order(blocks: int, part_blocks: int) -> None:
    parts = split(Extent(3, 7 * B, 9 * B, blocks * B), part_blocks * B)
    assert sum(p.size for p in parts) == blocks * B
    at = 0
    for p in parts:
        assert (p.file, p.file_offset, p.memory_offset) == (3, 7 * B + at, 9 * B + at)
        assert p.size <= part_blocks * B
        at += p.size
