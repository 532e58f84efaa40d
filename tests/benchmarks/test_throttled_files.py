"""A throttled transfer ends when its bandwidth says so, on a clock of the test's own."""

import numpy as np
import pytest

from benchmarks.throttled_files import ThrottledFiles
from hetero_connector.transfer.base import BLOCK_BYTES, Direction, Extent, TransferState
from tests.transfer.memory_files import MemoryFiles

B = BLOCK_BYTES


class Throttled:
    def __init__(self, read_bandwidth: float) -> None:
        self.now_s = 100.0
        memory = np.zeros(8 * B, np.uint8)
        inner = MemoryFiles(memory, [np.ones(8 * B, np.uint8)])
        self.files = ThrottledFiles(inner, read_bandwidth, clock=lambda: self.now_s)


def test_reads_end_one_after_the_other_at_the_bandwidth() -> None:
    bench = Throttled(read_bandwidth=B)  # a block a second
    first = bench.files.submit(Direction.READ, [Extent(0, 0, 0, 2 * B)])
    second = bench.files.submit(Direction.READ, [Extent(0, 2 * B, 2 * B, B)])
    assert [t.poll() for t in (first, second)] == [TransferState.PENDING] * 2
    bench.now_s += 2
    assert [t.poll() for t in (first, second)] == [TransferState.DONE, TransferState.PENDING]
    bench.now_s += 1
    assert second.poll() is TransferState.DONE


def test_an_idle_disk_saves_nothing_up() -> None:
    bench = Throttled(read_bandwidth=B)
    bench.now_s += 1000
    transfer = bench.files.submit(Direction.READ, [Extent(0, 0, 0, B)])
    assert transfer.poll() is TransferState.PENDING


def test_writes_pass() -> None:
    bench = Throttled(read_bandwidth=1)
    assert bench.files.submit(Direction.WRITE, [Extent(0, 0, 0, B)]).poll() is TransferState.DONE


def test_no_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Throttled(read_bandwidth=0)
