"""Every policy on recorded traces, against the oracle.

`python -m benchmarks.simulated_fleets --mooncake FILE --sessions FILE [--quick] [--resume]`

Writes `results/simulated_fleets-<date>.md`, `.jsonl` (a line for each simulation) and a plot. What
is simulated stands in `simulated_studies`; sessions are subsampled so that all of it takes some
minutes of one core. Agent sessions are drawn with replacement and given Poisson starts; Mooncake's
requests keep their order and get Poisson arrivals, for only so are there seeds to draw. A run that
was interrupted goes on where it was with `--resume`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from benchmarks.plots import errorbars
from benchmarks.research.belady import belady_hits, policy_hits
from benchmarks.research.bound import oracle_result
from benchmarks.simulated_studies import GPUS, ORACLE, STUDIES, Study
from benchmarks.simulator import fleet_of
from hetero_connector.units import GIB
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.state.chunks import chunk_runs
from ownership.simulator.state.memory import EVICTIONS
from ownership.simulator.sweeps.report import Estimate, Row, rows
from ownership.simulator.sweeps.running import Point
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace

_KEPT = (
    "requests", "refused", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "step_p95_s", "task_mean_s",
    "task_wait_mean_s", "task_wait_mean_alone_s", "task_wait_p95_s", "prompt_tokens",
    "saved_tokens", "duplicate_factor",
    "network_bytes", "ssd_read_bytes",
    "ssd_written_bytes", "owner_hit_rate", "busy_share", "hbm_gib_per_session",
    "decode_late_share", "token_mean_s",
)  # fmt: skip
OVER_ORACLE = "task_wait_mean_s_over_oracle"
_CHUNK_TOKENS = 512
_REPLAYED = {"agents": 60, "mooncake": 6_000}
"""Sessions in the replay of eviction policies."""
_SHARES_OF_CACHE = (0.05, 0.2, 0.5)
"""Room in the replay of eviction policies, as shares of the distinct chunks."""


def read(path: Path, number: int | None = None, *, arrivals: bool) -> Trace:
    """A trace in memory; `arrivals`: as recorded, else to be invented."""
    trace = open_trace(path)
    sessions = list(trace)[:number]
    return replace(
        trace, sessions=lambda: iter(sessions), starts_recorded=arrivals and trace.starts_recorded
    )


def fleet_for(study: Study, workers: int) -> FleetSpec:
    """H200 workers with the study's tiers."""
    fleet = fleet_of(study.model, workers, GPUS[study.model])
    sizes = {"dram": int(study.dram_gib * GIB), "ssd": int(study.ssd_gib * GIB)}
    tiered = (replace(w, capacity=replace(w.capacity, **sizes)) for w in fleet.workers)
    return replace(fleet, workers=tuple(tiered))


def result_of(study: Study, trace: Trace, point: Point) -> dict[str, Any]:
    """One simulation, or the bound."""
    fleet = fleet_for(study, point.workers or 1)
    if point.policy == ORACLE:
        found = oracle_result(point.policy, trace, fleet, point.workload)
    else:
        found = simulate(trace, fleet, parse_policy(point.policy), point.workload).as_json()
    figures = {name: found["figures"][name] for name in _KEPT if name in found["figures"]}
    rounded = {name: float(f"{value:.6g}") for name, value in figures.items()}
    return {"study": study.name, "point": asdict(point), "figures": rounded}


def simulated(
    studies: Sequence[Study],
    traces: Mapping[str, Trace],
    scale: float,
    known: Mapping[tuple[str, Point], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Every simulation of every study whose trace is there, those that are known not again."""
    for study in studies:
        if study.trace not in traces:
            continue
        begun = time.process_time()
        for point in study.points(scale):
            found = known.get((study.name, point))
            yield found or result_of(study, traces[study.trace], point)
        print(f"{study.name}: {time.process_time() - begun:.0f} s", flush=True)


def read_results(path: Path) -> dict[tuple[str, Point], dict[str, Any]]:
    """Read the results of an interrupted run, without the line that it was writing."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    results = [json.loads(line) for line in lines]
    return {(result["study"], Point(**result["point"])): result for result in results}


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


def _place(result: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return everything of a point but its policy."""
    return tuple((n, v) for n, v in sorted(result["point"].items()) if n != "policy")


def _row_of(result: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return everything of a point but its seed."""
    return tuple((n, v) for n, v in sorted(result["point"].items()) if n != "seed")


def study_as_markdown(study: Study, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each setting."""
    lines = [f"## {study.name}: {study.trace}, {study.model}", ""]
    table = rows(over_oracle(found))
    for setting in dict.fromkeys(row.setting for row in table):
        lines += [", ".join(f"{name} {value:g}" for name, value in setting), ""]
        lines += [
            "| policy | TTFT mean, s | TTFT p95, s | waiting of a task, s | over oracle | saved | "
            "network, GiB | to SSD, GiB | copies | owner hits |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [_line(row) for row in table if row.setting == setting]
        lines.append("")
    return lines


def _line(row: Row) -> str:
    found = row.figures
    saved = found["saved_tokens"].mean / found["prompt_tokens"].mean
    refused = "refused" in found and found["refused"].mean > 0.0
    over = found.get(OVER_ORACLE)
    cells = [
        f"{row.policy} (refused some)" if refused else row.policy,
        _told(found["ttft_mean_s"], 3),
        _told(found["ttft_p95_s"], 2),
        _told(found["task_wait_mean_s"], 2),
        _told(over, 3) if over else "-",
        f"{saved:.1%}",
    ]
    if row.policy != ORACLE:
        cells += [
            _told(found["network_bytes"], 0, 1 / GIB),
            _told(found["ssd_written_bytes"], 0, 1 / GIB),
            _told(found["duplicate_factor"], 2),
            f"{found['owner_hit_rate'].mean:.1%}",
        ]
    return f"| {' | '.join(cells)} |"


def _told(estimate: Estimate, digits: int, scale: float = 1.0) -> str:
    return f"{scale * estimate.mean:,.{digits}f} ± {scale * estimate.half:,.{digits}f}"


def evictions(traces: Mapping[str, Trace], scale: float) -> list[str]:
    """Hits of each policy over MIN's, prompts in the order of the file."""
    lines = [
        "## Eviction against Belady's MIN", "",
        "Hit tokens over those of MIN, which no policy can exceed: prompts in the file's order, "
        "one tier, dense state. Room as a share of the distinct chunks.", "",
        f"| trace | room | hits of MIN | {' | '.join(EVICTIONS)} |",
        f"| --- | ---: | ---: |{' ---: |' * len(EVICTIONS)}",
    ]  # fmt: skip
    for name, trace in traces.items():
        chains = _in_order(trace, int(_REPLAYED[name] * scale))
        asked = sum(chain.num_blocks for chain in chains)
        distinct = len({chunk for chain in chains for chunk in chain.ids().tolist()})
        for share in _SHARES_OF_CACHE:
            room = int(share * distinct)
            best = belady_hits(chains, room)
            hits = [policy_hits(chains, room, e, _CHUNK_TOKENS) / max(1, best) for e in EVICTIONS]
            told = " | ".join(f"{x:.3f}" for x in hits)
            lines.append(f"| {name} | {share:.0%} | {best / asked:.1%} | {told} |")
    return [*lines, ""]


def _in_order(trace: Trace, sessions: int) -> list[BlockRuns]:
    """Prompts' chunks as recorded; sessions without a start half a minute apart."""
    per_chunk = _CHUNK_TOKENS // trace.block_tokens
    sent: list[tuple[float, BlockRuns]] = []
    for number, session in enumerate(islice(trace, sessions)):
        begun_s = 30.0 * number if session.start_s is None else session.start_s
        sent += ((begun_s + r.offset_s, chunk_runs(r.blocks, per_chunk)) for r in session.requests)
    sent.sort(key=lambda one: one[0])
    return [chain for _, chain in sent]


def plot(name: str, found: Sequence[Mapping[str, Any]]) -> Path:
    """Task time over the oracle's, and what is moved, over rate and size."""
    panels = []
    for study, swept in (
        ("agents-rate", "rate"), ("agents-workers", "workers"), ("mooncake-rate", "rate"),
        ("mooncake-workers", "workers"),
    ):  # fmt: skip
        curves: dict[str, list[tuple[float, float, float]]] = {}
        for row in rows(over_oracle([x for x in found if x["study"] == study])):
            over = row.figures.get(OVER_ORACLE)
            if over and row.policy != ORACLE:
                place = dict(row.setting)[swept]
                curves.setdefault(row.policy, []).append((place, *over))
        if curves:
            panels.append((study, swept, "waiting of a task over oracle", curves))
    return errorbars(name, panels)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_fleets")
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--sessions", type=Path, help="the coding-agent sessions")
    parser.add_argument("--resume", action="store_true", help="go on with today's results")
    parser.add_argument("--quick", action="store_true", help="a tenth of it; writes no results")
    arguments = parser.parse_args(argv)
    traces = {}
    if arguments.sessions:
        traces["agents"] = read(arguments.sessions, arrivals=True)
    if arguments.mooncake:
        traces["mooncake"] = read(arguments.mooncake, arrivals=False)
    scale = 0.1 if arguments.quick else 1.0
    stem = f"simulated_fleets-{time.strftime('%Y-%m-%d')}"
    results = RESULTS / f"{stem}.jsonl"
    known = read_results(results) if arguments.resume else {}
    found = []
    with open(os.devnull if arguments.quick else results, "w") as file:
        for result in simulated(STUDIES, traces, scale, known):
            found.append(result)
            file.write(f"{json.dumps(result)}\n")
            file.flush()
    lines = ["# Simulated fleets", ""]
    for study in STUDIES:
        mine = [result for result in found if result["study"] == study.name]
        lines += study_as_markdown(study, mine) if mine else []
    lines += evictions(traces, scale)
    text = "\n".join(lines)
    print(text)
    if not arguments.quick:
        (RESULTS / f"{stem}.md").write_text(text)
        print(f"written: {plot('simulated_fleets', found)}")


if __name__ == "__main__":
    main()
