"""A control group of its own whose memory is limited: what runs out in it the kernel kills."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import until

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_numbers = itertools.count()


class MemoryGroup:
    """One control group of cgroup v1 or v2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v2 = (folder / "memory.max").exists()

    def take_in_this_process(self) -> None:
        """From now on what this process and its children take is counted here."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, size_bytes: int) -> None:
        """Allow so much, swap space included where it is counted."""
        if self._is_v2:
            (self.folder / "memory.max").write_text(str(size_bytes))
            with suppress(OSError):  # a kernel that does not count it
                (self.folder / "memory.swap.max").write_text("0")
            return
        # With swap it is never less than without: which goes first depends on what it was.
        for name in ("memory.memsw", "memory", "memory.memsw"):
            with suppress(OSError):
                (self.folder / f"{name}.limit_in_bytes").write_text(str(size_bytes))
        assert abs(int((self.folder / "memory.limit_in_bytes").read_text()) - size_bytes) < 1 << 20

    @property
    def used_bytes(self) -> int:
        """Bytes that are counted here now, the page cache too."""
        name = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    @property
    def kills(self) -> int:
        """The number of processes that the kernel has killed here for want of memory."""
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        lines = (self.folder / name).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make one; in the end kill what is left in it. OSError if this cannot be done."""
    top = _V1 if _V1.is_dir() else _V2
    if top == _V2:
        (top / "cgroup.subtree_control").write_text("+memory")
    folder = top / f"fault-{os.getpid()}x{next(_numbers)}"
    folder.mkdir()
    try:
        group = MemoryGroup(folder)
        _ = group.kills
        yield group
    finally:
        until(lambda: _is_empty(folder))
        folder.rmdir()


def _is_empty(folder: Path) -> bool:
    """Kill what is left in the group; return True if nothing was."""
    left = (folder / "cgroup.procs").read_text().split()
    for process_id in left:
        with suppress(ProcessLookupError):
            os.kill(int(process_id), signal.SIGKILL)
    return not left


def why_no_groups() -> str:
    """Return why no memory can be limited here; empty if it can."""
    try:
        with memory_group():
            return ""
    except (OSError, KeyError) as e:
        return f"no memory control group can be made: {e}"
