"""Fixed parts of the machine's CPU time for groups of processes, by Linux control groups.

Servers that share cores slow each other down: what one of them takes for a prompt depends on what
the others do, which neither a router nor a simulator can know. With a share of its own, each is a
small machine of a fixed speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000
"""A group that has used its time pauses until the next period; the kernel's default, 100 ms, would
be seen as a gap between tokens."""
_EMPTY_WITHIN_S = 10.0


class CpuShare:
    """A control group. Its processes together get at most so many cores."""

    def __init__(self, name: str, root: Path = _ROOT) -> None:
        """Make a group without a limit. Raises OSError if this user may not make one.

        `root`: where control groups are mounted, of version 1 or 2.
        """
        parent, self._files = _hierarchy(root)
        self._folder = parent / f"{name}-{os.getpid()}"
        self._folder.mkdir()

    def add(self, pid: int) -> None:
        """Add a process, and with it the children that it will have."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float) -> None:
        """Let the processes use at most so many cores from now on. Raises OSError if it cannot."""
        values = {"quota": max(1000, round(cores * _PERIOD_US)), "period": _PERIOD_US}
        for name, value in self._files.items():
            (self._folder / name).write_text(value.format(**values))

    def close(self) -> None:
        """Remove the group, whose processes have ended."""
        deadline = time.monotonic() + _EMPTY_WITHIN_S
        while True:
            try:
                return self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _hierarchy(root: Path) -> tuple[Path, Mapping[str, str]]:
    """Return the folder for groups, and what to write to which files for a limit."""
    if (root / "cgroup.controllers").exists():
        return root, {"cpu.max": "{quota} {period}"}
    return root / "cpu", {"cpu.cfs_period_us": "{period}", "cpu.cfs_quota_us": "{quota}"}
