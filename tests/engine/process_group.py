"""Processes of tests: code in one of its own, and those of a group that still run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from examples.serving import engine_environment

ROOT = Path(__file__).parents[2]


def run_apart(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code that starts an engine in a new Python process; its stdout has both streams."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=engine_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def living(group: int) -> list[str]:
    """Return the processes of the group that still run.

    A zombie only waits for its parent, unless threads of it are still ending: those keep
    its files, and so its locks.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition(" (")[2].rpartition(") ")
            threads = len(list((path.parent / "task").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, pgrp = rest.split()[:3]
        if int(pgrp) == group and (state not in "ZX" or threads > 1):
            found.append(f"{path.parent.name} {name}")
    return found


def assert_gone(group: int, timeout_s: float = 60.0) -> None:
    """Wait until no process of the group runs; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := living(group):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)
