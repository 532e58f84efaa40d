"""`python -m benchmarks.scheduling [--json]`: what a scheduling decision takes.

`decision_us_64`: microseconds of one decision of the default policy over 64 workers, placement
included; median, the worst of all step classes. Goal <= 200. Before each decision the loads of
two workers change, as they do in a router and in a simulator; eight workers hold some of the
prompt, and the network between workers is uneven. References from the same run: the policy that
only looks for the least loaded worker, and adding two arrays of 64 numbers, of which a decision
is some hundred.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.measure import machine_line, rounded, save, table, timed
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.spec.presets import PRESETS
from ownership.scheduling import (
    POLICIES,
    FleetView,
    Link,
    Placement,
    SchedulingPolicy,
    StateFootprint,
    Step,
    StepClass,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
    scheduling_policy,
)

MODEL = "deepseek-v4-flash"
SIZES = (1, 8, 64)
GOAL_US = 200.0
_HOLDERS = 8
_TOKENS = 60_000
_ADDITIONS = 1_000


@dataclass(frozen=True)
class Timing:
    """Microseconds of a decision, median."""

    policy: str
    workers: int
    step_class: str
    linked: bool
    decision_us: float


def some_load(rng: random.Random) -> WorkerLoad:
    decodes = rng.randrange(64)
    return WorkerLoad(
        rng.randrange(20_000), rng.randrange(8), decodes, decodes * 20_000,
        rng.randrange(60 << 30), 20.0, rng.randrange(1 << 28), 0, rng.randrange(1 << 28),
    )  # fmt: skip


def fleet_of(count: int, linked: bool, rng: random.Random) -> FleetView:
    """H200-like: 100,000 tokens a second, 80 GiB for pages."""
    model = PRESETS[MODEL]()
    footprint = StateFootprint.of(ArtifactLayout(model, model.default_chunk_tokens()))
    compute = ComputeRegression(ComputeCoefficients(5e-3, 1e-5, 1e-10))
    costs = CostModel(compute, LoadModel(model.state_types), step_tokens=8_192)
    names = [f"worker-{i:03}" for i in range(count)]
    workers = [WorkerView(name, costs, 80 << 30, load=some_load(rng)) for name in names]
    links = {(a, b): Link(1e-4, 1e-10) for a in names for b in names} if linked else None
    return FleetView(footprint, workers, links)


def steps(fleet: FleetView) -> dict[StepClass, Step]:
    """One of each class; the first workers hold less and less of it."""
    owner = fleet.names[0]
    known = _TOKENS - 10_000
    spread = fleet.names[:_HOLDERS]
    held = {
        x: WorkerPrefix(known // (i + 2), known // (i + 1), known) for i, x in enumerate(spread)
    }
    cold = {x: WorkerPrefix(0, 0, known) for x in spread}
    made = {
        StepClass.NEW_LONG_PREFIX: Step(_TOKENS, held, output_tokens=300.0),
        StepClass.INCREMENTAL_TURN: Step(known + 700, held, "s", owner, known, 300.0),
        StepClass.LONG_TOOL_OUTPUT: Step(_TOKENS, held, "s", owner, known, 300.0, True),
        StepClass.DECODE_CONTINUATION: Step(known + 8, held, "s", owner, known, 300.0),
        StepClass.FORKED_ROLLOUT: Step(_TOKENS, held, "s", owner, known, 300.0, forked=True),
        StepClass.COLD_RESUME: Step(_TOKENS, cold, "s", owner, known, 300.0),
    }
    return made


def measure(
    policy: str, workers: int, repeats: int, linked: bool = False, seed: int = 1
) -> list[Timing]:
    """One policy over one fleet, every class of step."""
    rng = random.Random(seed)
    fleet = fleet_of(workers, linked, rng)
    chosen = scheduling_policy(policy, rng)
    timings = []
    for step_class, step in steps(fleet).items():
        samples = []
        for _ in range(repeats + 1):
            for _ in range(2):
                fleet.set_load(rng.choice(fleet.names), some_load(rng))
            samples.append(timed(partial(_place, chosen, step, fleet)))
        decision_us = 1e6 * statistics.median(samples[1:])
        timings.append(Timing(policy, workers, step_class, linked, decision_us))
    return timings


def _place(policy: SchedulingPolicy, step: Step, fleet: FleetView) -> Placement:
    """The placement is part of what is timed: a decision works it out on demand."""
    return policy.decide(step, fleet).placement


def addition_us() -> float:
    """Microseconds of one numpy addition over 64 workers."""
    one, other = np.ones(64), np.ones(64)

    def add() -> None:
        for _ in range(_ADDITIONS):
            one + other

    return 1e6 * min(timed(add) for _ in range(20)) / _ADDITIONS


def measure_all(repeats: int) -> tuple[list[Timing], dict[str, float]]:
    """Every policy over 64 workers, the default over fewer; the figures."""
    timings = [x for name in POLICIES for x in measure(name, 64, repeats)]
    timings += measure("ownerserve", 64, repeats, linked=True)
    timings += [x for size in SIZES[:-1] for x in measure("ownerserve", size, repeats)]

    def worst(policy: str, workers: int = 64) -> float:
        return max(t.decision_us for t in timings if (t.policy, t.workers) == (policy, workers))

    decision_us, least_us, add_us = worst("ownerserve"), worst("colocated"), addition_us()
    figures = {
        "decision_us_64": decision_us,
        "decision_us_8": worst("ownerserve", 8),
        "decision_us_1": worst("ownerserve", 1),
        "colocated_us_64": least_us,
        "decision_over_colocated": decision_us / least_us,
        "addition_us": add_us,
        "decision_over_addition": decision_us / add_us,
    }
    return timings, rounded(figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; writes no results")
    arguments = parser.parse_args()
    timings, figures = measure_all(101 if arguments.quick else 1_001)
    text = _report(timings, figures)
    print(text)
    if not arguments.quick:
        details = {"decisions": [vars(timing) for timing in timings]}
        print(f"\nwritten: {save('scheduling', text, figures, details)}")
    if arguments.json:
        print(json.dumps(figures))


def _report(timings: list[Timing], figures: dict[str, float]) -> str:
    rows = [
        [
            t.policy,
            t.workers,
            "uneven" if t.linked else "even",
            t.step_class,
            f"{t.decision_us:.0f}",
        ]
        for t in timings
    ]
    goal = "met" if figures["decision_us_64"] <= GOAL_US else "missed"
    told = [
        [name, f"{value:.4g}", f"<= {GOAL_US:g}, {goal}" if name == "decision_us_64" else ""]
        for name, value in figures.items()
    ]
    header = ["policy", "workers", "network", "step", "decision, us"]
    return "\n\n".join(
        [
            f"{machine_line()}; medians",
            table(header, rows),
            table(["figure", "value", "goal"], told),
        ]
    )


if __name__ == "__main__":
    main()
