"""The campaign: every policy on recorded traces, against each other and against the oracle.

`python -m benchmarks.simulated_fleets --mooncake FILE --sessions FILE [--processes 2] [--quick]`

What is simulated stands in `simulated_studies`. Every simulation is one line of
`results/simulated_fleets-<date>.jsonl`, written when it is done: a campaign that was interrupted
goes on where it was, and `--from FILE` goes on with that of another day. The report, written next
to it, has the same tables as that of `heterocache simulate`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import RESULTS
from benchmarks.research.belady import belady_hits, policy_hits
from benchmarks.research.bound import oracle_result
from benchmarks.sessions_per_gpu import sessions_per_gpu
from benchmarks.simulated_studies import GPUS, ORACLE, STUDIES, Study, StudyPoint
from benchmarks.simulator import fleet_of
from hetero_connector.units import GIB
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.costs import COMPUTE, H200, derived_costs, roofline_of
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.state.chunks import chunk_runs
from ownership.simulator.state.memory import EVICTIONS
from ownership.simulator.sweeps.report import Row, about, as_markdown, as_table, rows, setting_of
from ownership.simulator.sweeps.running import RESULTS_FORMAT, ResultFile, run
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace

OVER_ORACLE = "task_wait_mean_s_over_oracle"
_KEPT = ("model", "caveats", "blocks")
"""A line of results has these parts of a result besides its figures."""
_CHUNK_TOKENS = 512
_MOST_POPULATION = 1_024
_REPLAYED = {"agents": 60, "mooncake": 6_000}
"""Sessions in the replay of eviction policies."""
_SHARES_OF_CACHE = (0.05, 0.2, 0.5)
"""Room in the replay of eviction policies, as shares of the distinct chunks."""

BY_NAME = {study.name: study for study in STUDIES}


def read(path: Path, number: int | None = None, *, arrivals: bool) -> Trace:
    """A trace in memory; `arrivals`: as recorded, else to be invented."""
    trace = open_trace(path)
    sessions = list(trace)[:number]
    return replace(
        trace, sessions=lambda: iter(sessions), starts_recorded=arrivals and trace.starts_recorded
    )


@cache
def trace_of(path: Path, *, arrivals: bool) -> Trace:
    """The trace of a study, read once in each process; `arrivals`: as recorded."""
    return read(path, arrivals=arrivals)


def fleet_for(study: Study, workers: int) -> FleetSpec:
    """H200 workers with the study's tiers."""
    fleet = fleet_of(study.model, workers, GPUS[study.model])
    sizes = {"dram": int(study.dram_gib * GIB), "ssd": int(study.ssd_gib * GIB)}
    tiered = (replace(w, capacity=replace(w.capacity, **sizes)) for w in fleet.workers)
    return replace(fleet, workers=tuple(tiered))


def simulated(paths: Mapping[str, Path], point: StudyPoint) -> dict[str, Any]:
    """One simulation of a study, or its bound."""
    study = BY_NAME[point.study]
    arrivals = study.trace == "agents" or point.speed is not None
    return result_of(study, trace_of(paths[study.trace], arrivals=arrivals), point)


def result_of(study: Study, trace: Trace, point: StudyPoint) -> dict[str, Any]:
    """One simulation of a trace that has been read, or the bound."""
    fleet = fleet_for(study, point.workers or 1)
    if point.costs is not None:
        fleet = with_costs(fleet, point.costs)
    if study.first_population is not None and point.population is None:
        return capacity_of(study, trace, point)
    if point.policy == ORACLE:
        found = oracle_result(point.policy, trace, fleet, point.workload)
    else:
        found = simulate(trace, fleet, parse_policy(point.policy), point.workload).as_json()
    figures = {name: float(f"{value:.6g}") for name, value in found["figures"].items()}
    return {**{name: found[name] for name in _KEPT if name in found}, "figures": figures}


def capacity_of(study: Study, trace: Trace, point: StudyPoint) -> dict[str, Any]:
    """The most sessions for each GPU whose requests keep the objectives."""
    found: dict[str, Any] = {}

    def share_at(population: int) -> float:
        found.update(result_of(study, trace, replace(point, population=population)))
        return float(found["figures"]["attained_share"])

    first, gpus = study.first_population or 1, GPUS[study.model]
    figures = sessions_per_gpu(share_at, gpus, first, _MOST_POPULATION)
    return {**{name: found[name] for name in ("model", "caveats")}, "figures": dict(figures)}


def with_costs(fleet: FleetSpec, changed: str) -> FleetSpec:
    """A fleet of which one coefficient is another; machines and policies have it."""
    name, _, text = changed.partition("=")
    model, gpus, factor = fleet.model_name, fleet.model.tp_size, float(text)
    roofline, hardware = roofline_of(H200, gpus, fleet.model, COMPUTE[model]), H200
    if hasattr(roofline, name):
        roofline = replace(roofline, **{name: factor * getattr(roofline, name)})
    else:
        link = f"{name}_bandwidth"
        hardware = replace(H200, **{link: getattr(H200, link) / factor})
    costs = derived_costs(hardware, gpus, fleet.model, roofline, fleet.limits.step_tokens)
    workers = (replace(worker, costs=costs, roofline=roofline) for worker in fleet.workers)
    return replace(fleet, workers=tuple(workers))


def over_oracle(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add a task's waiting over the oracle's of the same setting and seed.

    There is no such figure if a policy refused a request, because the bound is for all of them.
    """
    bounds = {_place(x): x["figures"] for x in found if x["point"]["policy"] == ORACLE}
    refused = {_row_of(x) for x in found if x["figures"].get("refused")}
    with_ratio = []
    for result in found:
        bound, figures = bounds.get(_place(result)), dict(result["figures"])
        if bound and _row_of(result) not in refused:
            figures[OVER_ORACLE] = figures["task_wait_mean_s"] / bound["task_wait_mean_s"]
        with_ratio.append({**result, "figures": figures})
    return with_ratio


def _place(result: Mapping[str, Any]) -> tuple[object, ...]:
    """Return everything of a point but its policy."""
    return setting_of(result["point"]), result["point"]["seed"]


def _row_of(result: Mapping[str, Any]) -> tuple[object, ...]:
    """Return everything of a point but its seed."""
    return setting_of(result["point"]), result["point"]["policy"]


def evictions(traces: Mapping[str, Trace], scale: float) -> list[str]:
    """Hits of each policy over MIN's, prompts in the order of the file."""
    lines = [
        "## Eviction against Belady's MIN", "",
        "Hit tokens over those of MIN, which no policy can exceed: prompts in the file's order, "
        "one tier, dense state. Room as a share of the distinct chunks.", "",
    ]  # fmt: skip
    cells = [["trace", "room", "hits of MIN", *EVICTIONS]]
    for name, trace in traces.items():
        chains = _in_order(trace, int(_REPLAYED[name] * scale))
        asked = sum(chain.num_blocks for chain in chains)
        distinct = len({chunk for chain in chains for chunk in chain.ids().tolist()})
        for share in _SHARES_OF_CACHE:
            room = int(share * distinct)
            best = belady_hits(chains, room)
            hits = [policy_hits(chains, room, e, _CHUNK_TOKENS) / max(1, best) for e in EVICTIONS]
            told = [f"{x:.3f}" for x in hits]
            cells.append([name, f"{share:.0%}", f"{best / asked:.1%}", *told])
    return [*lines, *as_table(cells), ""]


def _in_order(trace: Trace, sessions: int) -> list[BlockRuns]:
    """Prompts' chunks as recorded; sessions without a start half a minute apart."""
    per_chunk = _CHUNK_TOKENS // trace.block_tokens
    sent: list[tuple[float, BlockRuns]] = []
    for number, session in enumerate(islice(trace, sessions)):
        begun_s = 30.0 * number if session.start_s is None else session.start_s
        sent += ((begun_s + r.offset_s, chunk_runs(r.blocks, per_chunk)) for r in session.requests)
    sent.sort(key=lambda one: one[0])
    return [chain for _, chain in sent]


def points_of(studies: Iterable[Study], traces: Iterable[str], scale: float) -> list[StudyPoint]:
    """Every point of the studies whose traces are there."""
    known = set(traces)
    return [point for study in studies if study.trace in known for point in study.points(scale)]


def digest(paths: Mapping[str, Path]) -> str:
    """Hash what a line of results depends on besides its point: the traces and the format."""
    files = [(name, path.name, path.stat().st_size) for name, path in sorted(paths.items())]
    return sha256(f"{RESULTS_FORMAT} {files}".encode()).hexdigest()[:16]


def report(results: Sequence[Mapping[str, Any]], command: str) -> str:
    """All tables of a campaign."""
    table = rows(over_oracle(results))
    text = as_markdown(table, about(results, command), "Simulated fleets")
    lines = rankings(table)
    return text + "\n" + "\n".join(lines) if lines else text


def rankings(table: Sequence[Row]) -> list[str]:
    """The order of policies by a task's waiting, where costs were changed and where not."""
    waits: dict[Any, dict[str, float]] = {}
    for row in table:
        if "task_wait_mean_s" in row.figures:
            waits.setdefault(row.setting, {})[row.policy] = row.figures["task_wait_mean_s"]
    cells = [["costs", "rank correlation", "best policy"]]
    for setting, found in waits.items():
        place = dict(setting)
        base = waits.get(tuple(x for x in setting if x[0] != "costs"), {})
        if "costs" in place and base.keys() == found.keys():
            best = min(found, key=found.__getitem__)
            pair = [list(base.values()), [found[policy] for policy in base]]
            cells.append([place["costs"], f"{rank_correlation(*pair):.3f}", best])
    return ["## Ranking under other costs", "", *as_table(cells), ""] if cells[1:] else []


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's coefficient of values without ties."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (x, y)])
    return float(np.corrcoef(ranks)[0, 1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_fleets")
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--sessions", type=Path, help="the coding-agent sessions")
    parser.add_argument("--studies", help="some of them, as a,b; default: all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--from", dest="known", type=Path, help="go on with these results")
    parser.add_argument("--quick", action="store_true", help="a tenth of it; writes no results")
    arguments = parser.parse_args(argv)
    given = {"agents": arguments.sessions, "mooncake": arguments.mooncake}
    paths = {name: path for name, path in given.items() if path}
    chosen = arguments.studies.split(",") if arguments.studies else list(BY_NAME)
    if not paths or not {*chosen} <= {*BY_NAME}:
        parser.error(f"give a trace, and studies out of {', '.join(BY_NAME)}")
    scale = 0.1 if arguments.quick else 1.0
    wanted = points_of(map(BY_NAME.__getitem__, chosen), paths, scale)
    with tempfile.TemporaryDirectory() as directory:
        default = RESULTS / f"simulated_fleets-{time.strftime('%Y-%m-%d')}.jsonl"
        path = Path(directory) / "quick" if arguments.quick else arguments.known or default
        results = ResultFile(path, digest(paths))
        begun = time.monotonic()

        def tell(point: StudyPoint) -> None:
            elapsed_s = time.monotonic() - begun
            print(f"{elapsed_s:6.0f} s  {point.key}", file=sys.stderr, flush=True)

        run(partial(simulated, paths), wanted, results, arguments.processes, tell)
        found = results.ordered(wanted)
    words = [f"--{'sessions' if name == 'agents' else name} {p.name}" for name, p in paths.items()]
    words += [f"--studies {arguments.studies}"] if arguments.studies else []
    text = report(found, " ".join(["python -m benchmarks.simulated_fleets", *words]))
    if not arguments.studies:
        text += "\n" + "\n".join(
            evictions({n: read(p, arrivals=True) for n, p in paths.items()}, scale)
        )
    print(text)
    if not arguments.quick:
        path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
