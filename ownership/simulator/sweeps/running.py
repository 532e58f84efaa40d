"""The simulations of a sweep: which ones, running them in parallel, and resuming them."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, get_args

from hetero_connector import artifacts, planner, spec
from hetero_connector.errors import SimulationError
from hetero_connector.store import catalog
from hetero_connector.timeline import Timeline
from ownership import scheduling, simulator
from ownership.simulator.fleet_file import read_fleet
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.workload import Half, Window, Workload

_CODE = (artifacts, catalog, planner, spec, scheduling, simulator)
"""The packages that figures depend on."""
_Point = TypeVar("_Point", bound="Point")
RESULTS_FORMAT = 6
"""Version of the lines. Results of other code are not mixed, see `Inputs.digest`."""


@dataclass(frozen=True)
class Point:
    """One simulation of a sweep. Every field may be swept."""

    policy: str
    workers: int | None = None
    """Number of workers; None: all of the fleet's file."""
    rate: float | None = None
    sharing: float | None = None
    sessions: int | None = None
    seed: int = 0
    half: Half | None = None
    begin_s: float | None = None
    """Begin of the window that figures are of; then its end."""
    end_s: float | None = None
    speed: float | None = None
    population: int | None = None

    @property
    def workload(self) -> Workload:
        """The changes to the trace."""
        window = Window(self.begin_s or 0.0, self.end_s or math.inf)
        return Workload(
            self.rate, self.sharing, self.sessions, self.seed, self.speed, self.population,
            self.half, window,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """A stable text that no other point has."""
        return key_of(asdict(self))


def key_of(point: Mapping[str, Any]) -> str:
    """Return the key of a point as it stands in a line of results."""
    given = {name: value for name, value in point.items() if value is not None}
    return json.dumps(given, sort_keys=True)


_LEAST: Mapping[str, float] = {"workers": 1, "sessions": 1, "population": 1}
_MOST: Mapping[str, float] = {"sharing": 1, "workers": 100_000}
_WHOLE = {"workers", "sessions", "seed", "population"}
_ABOVE_0 = {"rate", "end_s", "speed"}
SWEPT = tuple(field.name for field in fields(Point) if field.name != "policy")
"""The names that `--sweep` takes."""


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Read `rate=0.1,0.2`: a field of `Point` and its values. Raises SimulationError."""
    name, _, listed = text.partition("=")
    if name not in SWEPT:
        raise SimulationError("--sweep", f"no {name!r}; there are {', '.join(SWEPT)}")
    values: list[Any] = listed.split(",")
    if name != "half":
        values = [_value(name, value) for value in values]
    elif not {*values} <= {*get_args(Half)}:
        raise SimulationError("--sweep", f"{listed!r} is not first, second or first,second", name)
    if len(set(values)) < len(values):  # the same seed is no second sample
        raise SimulationError("--sweep", f"a value is given twice: {listed}", name)
    return name, values


def points(policies: Sequence[str], sweeps: Mapping[str, Sequence[Any]]) -> Iterator[Point]:
    """Yield all combinations, the policies of each together.

    Raises SimulationError for an unknown policy, one given twice, and none at all.
    """
    if not policies:
        raise SimulationError("--policies", "names none, e.g. ownerserve,dynamo_kv")
    if len(set(policies)) < len(policies):
        raise SimulationError("--policies", f"one is given twice: {','.join(policies)}")
    for policy in policies:
        parse_policy(policy)
    names = [name for name in SWEPT if name in sweeps]
    for values in product(*(sweeps[name] for name in names)):
        for policy in policies:
            made = dict(zip(names, values, strict=True))
            whole: dict[str, Any] = {n: int(v) if n in _WHOLE else v for n, v in made.items()}
            yield Point(policy, **whole)


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    good = _LEAST.get(name, 0) <= value <= _MOST.get(name, 1e12)
    if not good or (name in _WHOLE and value != int(value)) or (name in _ABOVE_0 and not value):
        problem = f"{text!r} is no {'whole ' if name in _WHOLE else ''}number in its range"
        raise SimulationError("--sweep", problem, name)
    return value


@dataclass(frozen=True)
class Inputs:
    """The files that every simulation of a sweep reads."""

    trace: Path
    format: str | None
    fleet: Path

    def digest(self) -> str:
        """Hash the code that simulates, the fleet's file with its profiles, and the trace's name
        and size. Results of other inputs or of other code are not used again.

        Raises SimulationError if the fleet's file is wrong.
        """
        found = sha256(f"{RESULTS_FORMAT} {self.format} {self.trace.name}".encode())
        files = sorted(self.trace.iterdir()) if self.trace.is_dir() else [self.trace]
        found.update(repr([(file.name, file.stat().st_size) for file in files]).encode())
        found.update(self.fleet.read_bytes())
        for profile in read_fleet(self.fleet).profiles:
            found.update(profile.read_bytes())
        for package in _CODE:
            for source in sorted(Path(package.__path__[0]).rglob("*.py")):
                found.update(source.read_bytes())
        return found.hexdigest()[:16]


class ResultFile:
    """The results of a sweep, a line for each point, written as soon as it is simulated."""

    def __init__(self, path: Path, digest: str) -> None:
        """Raises SimulationError if the file has other inputs, or is no file of results."""
        self._path, self._digest = path, digest
        self._lines: dict[str, str] = {}
        if path.exists():
            self._read()

    def __contains__(self, point: Point) -> bool:
        return point.key in self._lines

    def add(self, point: Point, result: Mapping[str, Any]) -> None:
        """Append a line."""
        document = {"inputs": self._digest, "point": json.loads(point.key), **result}
        line = json.dumps(document)
        self._lines[point.key] = line
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def ordered(self, wanted: Iterable[Point]) -> list[dict[str, Any]]:
        """Return the results of those points, and rewrite the file in their order, others last."""
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
                inputs, key = document["inputs"], key_of(document["point"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"no line of results ({error}): name another --out"
                raise SimulationError(str(self._path), problem, line=number) from error
            if inputs != self._digest:
                problem = "of another trace, fleet or version of the code: name another --out"
                raise SimulationError(str(self._path), problem, line=number)
            self._lines[key] = line
        if last:  # the process was killed while it wrote
            self._path.write_text(text[: len(text) - len(last)])


def run(
    job: Callable[[_Point], Mapping[str, Any]],
    wanted: Sequence[_Point],
    results: ResultFile,
    processes: int,
    progress: Callable[[_Point], None],
) -> None:
    """Do the job of every point without a result. `progress` is called after each.

    With several processes the job has to be picklable.
    """
    left = [point for point in wanted if point not in results]
    for point, result in _done(job, left, processes):
        results.add(point, result)
        progress(point)


def _done(
    job: Callable[[_Point], Mapping[str, Any]], left: Sequence[_Point], processes: int
) -> Iterator[tuple[_Point, Mapping[str, Any]]]:
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


def simulate_point(
    inputs: Inputs, point: Point, timeline: Timeline | None = None
) -> dict[str, Any]:
    """Return the result of one point as plain values."""
    fleet = read_fleet(inputs.fleet)
    if point.workers is not None:
        fleet = fleet.of_size(point.workers)
    trace = open_trace(inputs.trace, inputs.format)
    policy = parse_policy(point.policy)
    return simulate(trace, fleet, policy, point.workload, timeline=timeline).as_json()
