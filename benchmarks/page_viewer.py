"""A viewer of a live page's events, for what it costs the server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VIEWER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as events:
    for line in events:
        print(len(line), flush=True)
"""


@contextmanager
def viewer(url: str) -> Iterator[int]:
    """Watch the events in a process of its own; yield the bytes of the first."""
    command = [sys.executable, "-c", _VIEWER, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()
