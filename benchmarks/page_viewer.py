"""A viewer of a live page's events, for what it costs the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.child_processes import announced

_VIEWER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as events:
    for line in events:
        print(len(line), flush=True)
"""


@contextmanager
def viewer(url: str) -> Iterator[int]:
    """Watch the events in a process of its own; yield the bytes of the first."""
    with announced(["-c", _VIEWER, url]) as (line, _):
        yield int(line)
