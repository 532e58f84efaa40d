"""`python -m benchmarks.checkpoint_policies [--trace FILE] [--json]`: checkpoint policies compared.

Agent sessions are replayed through the package's own restorer, planner, saver, checkpoint policies
and store, without an engine: only the forward pass is simulated, by a calibrated profile or the
planner's default costs. For every policy and model it measures the bytes written to SSD for each
new token, and the seconds to restore stored state, by loading or recomputing.

- `over_hull_<model>`: those seconds of `adaptive`, divided by the lower convex hull of the fixed
  policies at the same bytes; at most 1 is on or under their Pareto front.
- `objective_<model>`: seconds of writing, loading and recomputing of `adaptive`, divided by those
  of the best fixed policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import pareto
from benchmarks.agent_sessions import Session, recorded, synthetic
from benchmarks.goals import goal_table
from benchmarks.measure import machine_line, publish, rounded, table
from benchmarks.policy_replay import PolicyRun, replay
from hetero_connector.planner.checkpoints import NEVER
from hetero_connector.planner.profile import CostProfile

MODELS = ("gemma-3-27b", "deepseek-v4-flash")
FIXED = ("full", "periodic:4", "periodic:16", "periodic:64", "zero")
_SEED = 1


def main() -> None:
    arguments = _arguments()
    sessions = _sessions(arguments)
    profile = None if arguments.profile is None else CostProfile.read(arguments.profile)
    heading = _heading(arguments, sessions)
    runs = replay(MODELS, (*FIXED, "adaptive"), sessions, profile)
    figures = figures_of(runs)
    goals = goal_table("checkpoint_policies", figures)
    publish(
        "checkpoint_policies",
        f"{heading}\n\n{_policy_table(runs)}\n\n{goals}",
        figures,
        {"policies": [_details(run) for run in runs]},
        as_json=arguments.json,
        write=arguments.out,
    )


def figures_of(runs: Sequence[PolicyRun]) -> dict[str, float]:
    """Compare the adaptive policy with the fixed ones, by model."""
    figures = {}
    for model in dict.fromkeys(run.model for run in runs):
        fixed = [r for r in runs if r.model == model and r.policy != "adaptive"]
        (adaptive,) = [r for r in runs if r.model == model and r.policy == "adaptive"]
        figures[f"over_hull_{model}"] = pareto.over_hull(_point(adaptive), list(map(_point, fixed)))
        best_s = min(run.objective_s for run in fixed)
        figures[f"objective_{model}"] = adaptive.objective_s / best_s
    return rounded(figures)


def _point(run: PolicyRun) -> pareto.Point:
    return (run.written_per_token, run.restore_s)


def _sessions(arguments: argparse.Namespace) -> list[Session]:
    if arguments.trace is None:
        return synthetic(arguments.sessions, _SEED)
    return recorded(arguments.trace, arguments.sessions)


def _heading(arguments: argparse.Namespace, sessions: Sequence[Session]) -> str:
    if arguments.trace is None:
        source = "synthetic sessions (`synthetic` of `benchmarks.agent_sessions`)"
    else:
        source = f"recorded sessions of {arguments.trace.name}"
    requests = sum(len(s.turns) for s in sessions)
    costs = "the planner's own guess" if arguments.profile is None else str(arguments.profile)
    return "\n".join(
        [
            machine_line(),
            f"{len(sessions)} sessions, {requests} requests; {source}",
            f"restores from SSD, priced by {costs}; nothing in the engine's own prefix cache",
        ]
    )


def _policy_table(runs: Sequence[PolicyRun]) -> str:
    header = [
        "model", "policy", "B/token", "of it checkpoints", "load, s", "recompute, s",
        "restore p50, s", "p95, s", "objective, s", "front",
    ]  # fmt: skip
    return table(header, [_row(run, runs) for run in runs])


def _row(run: PolicyRun, runs: Sequence[PolicyRun]) -> list[object]:
    others = [_point(r) for r in runs if r.model == run.model and r is not run]
    written = run.chunk_bytes + run.checkpoint_bytes
    name = run.policy
    if run.policy == "adaptive":
        name += f" (ended at {'turns' if run.period == NEVER else run.period})"
    return [
        run.model, name, f"{run.written_per_token:,.0f}",
        f"{run.checkpoint_bytes / max(1, written):.0%}", f"{run.load_s:.1f}",
        f"{run.recompute_s:.1f}", f"{run.median_s:.3f}", f"{run.percentile_s(0.95):.3f}",
        f"{run.objective_s:.1f}", "beaten" if pareto.is_beaten(_point(run), others) else "on",
    ]  # fmt: skip


def _details(run: PolicyRun) -> dict[str, Any]:
    return {
        "model": run.model,
        "policy": run.policy,
        "written_per_token": run.written_per_token,
        "checkpoint_bytes": run.checkpoint_bytes,
        "load_s": run.load_s,
        "recompute_s": run.recompute_s,
        "objective_s": run.objective_s,
        "period": run.period,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_policies", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", type=Path, help="coding-agent sessions; synthetic without")
    parser.add_argument("--sessions", type=int, default=8, help="evenly spaced ones of the trace")
    parser.add_argument("--profile", type=Path, help="of `heterocache calibrate`")
    parser.add_argument("--out", action="store_true", help="write the table into results/")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    if arguments.sessions < 1:
        parser.error("--sessions: at least 1")
    return arguments


if __name__ == "__main__":
    main()
