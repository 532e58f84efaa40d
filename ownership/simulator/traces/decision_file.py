"""Reads a log of decisions line by line: nothing is kept but the fleets that lines name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hetero_connector.containers import BoundedDict
from hetero_connector.errors import TraceError
from ownership.decisions.records import DecisionRecord, FleetRecord, NewerFormatError, decode
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.step import Step
from ownership.simulator.traces.lines import read_lines

_MOST_FLEETS = 512
"""Workers tell new costs every few seconds. A line names the fleet of its decision, which is as
old as the request was long."""


class Decided(NamedTuple):
    """A decision, with the view that it was made on."""

    record: DecisionRecord
    step: Step | None = None
    fleet: FleetView | None = None
    """The fleet with its loads until the next decision is read; None if the log lacks it."""


@dataclass
class LineCounts:
    """The lines of a log, by what could be made of them."""

    decisions: int = 0
    without_view: int = 0
    """Decisions that cannot be made again: of format 1, or their fleet's line is lost."""
    unreadable: int = 0
    """Torn lines, and lines that are no decisions."""
    newer: int = 0
    """Lines of later versions of the package."""
    first_problem: str = ""

    def sentences(self) -> list[str]:
        """Return what a reader of the figures has to know of the lines left out."""
        found = []
        if self.unreadable:
            found.append(
                f"{_lines(self.unreadable)} left out: torn, or no decision ({self.first_problem})."
            )
        if self.newer:
            problem = "written by a later version of this package: read the log with that one"
            found.append(f"{_lines(self.newer)} left out: {problem}.")
        if self.without_view:
            found.append(
                f"{_lines(self.without_view)} without the view that was decided on (an earlier "
                "version's, or the line of the fleet is lost): no other policy is asked there."
            )
        return found


class DecisionFile:
    """A log, plain or gzip. Reading it again counts again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = LineCounts()

    def __iter__(self) -> Iterator[Decided]:
        """Yield the decisions in the order in which their requests ended.

        Raises TraceError if the file cannot be read or has no decision.
        """
        counts = self.counts = LineCounts()
        fleets = BoundedDict[str, FleetView](_MOST_FLEETS)
        for line in read_lines(self.path):
            try:
                record = decode(line.text)
                if isinstance(record, FleetRecord):
                    fleets[record.fleet] = record.view()
                    continue
                decided = _with_view(record, fleets.get(record.fleet))
            except NewerFormatError:
                counts.newer += 1
                continue
            except ValueError as error:
                counts.unreadable += 1
                counts.first_problem = counts.first_problem or f"line {line.number}: {error}"
                continue
            counts.decisions += 1
            counts.without_view += decided.fleet is None
            yield decided
        if not counts.decisions:
            raise TraceError(str(self.path), " ".join(["no decision in it.", *counts.sentences()]))


def _with_view(record: DecisionRecord, fleet: FleetView | None) -> Decided:
    if fleet is None:
        return Decided(record)
    record.set_loads(fleet)
    return Decided(record, record.step(), fleet)


def _lines(count: int) -> str:
    return f"{count:,} line" + ("s" if count > 1 else "")
