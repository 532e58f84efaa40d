"""Check files in Chrome's trace event format, as Perfetto reads them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Slice(NamedTuple):
    process: str
    track: str
    name: str
    begin_us: float
    end_us: float
    args: dict[str, Any]


def read_trace(path: Path) -> list[Slice]:
    """Return the slices. Raises AssertionError for what Perfetto would refuse, drop or misplace."""
    document = json.loads(path.read_text())
    names: dict[tuple[str, int, int], str] = {}
    slices = []
    for event in document["traceEvents"]:
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                key = event["name"], event["pid"], event["tid"]
                assert key not in names, "named twice"
                names[key] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        slices.append(
            Slice(
                names["process_name", event["pid"], 0],
                names["thread_name", event["pid"], event["tid"]],
                event["name"],
                event["ts"],
                event["ts"] + event["dur"],
                event.get("args", {}),
            )
        )
    tracks = defaultdict(list)
    for found in slices:
        tracks[found.process, found.track].append(found)
    for on_track in tracks.values():
        assert_nested(on_track)
    return slices


def assert_nested(slices: list[Slice]) -> None:
    """A slice is within another one of its track, or apart from it."""
    above: list[Slice] = []
    for found in sorted(slices, key=lambda x: (x.begin_us, -x.end_us)):
        while above and above[-1].end_us <= found.begin_us + 0.002:
            above.pop()
        assert not above or found.end_us <= above[-1].end_us + 0.002, (above[-1], found)
        above.append(found)
