"""`heterocache trace decisions`: prints how well a router predicted, and what others decide."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hetero_connector.errors import SimulationError
from ownership.simulator.decisions.accuracy import Accuracy, Predictions
from ownership.simulator.decisions.policies import Comparison, OtherPolicies
from ownership.simulator.figures import SimulationResult
from ownership.simulator.fleet_file import FleetSpec, read_fleet
from ownership.simulator.policies import PolicySpec, parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.decision_file import Decided, DecisionFile
from ownership.simulator.traces.router_decisions import read

_ALONE = (
    "Each decision is taken alone. What workers have, how busy they are and who owns a session "
    "follow from the decisions that were carried out. Another policy would have left other state "
    "elsewhere: this compares decisions, not fleets."
)
_PREDICTED = (
    "Its times to first token are predicted, by the costs that the router had, with the errors "
    "above. Placements that were not made were not observed."
)
_DRAWS = "Policies that draw, or take turns, may place equally by chance."
_SIMULATED = (
    "Simulated: the log's sessions under each policy, on the fleet of the file, whose caches are "
    "empty at first. State, queues and times follow from its own decisions there, by the fleet's "
    "costs. Sessions wait for their answers, and think as long as recorded."
)


@dataclass
class Report:
    """The figures that are printed."""

    log: DecisionFile
    predictions: Predictions
    others: OtherPolicies
    simulated: Sequence[SimulationResult]
    left_out: Sequence[str] = ()
    """Sentences on the policies that cannot be simulated on the fleet."""

    def as_json(self) -> dict[str, Any]:
        """Return the output of `--json`."""
        counts = self.log.counts
        return {
            "decisions": counts.decisions,
            "unreadable_lines": counts.unreadable,
            "newer_lines": counts.newer,
            "decisions_without_view": counts.without_view,
            "unobserved": self.predictions.unobserved,
            "predictions": [row._asdict() for row in self.predictions.rows()],
            "policies": [row._asdict() for row in self.others.rows()],
            "caveats": [*counts.sentences(), _ALONE, _PREDICTED, _DRAWS],
            "simulated": [result.as_json() for result in self.simulated],
            "not_simulated": list(self.left_out),
        }

    def as_markdown(self) -> str:
        """Return two or three tables, each with what its figures do not say."""
        counts = self.log.counts
        lines = [f"# {counts.decisions:,} decisions of {self.log.path}", ""]
        lines += [f"- {sentence}" for sentence in counts.sentences()]
        lines += ["", "## Time to first token: predicted and observed", ""]
        lines += _table(
            "of|decisions|predicted p50|observed p50|observed − predicted p10|p50|p90|"
            "observed / predicted p10|p50|p90",
            map(_accuracy_row, self.predictions.rows()),
        )
        if self.predictions.unobserved:
            lines += ["", f"Not observed: {self.predictions.unobserved:,}, failed or no stream."]
        lines += ["", "## What other policies decide on the same views", ""]
        lines += _table(
            "policy|decisions|same workers|predicted TTFT, change p10|mean|p90|faster|"
            "not possible|actions",
            map(_policy_row, self.others.rows()),
        )
        lines += ["", _ALONE, _PREDICTED, _DRAWS]
        if self.simulated:
            lines += ["", "## The whole log, simulated", ""]
            lines += _table(
                "policy|requests|refused|TTFT mean|p50|p95|task mean|computed tokens|network GiB",
                map(_simulated_row, self.simulated),
            )
            lines += ["", _SIMULATED, *self.simulated[0].caveats]
        if self.left_out:
            lines += ["", *self.left_out]
        return "\n".join(lines)


def look_back(
    path: Path, policies: Sequence[str], every: int, fleet: Path | None, *, as_json: bool
) -> None:
    """Print what a log of decisions says.

    `every`: other policies are asked about one of so many decisions. `fleet`: the file of a fleet
    to simulate the log on; None: no simulation.

    Raises:
        TraceError: the log cannot be read or has no decision.
        SimulationError: a policy is unknown, or the fleet cannot be simulated.
    """
    others = OtherPolicies(policies)
    spec = None if fleet is None else read_fleet(fleet)
    simulable, left_out = ([], []) if spec is None else _simulable(policies, spec)
    log, predictions = DecisionFile(path), Predictions()
    for number, decided in enumerate(_with_progress(log)):
        predictions.add(decided.record)
        if number % every == 0:
            others.add(decided)
    simulated = []
    if spec is not None and simulable:
        sessions = list(trace := read(path))
        trace = replace(trace, sessions=lambda: iter(sessions))
        simulated = [simulate(trace, spec, policy) for policy in simulable]
    report = Report(log, predictions, others, simulated, left_out)
    print(json.dumps(report.as_json(), indent=2) if as_json else report.as_markdown())


def _simulable(policies: Sequence[str], fleet: FleetSpec) -> tuple[list[PolicySpec], list[str]]:
    """Return the policies that can run on the fleet, and a sentence on each of the others."""
    found, left_out = list[PolicySpec](), list[str]()
    for policy in map(parse_policy, policies):
        try:
            policy.workers(fleet.workers)
        except SimulationError as error:
            left_out.append(f"Not simulated: {error}")
        else:
            found.append(policy)
    return found, left_out


def _with_progress(log: DecisionFile) -> Iterable[Decided]:
    """Add a progress bar, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return log
    from rich.console import Console
    from rich.progress import track

    return track(log, "decisions", console=Console(stderr=True), transient=True)


def _table(header: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    names = header.split("|")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _accuracy_row(row: Accuracy) -> tuple[str, ...]:
    return (
        f"{row.kind} {row.name}".strip() or "all",
        f"{row.decisions:,}",
        _seconds(row.predicted_p50_s),
        _seconds(row.observed_p50_s),
        *map(_seconds, row.error_s),
        *(f"{ratio:.2f}" for ratio in row.ratio),
    )


def _policy_row(row: Comparison) -> tuple[str, ...]:
    return (
        row.policy,
        f"{row.decisions:,}",
        f"{row.equal_share:.1%}",
        *map(_seconds, row.ttft_change_s),
        f"{row.better_share:.1%}",
        f"{row.impossible:,}",
        ", ".join(f"{name} {count:,}" for name, count in row.actions.items()) or "-",
    )


def _simulated_row(result: SimulationResult) -> tuple[str, ...]:
    figures = result.figures
    return (
        result.policy,
        f"{figures.requests:,}",
        f"{figures.refused:,}",
        *map(_seconds, (figures.ttft_mean_s, figures.ttft_p50_s, figures.ttft_p95_s)),
        _seconds(figures.task_mean_s),
        f"{figures.prompt_tokens - figures.saved_tokens:,}",
        f"{figures.network_bytes / 2**30:.2f}",
    )


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if np.isfinite(seconds) else "-"
