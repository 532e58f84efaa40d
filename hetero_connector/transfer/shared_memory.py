"""Memory that another process can map: a memfd, which nothing on disk names.

Linux gives huge pages to a memfd by itself only where an administrator allowed it
(`shmem_enabled`), but to whoever asks for them outright (MADV_COLLAPSE, Linux 6.1), if the mapping
lies on their boundaries.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_COLLAPSE_SINCE = (6, 1)
_ATTEMPTS = 8
_GAP = 64 << 20
"""Address space, not memory: nothing touches it."""


@dataclass(frozen=True)
class SharedMemory:
    """A mapping of a memfd; the descriptor is for handing it on."""

    fd: int
    view: npt.NDArray[np.uint8]
    """`[bytes] uint8`, writable."""


def make_memfd(name: str, size_bytes: int) -> int:
    """A memfd whose size nobody can change: cut short, it would kill whoever has it mapped."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_shared(name: str, size_bytes: int) -> SharedMemory:
    """A small one: its pages are taken when they are touched. OSError if it cannot be had."""
    fd = make_memfd(name, size_bytes)
    try:
        return SharedMemory(fd, np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8))
    except BaseException:
        os.close(fd)
        raise


def map_aligned(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a memfd where a huge page may start, if the kernel has such a place."""
    others = []
    mapping = mmap.mmap(fd, size_bytes)
    for attempt in range(_ATTEMPTS):
        at = np.frombuffer(mapping, np.uint8).ctypes.data
        if at % _HUGE == 0 or size_bytes < _HUGE:
            break
        # The kernel puts the next mapping below the last one: another, too large for any gap above,
        # takes what lies between, so that the next one starts on a boundary.
        between = (at - size_bytes) % _HUGE + (_GAP << attempt)
        others += [mapping, mmap.mmap(-1, between, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
        mapping = mmap.mmap(fd, size_bytes)
    for other in others:
        other.close()
    return mapping


def take_huge_pages(mapping: mmap.mmap, start: int, size_bytes: int) -> None:
    """Back a part of a memfd's mapping with huge pages, as far as there are any.

    They only make it faster: an older kernel, or one without so much memory in one piece, is fine.
    OSError if there is no memory at all.
    """
    for at in range(start, start + size_bytes, _HUGE):  # where nothing is nothing is collapsed
        mapping.madvise(_MADV_POPULATE_WRITE, at, mmap.PAGESIZE)
    with contextlib.suppress(OSError):
        mapping.madvise(_MADV_COLLAPSE, start, size_bytes)


def collapses_shared(release: str) -> bool:
    """Whether a kernel, named as by `uname`, knows how to give a memfd huge pages on request."""
    major, minor, *_ = (int(part) for part in re.findall(r"\d+", release))
    return (major, minor) >= _COLLAPSE_SINCE


def map_whole(fd: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Another process's memory, with its pages in this one's tables before the first transfer."""
    mapping = map_aligned(fd, size_bytes)
    with contextlib.suppress(OSError):  # an older kernel: they come when they are touched
        mapping.madvise(_MADV_HUGEPAGE)
        mapping.madvise(_MADV_POPULATE_WRITE)
    return np.frombuffer(mapping, np.uint8)
