"""The DRAM tier's memory: one anonymous mapping, which worker processes map too.

Shared, it is a memfd: nothing is left behind when the process dies, and other processes
of the same user reach it as `/proc/<pid>/fd/<n>`. Where every worker lives in this process and
no peer reads it, it is private memory instead, because there older kernels too give huge pages to
whoever asks. Their physical runs make an O_DIRECT read up to twice as fast on a machine whose free
memory is fragmented, and let peers on this host read three times as fast.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector import machine
from hetero_connector.errors import ConfigError, StoreError
from hetero_connector.transfer.shared_memory import (
    SharedMemory,
    make_memfd,
    map_aligned,
    populate,
    take_huge_pages,
)
from hetero_connector.units import GIB

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_PIECE_BYTES = GIB // 4
_MOST_THREADS = 8
"""Beyond that the page cache of a single memfd is the limit."""


@dataclass(frozen=True)
class ArenaHandle:
    """Names an arena, while its creator lives: a shared one to the user's other processes too."""

    path: str
    size_bytes: int


class Arena:
    """A shared mapping. `Arena.create` makes one, `Arena.attach` finds it again."""

    def __init__(self, handle: ArenaHandle, fd: int | None, mapping: mmap.mmap) -> None:
        self.handle = handle
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._users = 1
        self._view: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes, `[size_bytes] uint8`, writable. StoreError once closed."""
        if self._view is None:
            raise StoreError("the DRAM arena was used after it was closed")
        return self._view

    @property
    def shared(self) -> SharedMemory:
        """For handing on to another process. StoreError if it is private, or closed."""
        if self._fd is None:
            raise StoreError("a private DRAM arena cannot be shared with another process")
        return SharedMemory(self._fd, self.view)

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self.view.ctypes.data)

    @classmethod
    def create(cls, size_bytes: int, *, shared: bool = True) -> Arena:
        """Reserve and map `size_bytes`; `shared` with other processes or in this one only.

        ConfigError("dram_gib") if the memory is not there.
        """
        if size_bytes <= 0:
            raise ConfigError("dram_gib", f"an arena of {size_bytes} bytes holds nothing")
        available = machine.memory().available_bytes
        if size_bytes > available:
            raise _too_big(size_bytes, available)
        try:
            arena = cls._shared(size_bytes) if shared else cls._private(size_bytes)
        except (OSError, ValueError, OverflowError) as e:
            if isinstance(e, OSError) and e.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise StoreError(f"cannot make a DRAM arena of {size_bytes} bytes: {e}") from e
            raise _too_big(size_bytes, available) from e
        with _registry_lock:
            _registry[arena.handle] = arena
        return arena

    @classmethod
    def _shared(cls, size_bytes: int) -> Arena:
        fd = make_memfd("heterocache-arena", size_bytes)
        try:
            mapping = map_aligned(fd, size_bytes)
            _reserve(mapping, fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(ArenaHandle(f"/proc/{os.getpid()}/fd/{fd}", size_bytes), fd, mapping)

    @classmethod
    def _private(cls, size_bytes: int) -> Arena:
        mapping = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child would get its own copy, and until it execs every page here would be copied
        # on the next write, under transfers that know the old one.
        mapping.madvise(_MADV_DONTFORK)
        _reserve(mapping, None)
        path = f"{_PRIVATE}{os.getpid()}/{next(_private_numbers)}"
        return cls(ArenaHandle(path, size_bytes), None, mapping)

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """The arena of `handle`: in the process that made it (or a fork) the very same object.

        A second mapping of the same memory would pay every page fault again. Each attach
        needs its own `close`. StoreError if it is gone or is not that arena.
        """
        with _registry_lock:
            arena = _registry.get(handle)
            if arena is None:
                arena = _registry[handle] = cls(handle, *_map(handle))
            else:
                arena._users += 1
            return arena

    def close(self) -> None:
        """Drop one use; the last one unmaps. Views still held elsewhere keep the memory alive."""
        with _registry_lock:
            if self._view is None:
                return
            self._users -= 1
            if self._users:
                return
            del _registry[self.handle]
            self._view = None
            mapping, self._mapping = self._mapping, None
        assert mapping is not None
        if self._fd is not None:
            os.close(self._fd)
        # BufferError: a view is still in use. The mapping then lives exactly as long as that
        # view: without it, a late access would be a crash.
        with contextlib.suppress(BufferError):
            mapping.close()


_PRIVATE = "private:"
_private_numbers = itertools.count()
_registry: dict[ArenaHandle, Arena] = {}
_registry_lock = threading.Lock()


def _too_big(asked: int, available: int) -> ConfigError:
    return ConfigError(
        "dram_gib",
        f"the DRAM tier needs {asked / GIB:.2f} GiB but only {available / GIB:.2f} GiB "
        "are available; ask for less",
    )


def _reserve(mapping: mmap.mmap, fd: int | None) -> None:
    """Take every page now: a page that cannot be had later would kill the process."""
    _ask_huge_pages(mapping)
    try:
        _populate(np.frombuffer(mapping, np.uint8), fd, machine.processors_by_node())
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        # A kernel before 5.14.
        if fd is None:
            np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
        else:
            os.posix_fallocate(fd, 0, len(mapping))


def _populate(
    memory: npt.NDArray[np.uint8], fd: int | None, nodes: Sequence[Collection[int]]
) -> None:
    """Populate pieces in several threads, spread over the NUMA nodes.

    A page lies on the node whose processor touches it first. On a single node every GPU of another
    one would read through the link between them.
    """
    starts = range(0, memory.nbytes, _PIECE_BYTES)
    most = max(len(nodes), min(_MOST_THREADS, sum(map(len, nodes))))
    num_threads = min(most, len(starts))

    def run(thread: int) -> None:
        if len(nodes) > 1:
            os.sched_setaffinity(0, nodes[thread % len(nodes)])  # of this thread only
        for start in starts[thread::num_threads]:
            address, size = memory.ctypes.data + start, min(_PIECE_BYTES, memory.nbytes - start)
            if fd is not None:
                take_huge_pages(address, size)
            populate(address, size)

    with ThreadPoolExecutor(num_threads, "heterocache-arena") as pool:
        list(pool.map(run, range(num_threads)))


def _map(handle: ArenaHandle) -> tuple[int, mmap.mmap]:
    """Map another process's arena."""
    if handle.path.startswith(_PRIVATE):
        raise StoreError(f"the DRAM arena {handle.path} can be used in its own process only")
    try:
        fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise StoreError(
            f"cannot map the DRAM arena {handle.path}: {e}. Its engine must be running, "
            "in the same process namespace and under the same user"
        ) from e
    try:
        actual = os.fstat(fd).st_size
        if actual != handle.size_bytes:
            raise StoreError(
                f"{handle.path} has {actual} bytes, the arena has {handle.size_bytes}: "
                "the engine that made it is gone"
            )
        mapping = map_aligned(fd, handle.size_bytes)
    except BaseException:
        os.close(fd)
        raise
    _ask_huge_pages(mapping)
    return fd, mapping


def _ask_huge_pages(mapping: mmap.mmap) -> None:
    """They only make it faster: a kernel without them is fine."""
    with contextlib.suppress(OSError):
        mapping.madvise(_MADV_HUGEPAGE)
