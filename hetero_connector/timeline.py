"""Timelines: what happened when, for Perfetto (https://ui.perfetto.dev) and Chrome.

Recordings of engines and simulations are written alike, as JSON in Chrome's trace event format: a
process for each engine, with a track for each of its parts, and slices on them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_NOTHING: Mapping[str, Any] = {}


class Activity(NamedTuple):
    """Something that takes time."""

    track: str
    name: str
    begin_s: float
    end_s: float
    details: Mapping[str, Any] = _NOTHING
    """Plain values, shown with it."""
    parts: Sequence[tuple[str, float, float]] = ()
    """(name, begin, end): what it consists of, within its time."""


class Timeline:
    """Activities of processes. Those of one track may overlap: each is then put on a free lane."""

    def __init__(self) -> None:
        self._activities: defaultdict[str, list[Activity]] = defaultdict(list)

    def add(self, process: str, activity: Activity) -> None:
        """Add an activity of a process, such as an engine."""
        self._activities[process].append(activity)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the format, with times in microseconds from the first one on."""
        everything = [x for found in self._activities.values() for x in found]
        start_s = min((x.begin_s for x in everything), default=0.0)
        for pid, (process, activities) in enumerate(self._activities.items(), 1):
            yield _named("process", pid, 0, process)
            on_lanes = list(_on_lanes(activities))
            lanes = sorted({lane for lane, _ in on_lanes})
            threads = {lane: tid for tid, lane in enumerate(lanes, 1)}
            for (track, number), tid in threads.items():
                yield _named("thread", pid, tid, f"{track} {number + 1}" if number else track)
                yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})
            for lane, activity in on_lanes:
                for part in _slices(activity):
                    yield {"ph": "X", "pid": pid, "tid": threads[lane], **_timed(part, start_s)}

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        with path.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(self.events()):
                file.write(("" if number == 0 else ",\n") + json.dumps(event))
            file.write("\n]}\n")


def _on_lanes(activities: Sequence[Activity]) -> Iterator[tuple[tuple[str, int], Activity]]:
    """Yield the activities by their begin, each after the first lane of its track that is free."""
    busy_until_s: defaultdict[str, list[float]] = defaultdict(list)
    for activity in sorted(activities, key=lambda x: x.begin_s):
        lanes = busy_until_s[activity.track]
        free = (number for number, end_s in enumerate(lanes) if end_s <= activity.begin_s)
        number = next(free, len(lanes))
        lanes[number : number + 1] = [activity.end_s]
        yield (activity.track, number), activity


def _slices(activity: Activity) -> Iterator[tuple[str, float, float, Mapping[str, Any]]]:
    """Yield the activity, then its parts: those around others first."""
    begin_s, end_s = activity.begin_s, activity.end_s
    yield activity.name, begin_s, end_s, activity.details
    for name, first_s, last_s in sorted(activity.parts, key=lambda x: (x[1], -x[2])):
        yield name, max(begin_s, first_s), min(end_s, last_s), _NOTHING


def _timed(part: tuple[str, float, float, Mapping[str, Any]], start_s: float) -> dict[str, Any]:
    name, begin_s, end_s, details = part
    begin_us, end_us = (round(1e6 * (x - start_s), 3) for x in (begin_s, end_s))
    event = {"name": name, "ts": begin_us, "dur": round(max(0.0, end_us - begin_us), 3)}
    return {**event, "args": dict(details)} if details else event


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return _metadata(f"{kind}_name", pid, tid, {"name": name})


def _metadata(name: str, pid: int, tid: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": values}
