"""Policies that refuse steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ownership.scheduling.decision import PlacementDecision, Refusal
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step, StepClass


class AdmissionPolicy(Protocol):
    """Refuses steps by their placement decision."""

    def refusal(self, decision: PlacementDecision) -> Refusal | None:
        """Return why the step is refused; None if it is admitted."""
        ...


@dataclass(frozen=True)
class AdmitAll:
    """Admit every step that fits."""

    def refusal(self, decision: PlacementDecision) -> Refusal | None:
        return decision.refusal


@dataclass(frozen=True)
class TtftObjective:
    """Refuse a step early if its predicted time to first token is over the objective.

    The state of a running session is worth more than that of a new one, so classes may have
    objectives of their own. Source: Mooncake's early rejection (Qin et al., FAST 2025, section 7).
    """

    objective_s: float
    by_class: Mapping[StepClass, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for objective_s in (self.objective_s, *self.by_class.values()):
            if not objective_s > 0.0:
                raise ValueError(f"an objective is above 0 s, got {objective_s}")

    def refusal(self, decision: PlacementDecision) -> Refusal | None:
        objective_s = self.by_class.get(decision.step_class, self.objective_s)
        if decision.refusal is not None or objective_s == math.inf:
            return decision.refusal
        ttft_s = decision.predicted.ttft_s
        if ttft_s <= objective_s:
            return None
        reason = f"first token after {ttft_s:.3g} s, the objective is {objective_s:g} s"
        return Refusal(reason, ttft_s)


@dataclass(frozen=True)
class GatedPolicy:
    """A scheduling policy whose decisions an admission policy may refuse."""

    policy: SchedulingPolicy
    admission: AdmissionPolicy

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        decision = self.policy.decide(step, fleet)
        return replace(decision, refusal=self.admission.refusal(decision))
