"""Asks other policies what they decide on the views of a log, decision by decision."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero_connector.errors import NoWorkerError, SimulationError
from ownership.decisions.records import DecisionRecord
from ownership.scheduling.decision import whole
from ownership.scheduling.fleet import FleetView, Role
from ownership.scheduling.registry import (
    POLICIES,
    POOLED,
    scheduling_policy,
    without_remote_prefills,
)
from ownership.scheduling.step import Step
from ownership.simulator.traces.decision_file import Decided


class Comparison(NamedTuple):
    """One policy, next to the decisions that were carried out."""

    policy: str
    decisions: int
    """Decisions that it made on the log's views."""
    equal_share: float
    """The share with the same workers: to decode, to prefill and to read from."""
    ttft_change_s: tuple[float, float, float]
    """Predicted time to first token of its placement minus that of the one carried out, by one set
    of prices: 10th percentile, mean, 90th percentile."""
    better_share: float
    """The share in which its placement is predicted to be faster."""
    actions: dict[str, int]
    """Its placements by action."""
    impossible: int
    """Decisions that it refused, or could not make: no pools, or no worker."""


class OtherPolicies:
    """Asks policies about each decision of a log, in its order."""

    def __init__(self, names: Sequence[str], seed: int = 0) -> None:
        """Raises SimulationError for an unknown policy."""
        for name in names:
            if name not in POLICIES:
                problem = f"no scheduling policy {name!r}; there are {', '.join(POLICIES)}"
                raise SimulationError("--policies", problem)
        self._asked = [_Asked(name, seed) for name in names]

    def add(self, decided: Decided) -> None:
        """Let each policy decide. A decision without its view is left out."""
        if decided.step is not None and decided.fleet is not None:
            for asked in self._asked:
                asked.add(decided.record, decided.step, decided.fleet)

    def rows(self) -> list[Comparison]:
        """Return a comparison for each policy, in the order of their names' list."""
        return [asked.comparison() for asked in self._asked]


class _Asked:
    """One policy, with what it has decided."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._pooled = scheduling_policy(name, random.Random(seed))
        self._whole = without_remote_prefills(scheduling_policy(name, random.Random(seed)))
        self._changes_s = array("d")
        self._actions = Counter[str]()
        self._equal = self._decisions = self._impossible = 0

    def add(self, record: DecisionRecord, step: Step, fleet: FleetView) -> None:
        if POOLED.get(self._name) and not _has_pools(fleet):
            self._impossible += 1
            return
        policy = self._pooled if record.handoffs else self._whole
        try:
            decision = policy.decide(step, fleet)
        except NoWorkerError:
            self._impossible += 1
            return
        if decision.refusal is not None:
            self._impossible += 1
            return
        placement = decision.placement if record.handoffs else whole(decision.placement)
        self._decisions += 1
        self._actions[placement.action.value] += 1
        prefill = record.prefill_worker or record.worker
        mine = placement.decode_worker, placement.prefill_worker, placement.source_worker
        self._equal += mine == (record.worker, prefill, record.source)
        predicted_s = decision.terms_of(placement).ttft_s
        carried_s = record.predicted_ttft_s
        if carried_s is not None and np.isfinite(predicted_s):
            self._changes_s.append(predicted_s - carried_s)

    def comparison(self) -> Comparison:
        changes = np.array(self._changes_s)
        change_s, better = (0.0, 0.0, 0.0), 0.0
        if len(changes):
            low, high = np.percentile(changes, (10, 90)).tolist()
            change_s = low, float(changes.mean()), high
            better = float((changes < -1e-9).mean())
        return Comparison(
            self._name,
            self._decisions,
            self._equal / self._decisions if self._decisions else 0.0,
            change_s,
            better,
            dict(self._actions.most_common()),
            self._impossible,
        )


def _has_pools(fleet: FleetView) -> bool:
    return {Role.PREFILL, Role.DECODE} <= set(fleet.roles)
