"""Processes that print a line when they are ready."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[1]


@contextmanager
def announced(arguments: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start Python with these arguments; yield the first line that it prints, and the process.

    It runs in the root of the repository and is killed at the end. Raises RuntimeError if it ends
    without a line.
    """
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"it ended before it was ready: {' '.join(arguments)}")
            yield line, process
        finally:
            process.kill()
