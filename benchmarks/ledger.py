"""`python -m benchmarks.ledger --mooncake FILE --sessions FILE [--json]`: what a router must know.

The default policy on recorded traces by what its routers know: the ledger of what they sent and
saw, loads as last reported, several routers, late or wrong knowledge of the prefixes that workers
hold, ends of sessions guessed by a fixed time. Each figure is the waiting of a task over that of an
exact view with the same seed, the median over the seeds. Results are written with both
traces only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measure import machine_line, publish, rounded, table
from benchmarks.simulated_fleets import BY_NAME, fleet_for, trace_of
from hetero_connector.planner.sessions import EARLY, LATE, ReturnWindow, ThinkTimes
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

SEEDS = (0, 1, 2)
POLICY = "ownerserve"
EXACT = "+view=exact"
ONE_ROUTER = {
    "ledger": "",
    "ledger, reports each second": "+reports=1",
    "reports each 0.1 s": "+view=reports+reports=0.1",
    "reports each 0.3 s": "+view=reports+reports=0.3",
    "reports each second": "+view=reports+reports=1",
    "reports each second, 1 s late": "+view=reports+reports=1+report_lag=1",
}
MORE_ROUTERS = {
    "2 routers": "+routers=2",
    "2 routers, reports each second": "+routers=2+reports=1",
    "2 routers, reports each second, half lost": "+routers=2+reports=1+lost_reports=0.5",
    "2 routers, deltas after 50 ms": "+routers=2+deltas=0.05",
    "4 routers, deltas after 50 ms": "+routers=4+deltas=0.05",
}
PREFIXES = {
    **{f"prefixes {lag:g} s late": f"+prefix_lag={lag:g}" for lag in (0.01, 0.1, 1.0, 3.0)},
    **{f"{share:.0%} of the prefixes wrong": f"+wrong_prefixes={share:g}" for share in (0.02, 0.1)},
    "every prefix wrong": "+wrong_prefixes=1",
}
GUESSES_S = (30.0, 300.0)
"""Seconds for which a session is expected back if its end is guessed."""


@dataclass(frozen=True)
class Case:
    """A trace on a fleet."""

    name: str
    study: str
    workers: int
    rate: float
    sessions: int
    sharing: float | None = None


CASES = (
    Case("chat, 4 workers", "mooncake-rate", 4, 3.3, 2_000),
    Case("chat, 16 workers", "mooncake-rate", 16, 13.28, 2_000),
    Case("agents, 2 workers", "agents-rate", 2, 0.8, 50, 0.5),
)


class FixedReturn(ThinkTimes):
    """Expects every session back for a fixed time, as if its end could not be learned."""

    seconds = 0.0
    """The time; each guess is a class of its own."""

    def on_turn_end(
        self, key: Hashable, now_s: float, hint_s: float | None = None
    ) -> ReturnWindow | None:
        super().on_turn_end(key, now_s, hint_s)
        return ReturnWindow(now_s, now_s + self.seconds, LATE - EARLY)


def simulated(case: Case, trace: Trace, seed: int, scale: float) -> Iterator[tuple[str, float]]:
    """Yield the waiting of a task by what its routers know, over that of the exact view."""
    fleet = fleet_for(BY_NAME[case.study], case.workers)
    number = max(4, int(scale * case.sessions))
    workload = Workload(case.rate, case.sharing, number, seed)

    def wait_s(options: str) -> float:
        result = simulate(trace, fleet, parse_policy(POLICY + options), workload)
        return result.figures.task_wait_mean_s

    exact_s = wait_s(EXACT)
    for name, options in {**ONE_ROUTER, **MORE_ROUTERS, **PREFIXES}.items():
        yield name, wait_s(options) / exact_s
    for seconds in GUESSES_S:
        guess = type("Guess", (FixedReturn,), {"seconds": seconds})
        with patch("ownership.scheduling.ledger.ThinkTimes", guess):
            yield f"ledger, sessions expected for {seconds:g} s", wait_s("") / exact_s


def ratios_of(paths: Mapping[str, Path], scale: float, job: tuple[Case, int]) -> dict[str, float]:
    """Return the ratios of one case with one seed."""
    case, seed = job
    name = BY_NAME[case.study].trace
    return dict(simulated(case, trace_of(paths[name], arrivals=name == "agents"), seed, scale))


def measure(
    paths: Mapping[str, Path], seeds: Sequence[int], scale: float, processes: int
) -> dict[tuple[str, str], list[float]]:
    """Return the ratios of all seeds by case and by what routers know."""
    cases = [case for case in CASES if BY_NAME[case.study].trace in paths]
    jobs = list(product(cases, seeds))
    found: dict[tuple[str, str], list[float]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        results = pool.map(partial(ratios_of, paths, scale), jobs)
        for (case, _), ratios in zip(jobs, results, strict=True):
            for name, ratio in ratios.items():
                found.setdefault((case.name, name), []).append(ratio)
    return found


def figures_of(ratios: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, float]:
    """Return the medians by names that are keys of JSON."""
    return {f"{case}: {name}": statistics.median(values) for (case, name), values in ratios.items()}


def report(ratios: Mapping[tuple[str, str], Sequence[float]], seeds: int) -> str:
    """Return the tables as text."""
    lines = [machine_line(), "", f"Waiting of a task over an exact view: median of {seeds} seeds"]
    lines += ["(least to most)", ""]
    cases = list(dict.fromkeys(case for case, _ in ratios))
    names = list(dict.fromkeys(name for _, name in ratios))
    rows: list[list[Any]] = [
        [
            name,
            *(
                f"{statistics.median(x):.3f} ({min(x):.3f} to {max(x):.3f})"
                for x in (ratios[case, name] for case in cases)
            ),
        ]
        for name in names
    ]
    lines.append(table(["what routers know", *cases], rows))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger")
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--sessions", type=Path, help="the coding-agent sessions")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="a tenth of it; writes no results")
    arguments = parser.parse_args(argv)
    given = {"mooncake": arguments.mooncake, "agents": arguments.sessions}
    paths = {name: path for name, path in given.items() if path is not None}
    seeds = SEEDS[:1] if arguments.quick else SEEDS
    scale = 0.1 if arguments.quick else 1.0
    ratios = measure(paths, seeds, scale, arguments.processes)
    figures = rounded(figures_of(ratios))
    details = {f"{case}: {name}": values for (case, name), values in ratios.items()}
    text = report(ratios, len(seeds))
    write = len(paths) == len(given) and not arguments.quick
    publish("ledger", text, figures, details, as_json=arguments.json, write=write)


if __name__ == "__main__":
    main()
