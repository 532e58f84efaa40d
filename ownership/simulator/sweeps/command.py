"""`heterocache simulate`: simulate policies on a fleet, and write results into a directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hetero_connector.errors import SimulationError
from hetero_connector.timeline import Timeline
from ownership.simulator.fleet_file import FleetSpec, read_fleet
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import chunk_tokens_of
from ownership.simulator.sweeps.report import about, as_markdown, rows
from ownership.simulator.sweeps.running import (
    Inputs,
    Point,
    ResultFile,
    parse_sweep,
    points,
    run,
    simulate_point,
)
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload


def sweep(
    inputs: Inputs, policies: Sequence[str], sweeps: Sequence[str], out: Path, processes: int,
    *, as_json: bool, timeline: Path | None = None,
) -> None:  # fmt: skip
    """Simulate, and write `results.jsonl` and `report.md` into `out`.

    Points that are in `results.jsonl` already are not simulated again, except the only one if it is
    to be recorded: `timeline` is the file for that.

    Raises:
        SimulationError, TraceError: the inputs are wrong; nothing was simulated.
        OSError: the directory cannot be written.
    """
    wanted = list(points(policies, _values(sweeps)))
    if timeline is not None and len(wanted) > 1:
        raise SimulationError("--timeline", "records one simulation: give one policy and no sweep")
    fleet = read_fleet(inputs.fleet)
    for point in wanted:
        sized = fleet if point.workers is None else fleet.of_size(point.workers)
        parse_policy(point.policy).workers(sized.workers)
    _check_trace(inputs, wanted, fleet)
    out.mkdir(parents=True, exist_ok=True)
    results = ResultFile(out / "results.jsonl", inputs.digest())
    if timeline is not None:
        _record(inputs, wanted[0], results, timeline)
    done = sum(point in results for point in wanted)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("simulate", total=len(wanted), completed=done)
        job = partial(simulate_point, inputs)
        run(job, wanted, results, processes, lambda _: bar.advance(task))
    found = results.ordered(wanted)
    markdown = as_markdown(rows(found), about(found, _command(inputs, policies, sweeps)))
    (out / "report.md").write_text(markdown)
    print(json.dumps(found) if as_json else markdown)


def _record(inputs: Inputs, point: Point, results: ResultFile, path: Path) -> None:
    """Simulate a point, and write its timeline."""
    path.touch()  # fails before the simulation, not after it
    recorded = Timeline()
    result = simulate_point(inputs, point, recorded)
    if point not in results:
        results.add(point, result)
    recorded.write(path)


def _values(sweeps: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    values: dict[str, Sequence[Any]] = {}
    for text in sweeps:
        name, listed = parse_sweep(text)
        if name in values:
            raise SimulationError("--sweep", "given twice", name)
        values[name] = listed
    return values


def _check_trace(inputs: Inputs, wanted: Sequence[Point], fleet: FleetSpec) -> None:
    """Raise now what the first simulation would raise."""
    trace = open_trace(inputs.trace, inputs.format)
    next(iter(trace), None)
    chunk_tokens_of(trace, fleet, fleet.model)
    for point in wanted:
        drawn = point.sharing is not None or not trace.starts_recorded
        if drawn and point.rate is None and point.population is None and point.speed is None:
            why = "sessions are drawn" if trace.starts_recorded else "no starts are recorded"
            problem = f"{why}: say when they start, with --sweep rate=... or population=..."
            raise SimulationError(trace.source, problem)
        point.workload.check(trace)
    if any(point.seed or point.sessions for point in wanted):
        _check_drawn(trace, [point.workload for point in wanted])


def _check_drawn(trace: Trace, workloads: Sequence[Workload]) -> None:
    """Raise SimulationError if the trace has too few sessions, or if two seeds would send the same
    sessions at the same times."""
    number, known = sum(1 for _ in trace), dict[tuple[Workload, int], int]()
    for workload in workloads:
        drawn = replace(workload, seed=0), workload.drawn(trace, number)
        seed = known.setdefault(drawn, workload.seed)
        if seed != workload.seed:
            problem = f"{seed} and {workload.seed} send the same sessions at the same times"
            advice = "give other seeds, or draw sessions with --sweep sharing= or population="
            raise SimulationError("--sweep", f"{problem}: {advice}", "seed")


def _command(inputs: Inputs, policies: Sequence[str], sweeps: Sequence[str]) -> str:
    words = ["heterocache simulate", "--trace", inputs.trace.name, "--fleet", inputs.fleet.name]
    words += ["--policies", ",".join(policies)]
    return " ".join([*words, *(f"--sweep {text}" for text in sweeps)])
