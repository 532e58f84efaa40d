"""Memory for other processes: its size stays, its pages are huge where the kernel gives them."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from hetero_connector.store.arena import Arena
from hetero_connector.transfer.shared_memory import (
    advise,
    collapses_shared,
    create_shared,
    map_aligned,
    map_whole,
    take_huge_pages,
)

SIZE = 16 << 20
HUGE = 2 << 20
MADV_COLLAPSE = 25


def test_both_mappings_are_the_same_bytes() -> None:
    memory = create_shared("test", SIZE)
    other = map_whole(memory.fd, SIZE)
    other[5], memory.view[-1] = 7, 8
    assert (memory.view[5], other[-1]) == (7, 8)
    os.close(memory.fd)
    assert memory.view[5] == 7


def test_shared_memory_cannot_shrink() -> None:
    memory = create_shared("test", SIZE)
    for size in (0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    os.close(memory.fd)


@pytest.mark.parametrize("largest", [3 << 20, 60 << 20])
def test_large_mappings_start_where_a_huge_page_may(largest: int) -> None:
    """The process has many mappings with gaps between them, large enough for others or not."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    step = largest // 16
    sizes = [mmap.PAGESIZE * (1 + i % 7) + i % 16 * step for i in range(100)]
    pages = [mmap.mmap(-1, size, anonymous) for size in sizes]
    for page in pages[::2]:
        page.close()
    memory = create_shared("test", SIZE)
    kept = [map_aligned(memory.fd, SIZE) for _ in range(20)]
    assert [np.frombuffer(m, np.uint8).ctypes.data % HUGE for m in kept] == [0] * 20
    os.close(memory.fd)


def collapses() -> bool:
    """Return whether this kernel backs shared memory with huge pages when asked outright."""
    denied = "[deny]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    return collapses_shared(os.uname().release) and not denied


@pytest.mark.parametrize(
    ("release", "knows"),
    [("5.15.0-91-generic", False), ("6.0.9", False), ("6.1.0", True), ("6.18.44-fc", True)],
)
def test_kernels_that_collapse_shared_memory(release: str, knows: bool) -> None:
    assert collapses_shared(release) is knows


def huge_bytes(address: int) -> int:
    """Return the bytes in huge pages of this process's mapping at an address."""
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (mapping,) = [m for m in maps if m.startswith(f"{address:x}-")]
    found = re.search(r"ShmemPmdMapped: +(\d+) kB", mapping)
    assert found is not None
    return int(found[1]) << 10


def gives_huge_pages() -> bool:
    """Return whether the kernel has some to give now: it has none where memory is in pieces."""
    memory = create_shared("probe", 2 * SIZE)
    try:
        take_huge_pages(memory.view.ctypes.data, 2 * SIZE)
        advise(memory.view.ctypes.data, 2 * SIZE, MADV_COLLAPSE)
    except OSError:
        return False
    finally:
        os.close(memory.fd)
    return True


def test_a_shared_arena_has_huge_pages_where_the_kernel_gives_them() -> None:
    found = []
    for _ in range(5):
        arena = Arena.create(SIZE)
        assert not arena.view.any()
        assert arena.address % HUGE == 0
        found.append(huge_bytes(arena.address) > 0)
        arena.close()
    assert collapses() or not any(found)
    assert any(found) or not (collapses() and gives_huge_pages())
