"""Runs the points of a sweep, side by side, and keeps what is done in a file of JSON lines."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hetero_connector.errors import SimulationError
from ownership.simulator.fleet_file import read_fleet
from ownership.simulator.oracle.result import is_oracle, oracle_result
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulating import simulate
from ownership.simulator.sweeps.points import Point
from ownership.simulator.traces.formats import open_trace

RESULTS_FORMAT = 4
"""Version of what a line means."""


@dataclass(frozen=True)
class Inputs:
    """What every point of a sweep is made from."""

    trace: Path
    format: str | None
    fleet: Path

    def digest(self) -> str:
        """Of the format's version, the fleet's file, the profiles beside it that it may name, and
        the trace's name and size: results of other inputs are not taken up again."""
        found = sha256(f"{RESULTS_FORMAT} {self.format} {self.trace.name}".encode())
        files = sorted(self.trace.iterdir()) if self.trace.is_dir() else [self.trace]
        found.update(repr([(file.name, file.stat().st_size) for file in files]).encode())
        found.update(self.fleet.read_bytes())
        for profile in sorted(self.fleet.parent.glob("*.json")):
            if profile.name in self.fleet.read_text(errors="replace"):
                found.update(profile.read_bytes())
        return found.hexdigest()[:16]


class ResultFile:
    """The lines of a sweep: one for each point that is done, written as it is done."""

    def __init__(self, path: Path, digest: str) -> None:
        """Raises SimulationError where the file is of other inputs, or no file of results."""
        self._path, self._digest = path, digest
        self._lines: dict[str, str] = {}
        if path.exists():
            self._read()

    def __contains__(self, point: Point) -> bool:
        return point.key in self._lines

    def add(self, point: Point, result: Mapping[str, Any]) -> None:
        """Write one more line."""
        document = {"inputs": self._digest, "point": json.loads(point.key), **result}
        line = json.dumps(document)
        self._lines[point.key] = line
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def ordered(self, wanted: Iterable[Point]) -> list[dict[str, Any]]:
        """The results of those points; the file has them in that order from now on, first."""
        keys = [point.key for point in wanted]
        known = set(keys)
        others = [key for key in self._lines if key not in known]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(f"{self._lines[key]}\n" for key in [*keys, *others]))
        temporary.replace(self._path)
        return [json.loads(self._lines[key]) for key in keys]

    def _read(self) -> None:
        text = self._path.read_text(errors="replace")
        *lines, last = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                document = json.loads(line)
                inputs, key = document["inputs"], Point(**document["point"]).key
            except (ValueError, KeyError, TypeError) as error:
                problem = f"no line of results ({error}): name another --out"
                raise SimulationError(str(self._path), problem, line=number) from error
            if inputs != self._digest:
                problem = "of another trace, fleet or version: name another --out"
                raise SimulationError(str(self._path), problem, line=number)
            self._lines[key] = line
        if last:  # written while something was killed
            self._path.write_text(text[: len(text) - len(last)])


def run(
    inputs: Inputs,
    wanted: Sequence[Point],
    results: ResultFile,
    processes: int,
    progress: Callable[[Point], None],
) -> None:
    """Simulate every point that has no result yet. `progress` is told of each that is done."""
    left = [point for point in wanted if point not in results]
    for point, result in _simulated(inputs, left, processes):
        results.add(point, result)
        progress(point)


def _simulated(
    inputs: Inputs, left: Sequence[Point], processes: int
) -> Iterator[tuple[Point, dict[str, Any]]]:
    job = partial(simulate_point, inputs)
    if processes == 1 or len(left) < 2:
        yield from ((point, job(point)) for point in left)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(left)), mp_context=context) as pool:
        jobs = {pool.submit(job, point): point for point in left}
        try:
            for done in as_completed(jobs):
                yield jobs[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def simulate_point(inputs: Inputs, point: Point) -> dict[str, Any]:
    """One point's result as plain values."""
    fleet = read_fleet(inputs.fleet)
    if point.workers is not None:
        fleet = fleet.of_size(point.workers)
    trace = open_trace(inputs.trace, inputs.format)
    if is_oracle(point.policy):
        return oracle_result(point.policy, trace, fleet, point.workload)
    return simulate(trace, fleet, parse_policy(point.policy), point.workload).as_json()
