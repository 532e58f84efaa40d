"""`heterocache trace`: what a trace is like."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ownership.simulator.traces import tables
from ownership.simulator.traces.formats import open_trace
from ownership.simulator.traces.plots import plot
from ownership.simulator.traces.session import Trace
from ownership.simulator.traces.statistics import measure


def stats(path: Path, format: str | None, picture: Path | None, *, as_json: bool) -> None:
    """Print the statistics of a trace file, and draw them where a `picture` is named.

    Raises:
        TraceError: the file is not a trace of the format; names file, line and field.
        OSError: the picture cannot be written.
    """
    found = measure(_with_progress(open_trace(path, format)))
    if picture is not None:
        plot(found, picture)
    print(json.dumps(tables.as_json(found), indent=2) if as_json else tables.as_markdown(found))


def _with_progress(trace: Trace) -> Trace:
    """The same trace, which shows how far it is read where somebody is looking."""
    if not sys.stderr.isatty():
        return trace
    bar = partial(tqdm, trace, unit=" sessions", desc="read", leave=False)
    return replace(trace, sessions=lambda: iter(bar()))
