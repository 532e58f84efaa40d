"""Memory that another process can map: a memfd, which has no name on disk.

Linux gives huge pages to a memfd only if an administrator has allowed it (`shmem_enabled`) or the
process asks for them explicitly (MADV_COLLAPSE, Linux 6.1), for a mapping on their boundaries.
"""

from __future__ import annotations

import contextlib
import ctypes
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
_ATTEMPTS = 64
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SharedMemory:
    """A mapping of a memfd, and its descriptor, which can be passed to another process."""

    fd: int
    view: npt.NDArray[np.uint8]
    """`[bytes] uint8`, writable."""


def make_memfd(name: str, size_bytes: int) -> int:
    """Make a memfd of a fixed size. If it could shrink, a process that maps it could crash."""
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
    """Make a small shared memory; its pages are allocated when touched. Raises OSError."""
    fd = make_memfd(name, size_bytes)
    try:
        return SharedMemory(fd, np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8))
    except BaseException:
        os.close(fd)
        raise


def map_aligned(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a memfd at an address where a huge page may start, if the kernel offers one."""
    others = []
    mapping = mmap.mmap(fd, size_bytes)
    for _ in range(_ATTEMPTS):
        at = np.frombuffer(mapping, np.uint8).ctypes.data
        if at % _HUGE == 0 or size_bytes < _HUGE:
            break
        # The kernel takes the highest gap that is large enough. A filler as large as the mapping
        # goes below it, in the same gap if it fits there, and leaves a boundary for the next one.
        # It takes address space, never memory.
        filler = size_bytes + (at - 2 * size_bytes) % _HUGE
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        others += [mapping, mmap.mmap(-1, filler, anonymous, _NO_ACCESS)]
        mapping = mmap.mmap(fd, size_bytes)
    for other in others:
        other.close()
    return mapping


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Call madvise without the GIL, which `mmap.madvise` holds for seconds. Raises OSError."""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def populate(address: int, size_bytes: int) -> None:
    """Take all pages of a part of a mapping now. Raises OSError; EINVAL before Linux 5.14."""
    advise(address, size_bytes, _MADV_POPULATE_WRITE)


def take_huge_pages(address: int, size_bytes: int) -> None:
    """Back a part of a memfd's mapping with huge pages, as far as the kernel has any.

    They only make it faster, so an older kernel or fragmented memory is no error. Raises OSError
    if there is no memory at all.
    """
    for at in range(address, address + size_bytes, _HUGE):  # only populated pages can be collapsed
        populate(at, mmap.PAGESIZE)
    with contextlib.suppress(OSError):
        advise(address, size_bytes, _MADV_COLLAPSE)


def collapses_shared(release: str) -> bool:
    """True if a kernel of this `uname` release can give a memfd huge pages on request."""
    major, minor, *_ = (int(part) for part in re.findall(r"\d+", release))
    return (major, minor) >= _COLLAPSE_SINCE


def map_whole(fd: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Map another process's memory, and fill the page table before the first transfer."""
    view = np.frombuffer(map_aligned(fd, size_bytes), np.uint8)
    with contextlib.suppress(OSError):  # an older kernel maps pages when they are touched
        advise(view.ctypes.data, size_bytes, _MADV_HUGEPAGE)
        populate(view.ctypes.data, size_bytes)
    return view
