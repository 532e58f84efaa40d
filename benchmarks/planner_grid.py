"""`python -m benchmarks.planner_grid [--json]`: planned restores against fixed policies.

A grid on the real engine: model x prompt length x tier (DRAM, or an SSD slowed to a bandwidth) x
other work of the engine. In every cell the same prompt is served by turns with nothing restored
(never), everything restored (always), as planned, and up to boundaries in between (cut). The cost
model learns online, from the earlier runs.

- `worst_cell_over_best`: planned TTFT divided by that of the better of never and always, at the
  median of the worst cell. It is a median of ratios, each within one turn, because the machine
  drifts, and because a load that ends just before or just after a step of running decodes makes two
  clusters of times.
- `worst_choice_over_best`: the same, over the cells in which the planner in most turns chose
  differently from the better of never and always; 1 if there are none. `worst_alike`: over the
  other cells, where it shows how much two equal requests differ on this machine.
- `surely_over`: the number of cells in which that median is above its goal with 95 % confidence (a
  sign test for each cell). On a busy machine some of a hundred medians are above by chance.
- `geomean_over_single`: geometric mean over the cells of planned TTFT, divided by that of the
  better single policy.
- `geomean_limit`: the same for the best policy of each cell, which planning cannot beat on this
  grid. If it is above that goal, no planner can reach it.
- `regret_p95`: planned TTFT divided by that of the best policy, by turns, minus 1, at the 95th
  percentile of cells.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine_process import EngineProcess, prompt_tokens
from benchmarks.goals import GOALS, goal_table, is_met
from benchmarks.measure import is_default, machine_line, percentile, publish, rounded, table
from benchmarks.planned_engine import CUTS, PlannedEngine

_MODELS = {
    "dense": (320, 1088, 4000, 16000),
    "dense-bench": (320, 1088, 4000),
    "dense-wide": (320, 1088, 4000),
    "gemma3": (320, 1088, 4000),
}
_BANDWIDTHS = (None, 2.5e9, 0.5e9, 0.1e9)
"""Bytes a second of the SSD; None: the state is in DRAM."""
_DECODES = (0, 2)
_SINGLE_POLICIES = ("never", "always")
_COMPARED = (*_SINGLE_POLICIES, "planned")
_CUTS = tuple(f"cut {share:g}" for share in CUTS)
_POLICIES = (*_COMPARED, *_CUTS)
_COMPARED_S, _CUT_S = 0.8, 0.4
"""Seconds that a policy runs in a cell. Short times vary by half, so they need many turns."""
_MOST_TURNS = 60
_FEWEST_TURNS = 5
_CUT_TURNS = 2
"""Fewest turns of a cut."""


class Cell(NamedTuple):
    """One point of the grid."""

    model: str
    tokens: int
    bandwidth: float | None
    decodes: int

    @property
    def place(self) -> str:
        return "DRAM" if self.bandwidth is None else f"SSD {self.bandwidth / 1e9:g} GB/s"


@dataclass(frozen=True)
class Measured:
    """The TTFT in a cell by policy, and the planner's choices."""

    cell: Cell
    turns: Mapping[str, Sequence[float]]
    """Seconds, turn by turn; those of a turn were measured next to each other."""
    resumed: Mapping[str, int]
    """Tokens that each policy did not compute, in most of its turns."""

    def seconds(self, policy: str) -> float:
        """The median of a policy; `best`: of the fastest policy in this cell."""
        if policy == "best":
            return min(map(statistics.median, self.turns.values()))
        return statistics.median(self.turns[policy])

    def planned_over(self, policies: Sequence[str]) -> float:
        """Planned divided by the best of these policies, at the median of their common turns."""
        return max(statistics.median(self._ratios(policy)) for policy in policies)

    @property
    def is_surely_over(self) -> bool:
        """True if the median is above the goal with 95 % confidence."""
        least = max(median_at_least(self._ratios(policy)) for policy in _SINGLE_POLICIES)
        return not is_met(least, GOALS["planner_grid"]["worst_cell_over_best"])

    def _ratios(self, policy: str) -> list[float]:
        """Planned divided by a policy, turn by turn."""
        pairs = zip(self.turns["planned"], self.turns[policy], strict=False)
        return [planned_s / other_s for planned_s, other_s in pairs]

    @property
    def over_best_single(self) -> float:
        return self.planned_over(_SINGLE_POLICIES)

    @property
    def is_alike(self) -> bool:
        """True if the planner chose the same as the better of never and always."""
        better = min(_SINGLE_POLICIES, key=self.seconds)
        return self.resumed["planned"] == self.resumed[better]

    @property
    def regret(self) -> float:
        return self.planned_over(_POLICIES) - 1


def measure(model: str, lengths: tuple[int, ...], directory: Path, repeats: int) -> list[Measured]:
    """Measure every cell of one model, in one engine."""
    extra: dict[str, Any] = {
        "dram_gib": 1.0, "ssd_dir": str(directory), "ssd_gib": 1.0, "planner": "cost",
    }  # fmt: skip
    longest = max(lengths)
    measured = []
    with EngineProcess(model, extra, PlannedEngine, max_model_len=longest + 348) as engine:
        prompts = {n: prompt_tokens(n, seed=n) for n in lengths}
        for bandwidth in _BANDWIDTHS:
            engine.call("throttle", bandwidth)
            _teach(engine, prompts)
            for tokens in lengths:
                for decodes in _DECODES:
                    cell = Cell(model, tokens, bandwidth, decodes)
                    measured.append(_measure_cell(engine, cell, prompts[tokens], repeats))
                    print(_row(measured[-1]), file=sys.stderr, flush=True)
    return measured


def _teach(engine: EngineProcess, prompts: Mapping[int, list[int]]) -> None:
    """Let the cost model learn: compute and restore each length a few times."""
    for _ in range(3):
        for prompt in prompts.values():
            for policy in ("never", "always"):
                engine.call("serve", prompt, policy, 0)


def _measure_cell(engine: EngineProcess, cell: Cell, prompt: list[int], repeats: int) -> Measured:
    """Measure the policies by turns, each as often as it needs."""
    times: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    resumed: dict[str, list[int]] = {policy: [] for policy in _POLICIES}
    order = random.Random(repr(cell))
    for _ in range(_MOST_TURNS):
        # In random order, so that no policy always follows the same one.
        for policy in order.sample(_POLICIES, len(_POLICIES)):
            least, enough_s = (_CUT_TURNS, _CUT_S) if policy in _CUTS else (repeats, _COMPARED_S)
            if len(times[policy]) >= least and sum(times[policy]) > enough_s:
                continue  # and never again, so that the turns of a policy have no gaps
            ttft_s, cached = engine.call("serve", prompt, policy, cell.decodes)
            times[policy].append(ttft_s)
            resumed[policy].append(cached)
    return Measured(cell, times, {p: statistics.mode(tokens) for p, tokens in resumed.items()})


def figures_of(measured: list[Measured]) -> dict[str, float]:
    """Return all figures of the grid."""
    alike = [m.over_best_single for m in measured if m.is_alike]
    chosen = [m.over_best_single for m in measured if not m.is_alike]
    return rounded(
        {
            "worst_cell_over_best": max(m.over_best_single for m in measured),
            "surely_over": sum(m.is_surely_over for m in measured),
            "worst_choice_over_best": max(chosen, default=1.0),
            "worst_alike": max(alike, default=1.0),
            "geomean_over_single": geomean_over_single(measured, "planned"),
            "geomean_limit": geomean_over_single(measured, "best"),
            "regret_p95": percentile([m.regret for m in measured], 0.95),
        }
    )


def median_at_least(samples: Sequence[float], doubt: float = 0.05) -> float:
    """Return a lower bound of the median with confidence 1 - `doubt`, by the sign test.

    0 if there are too few samples.
    """
    below, chance, count = -1, 0.0, len(samples)
    while (chance := chance + math.comb(count, below + 1) / 2**count) <= doubt:
        below += 1
    return sorted(samples)[below] if below >= 0 else 0.0


def geomean_over_single(measured: Sequence[Measured], policy: str) -> float:
    """Return the geometric mean of a policy's TTFT, divided by the better single policy's."""

    def geomean(policy: str) -> float:
        return math.exp(statistics.fmean(math.log(m.seconds(policy)) for m in measured))

    return geomean(policy) / min(map(geomean, _SINGLE_POLICIES))


def _row(measured: Measured) -> str:
    times = "  ".join(f"{p} {1e3 * measured.seconds(p):.1f}" for p in _POLICIES)
    return f"{measured.cell}: {times}; resumed at {measured.resumed['planned']}"


def _report(measured: list[Measured], figures: Mapping[str, float]) -> str:
    header = ["TTFT, ms", "tokens", "state in", "decodes", *_POLICIES, "resumed", "over best"]
    rows = [
        [
            m.cell.model, m.cell.tokens, m.cell.place, m.cell.decodes,
            *(f"{1e3 * m.seconds(p):.1f}" for p in _POLICIES), m.resumed["planned"],
            f"{m.over_best_single:.2f}",
        ]
        for m in measured
    ]  # fmt: skip
    shares = []
    for model in dict.fromkeys(m.cell.model for m in measured):
        cells = [m for m in measured if m.cell.model == model]
        ratios = (geomean_over_single(cells, policy) for policy in ("planned", "best"))
        shares.append([model, *(f"{ratio:.3f}" for ratio in ratios)])
    return "\n\n".join(
        [
            f"{machine_line()}; medians",
            table(header, rows),
            table(["geomean over single", "planned", "limit"], shares),
            goal_table("planner_grid", figures),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner_grid", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--repeats", type=int, default=6, help="turns at least, per cell")
    parser.add_argument("--model", choices=list(_MODELS), help="this one only")
    arguments = parser.parse_args()
    if arguments.repeats < _FEWEST_TURNS:
        parser.error(f"{_FEWEST_TURNS} turns at least are needed for 95 % confidence")
    parent = Path.cwd() / ".cache"
    parent.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="planner-grid-", dir=parent))
    chosen = {m: n for m, n in _MODELS.items() if arguments.model in (None, m)}
    measured: list[Measured] = []
    try:
        for model, lengths in chosen.items():
            measured += measure(model, lengths, scratch / model, arguments.repeats)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    figures = figures_of(measured)
    text = _report(measured, figures)
    cells = [
        {
            **m.cell._asdict(),
            **{policy: m.seconds(policy) for policy in _POLICIES},
            "over_best_single": m.over_best_single,
            "turns": len(m.turns["planned"]),
            "resumed": m.resumed,
        }
        for m in measured
    ]
    write = is_default(parser, arguments, free=("json",))
    publish("planner_grid", text, figures, {"cells": cells}, as_json=arguments.json, write=write)


if __name__ == "__main__":
    main()
