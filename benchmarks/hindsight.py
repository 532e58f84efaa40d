"""`python -m benchmarks.hindsight --mooncake FILE --sessions FILE`: what placement can win.

For a few requests on four workers, it prints the waiting of tasks under `ownerserve`, with other
weights of its prices, and after a search that knows the future has changed placements
(`research/hindsight.py`), next to the lower bound. The search's result is a schedule of the same
engines; a better one may exist. Results are written with both traces only.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.measure import publish, rounded, table
from benchmarks.research.bound import oracle_result
from benchmarks.research.hindsight import Hindsight, Outcome
from benchmarks.simulated_fleets import fleet_for, read
from benchmarks.simulated_studies import STUDIES
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.step_pricing import Route
from ownership.scheduling.weights import PlacementWeights
from ownership.simulator.simulate import chunk_tokens_of
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

_WORKERS = 4
_STALLS = (0.1, 0.6, 1.0)
"""mu, instead of the default."""


@dataclass(frozen=True)
class Case:
    """A trace's first sessions at a rate."""

    study: str
    rate: float
    sessions: int
    seed: int
    tries: int


_COPY = 1.0
"""With copies at what is best for times alone: only those are searched for."""
_TRIES = {1.7: 250, 3.3: 400, 4.2: 600}
"""By the rate: where engines are busier there is more to win."""
CASES = (
    *(Case("mooncake-rate", r, 150, seed, n) for r, n in _TRIES.items() for seed in (0, 1)),
    Case("agents-dense", 0.1, 6, 0, 100),
)


def measured(case: Case, recorded: Trace) -> dict[str, Any]:
    """One case: the bound, `ownerserve`, other weights, and the search."""
    study = next(study for study in STUDIES if study.name == case.study)
    fleet = fleet_for(study, _WORKERS)
    sharing = study.settings[0].sharing
    sent = Workload(case.rate, sharing, case.sessions, case.seed)
    trace = sent.trace(recorded)
    bound = oracle_result("oracle", recorded, fleet, sent)["figures"]
    ownerserve = OwnerServe(weights=PlacementWeights(copy=_COPY))
    search = Hindsight(trace, fleet, chunk_tokens_of(trace, fleet, fleet.model))
    begun = search.outcome({}, ownerserve)
    weighed = {
        f"wait_stall_{stall:g}_s": search.outcome(
            {}, OwnerServe(weights=PlacementWeights(stall=stall, copy=_COPY))
        ).wait_s
        for stall in _STALLS
    }
    found = search.improved(begun, ownerserve, case.tries, Random(case.seed))
    best = found.best
    elsewhere = sum(best.placed[turn] != route for turn, route in begun.placed.items())
    figures = {
        "requests": len(begun.placed),
        "bound_s": bound["task_wait_mean_s"],
        "wait_s": begun.wait_s,
        **weighed,
        "found_s": best.wait_s,
        "elsewhere": elsewhere / len(begun.placed),
        **{f"before_{name}": value for name, value in _told(begun).items()},
        **{f"after_{name}": value for name, value in _told(best).items()},
    }
    return {
        "case": f"{study.trace} {case.rate:g}/s, seed {case.seed}",
        **rounded(figures),
        "tried": dict(found.tried),
        "kept": dict(found.kept),
    }


def _told(outcome: Outcome) -> dict[str, float]:
    routes = Counter(map(_kind, outcome.placed.values()))
    kinds = {kind: routes[kind] / len(outcome.placed) for kind in ("local", "fetch", "remote")}
    return {"ttft_s": outcome.ttft_s, "late_share": outcome.late_share, **kinds}


def _kind(route: Route) -> str:
    if route.prefill != route.decode:
        return "remote"
    return "local" if route.source is None else "fetch"


def all_measured(cases: Sequence[Case], traces: Mapping[str, Trace]) -> Iterator[dict[str, Any]]:
    """Every case whose trace is there."""
    of = {study.name: study.trace for study in STUDIES}
    for case in cases:
        if of[case.study] in traces:
            begun = time.process_time()
            found = measured(case, traces[of[case.study]])
            yield found
            print(f"{found['case']}: {time.process_time() - begun:.0f} s", flush=True)


def as_table(found: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case."""
    header = [
        "case", "requests", "bound, s", "ownerserve", *(f"mu {x:g}" for x in _STALLS), "found",
        "of it won", "over bound", "elsewhere", "late", "then", "TTFT, s", "then",
    ]  # fmt: skip
    lines = []
    for one in found:
        wait_s, best_s = one["wait_s"], one["found_s"]
        lines.append([
            one["case"], f"{one['requests']:.0f}", f"{one['bound_s']:.2f}", f"{wait_s:.2f}",
            *(f"{one[f'wait_stall_{x:g}_s']:.2f}" for x in _STALLS), f"{best_s:.2f}",
            f"{1 - best_s / wait_s:.1%}", f"{best_s / one['bound_s']:.2f}",
            f"{one['elsewhere']:.0%}",
            f"{one['before_late_share']:.0%}", f"{one['after_late_share']:.0%}",
            f"{one['before_ttft_s']:.2f}", f"{one['after_ttft_s']:.2f}",
        ])  # fmt: skip
    return table(header, lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hindsight")
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--sessions", type=Path, help="the coding-agent sessions")
    parser.add_argument("--quick", action="store_true", help="few tries; writes no results")
    arguments = parser.parse_args(argv)
    traces = {}
    if arguments.mooncake:
        most = max(case.sessions for case in CASES)
        traces["mooncake"] = read(arguments.mooncake, most, arrivals=False)
    if arguments.sessions:
        traces["agents"] = read(arguments.sessions, arrivals=True)
    cases = CASES
    if arguments.quick:
        cases = tuple(Case(c.study, c.rate, c.sessions, c.seed, 20) for c in CASES)
    gc.freeze()
    found = list(all_measured(cases, traces))
    text = as_table(found)
    ratios = {one["case"]: one["found_s"] / one["wait_s"] for one in found}
    write = bool(arguments.mooncake and arguments.sessions) and not arguments.quick
    publish("hindsight", text, rounded(ratios), {"cases": found}, as_json=False, write=write)


if __name__ == "__main__":
    main()
