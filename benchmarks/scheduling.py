"""`python -m benchmarks.scheduling [--json]`: the time of a scheduling decision.

`scheduling_decision_us_64`: median microseconds of one decision of the default policy over 64
workers, with its placement; the worst kind of step. Before each decision the loads of two workers
change, as in a router or a simulator. Eight workers have parts of the prompt, and the network
between workers is uneven. References from the same run: the policy that only looks for the least
loaded worker, and one addition of two arrays of 64 numbers: a decision takes as long as several
hundred of them.
`ledger_us_64`: microseconds of a decision that the router's ledger takes, in a fleet of 64 workers
with 16 requests each: its view, what it knows of the session, and the request that is sent.
`ledger_request_us_64`: the same with the request's first token and its end.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.goals import goal_table
from benchmarks.measure import machine_line, publish, rounded, table, timed
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.spec.presets import PRESETS
from ownership.scheduling import (
    POLICIES,
    FleetView,
    Ledger,
    Link,
    Placement,
    SchedulingPolicy,
    StateFootprint,
    Step,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
    scheduling_policy,
)
from ownership.scheduling.decision import PlacementAction
from ownership.scheduling.ledger import Work

MODEL = "deepseek-v4-flash"
SIZES = (1, 8, 64)
_HOLDERS = 8
_TOKENS = 60_000
_ADDITIONS = 1_000


@dataclass(frozen=True)
class Timing:
    """The median time of a decision."""

    policy: str
    workers: int
    kind: str
    """The kind of step."""
    linked: bool
    decision_us: float


def some_load(rng: random.Random) -> WorkerLoad:
    decodes = rng.randrange(64)
    return WorkerLoad(
        rng.randrange(20_000), rng.randrange(8), decodes, decodes * 20_000,
        rng.randrange(60 << 30), 20.0, rng.randrange(1 << 28), 0, rng.randrange(1 << 28),
    )  # fmt: skip


def fleet_of(count: int, linked: bool, rng: random.Random) -> FleetView:
    """Make a fleet like H200s: 100,000 tokens per second, 80 GiB for pages."""
    model = PRESETS[MODEL]()
    footprint = StateFootprint.of(ArtifactLayout(model, model.default_chunk_tokens()))
    compute = ComputeRegression(ComputeCoefficients(5e-3, 1e-5, 1e-10))
    costs = CostModel(compute, LoadModel(model.state_types), step_tokens=8_192)
    names = [f"worker-{i:03}" for i in range(count)]
    workers = [WorkerView(name, costs, 80 << 30, load=some_load(rng)) for name in names]
    links = {(a, b): Link(1e-4, 1e-10) for a in names for b in names} if linked else None
    return FleetView(footprint, workers, links)


def steps(fleet: FleetView) -> dict[str, Step]:
    """Make a step of each kind, of which the first workers have shorter and shorter prefixes."""
    owner = fleet.names[0]
    known = _TOKENS - 10_000
    spread = fleet.names[:_HOLDERS]
    held = {
        x: WorkerPrefix(known // (i + 2), known // (i + 1), known) for i, x in enumerate(spread)
    }
    cold = {x: WorkerPrefix(0, 0, known) for x in spread}
    made = {
        "new_long_prefix": Step(_TOKENS, held, output_tokens=300.0),
        "incremental_turn": Step(known + 700, held, "s", owner, known, 300.0),
        "long_tool_output": Step(_TOKENS, held, "s", owner, known, 300.0),
        "decode_continuation": Step(known + 8, held, "s", owner, known, 300.0),
        "forked_rollout": Step(_TOKENS, held, "s", owner, known, 300.0, forked=True),
        "cold_resume": Step(_TOKENS, cold, "s", owner, known, 300.0),
    }
    return made


def measure(policy: str, workers: int, repeats: int, linked: bool = False) -> list[Timing]:
    """Time one policy on one fleet for every kind of step."""
    rng = random.Random(1)
    fleet = fleet_of(workers, linked, rng)
    chosen = scheduling_policy(policy, rng)
    timings = []
    for kind, step in steps(fleet).items():
        samples = []
        for _ in range(repeats + 1):
            for _ in range(2):
                fleet.set_load(rng.choice(fleet.names), some_load(rng))
            samples.append(timed(partial(_place, chosen, step, fleet)))
        decision_us = 1e6 * statistics.median(samples[1:])
        timings.append(Timing(policy, workers, kind, linked, decision_us))
    return timings


def _place(policy: SchedulingPolicy, step: Step, fleet: FleetView) -> Placement:
    """Decide, and ask for the placement, which a decision computes when it is asked."""
    return policy.decide(step, fleet).placement


def ledger_us(workers: int, repeats: int) -> tuple[float, float]:
    """Return the median microseconds of a decision, and of a request from there to its end."""
    rng = random.Random(1)
    fleet = fleet_of(workers, False, rng)
    ledger, in_flight = Ledger(fleet), list[int]()
    decisions_s, requests_s = [], []
    held = {x: WorkerPrefix(0, 9_000) for x in fleet.names[:8]}
    for number in range(16 * workers + repeats):
        session, name = str(rng.randrange(32 * workers)), rng.choice(fleet.names)
        step = Step(10_000, held, session, boundary_tokens=9_000)
        placement = Placement(PlacementAction.COLOCATED_PREFILL, name, name)
        decided_s = timed(partial(_ask_ledger, ledger, number, step, placement))
        in_flight.append(number)
        if number >= 16 * workers:
            ended = in_flight.pop(rng.randrange(len(in_flight)))
            decisions_s.append(decided_s)
            requests_s.append(decided_s + timed(partial(_serve, ledger, number, ended)))
    return 1e6 * statistics.median(decisions_s), 1e6 * statistics.median(requests_s)


def _ask_ledger(ledger: Ledger, number: int, step: Step, placement: Placement) -> None:
    """Do what a decision needs of the ledger."""
    now_s = 0.01 * number
    ledger.sessions.owner(step.session_id)
    ledger.sessions.has_sibling(step.session_id, step.boundary_tokens)
    ledger.view(now_s)
    ledger.sent(number, Work.of(step, placement), now_s)


def _serve(ledger: Ledger, number: int, ended: int) -> None:
    """Let the first token of a request come, and the end of another one."""
    ledger.first_token(number, 0.01 * number)
    ledger.ended(ended, 200, 0.01 * number)


def addition_us() -> float:
    """Return the microseconds of one numpy addition of 64 numbers."""
    one, other = np.ones(64), np.ones(64)

    def add() -> None:
        for _ in range(_ADDITIONS):
            one + other

    return 1e6 * min(timed(add) for _ in range(20)) / _ADDITIONS


def measure_all(repeats: int) -> tuple[list[Timing], dict[str, float]]:
    """Time every policy over 64 workers, and the default over fewer; return the figures, too."""
    timings = [x for name in POLICIES for x in measure(name, 64, repeats)]
    timings += measure("ownerserve", 64, repeats, linked=True)
    timings += [x for size in SIZES[:-1] for x in measure("ownerserve", size, repeats)]

    def worst(policy: str, workers: int = 64) -> float:
        return max(t.decision_us for t in timings if (t.policy, t.workers) == (policy, workers))

    decision_us, least_us, add_us = worst("ownerserve"), worst("colocated"), addition_us()
    ledger_decision_us, ledger_request_us = ledger_us(64, 5 * repeats)
    figures = {
        "scheduling_decision_us_64": decision_us,
        "scheduling_decision_us_8": worst("ownerserve", 8),
        "scheduling_decision_us_1": worst("ownerserve", 1),
        "colocated_us_64": least_us,
        "decision_over_colocated": decision_us / least_us,
        "addition_us": add_us,
        "decision_over_addition": decision_us / add_us,
        "ledger_us_64": ledger_decision_us,
        "ledger_request_us_64": ledger_request_us,
    }
    return timings, rounded(figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; writes no results")
    arguments = parser.parse_args()
    timings, figures = measure_all(101 if arguments.quick else 1_001)
    text = _report(timings, figures)
    details = {"decisions": [vars(timing) for timing in timings]}
    publish("scheduling", text, figures, details, as_json=arguments.json, write=not arguments.quick)


def _report(timings: list[Timing], figures: dict[str, float]) -> str:
    rows = [
        [
            t.policy,
            t.workers,
            "uneven" if t.linked else "even",
            t.kind,
            f"{t.decision_us:.0f}",
        ]
        for t in timings
    ]
    header = ["policy", "workers", "network", "step", "decision, us"]
    return "\n\n".join(
        [
            f"{machine_line()}; medians",
            table(header, rows),
            goal_table("scheduling", figures),
        ]
    )


if __name__ == "__main__":
    main()
