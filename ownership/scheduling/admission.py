"""Whether a step is admitted at all."""

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
    """Looks at a decision and may refuse it."""

    def refusal(self, decision: PlacementDecision) -> Refusal | None:
        """Why the step is turned away; None: it is admitted."""
        ...


@dataclass(frozen=True)
class AdmitAll:
    """Everything that fits."""

    def refusal(self, decision: PlacementDecision) -> Refusal | None:
        """Only what the decision refuses itself."""
        return decision.refusal


@dataclass(frozen=True)
class TtftObjective:
    """Turns away what would miss its time to first token: early, before anything is computed.

    A session's state is worth more than a new session's, so classes may have objectives of their
    own. Source of the rule: Mooncake's early rejection (Qin et al., FAST 2025, section 7).
    """

    objective_s: float
    by_class: Mapping[StepClass, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for objective_s in (self.objective_s, *self.by_class.values()):
            if not objective_s > 0.0:
                raise ValueError(f"an objective is above 0 s, got {objective_s}")

    def refusal(self, decision: PlacementDecision) -> Refusal | None:
        """Set where the predicted TTFT is over the objective."""
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
    """A policy with an admission policy before it."""

    policy: SchedulingPolicy
    admission: AdmissionPolicy

    @property
    def name(self) -> str:
        """The policy's."""
        return self.policy.name

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        """Where the step runs, or why it does not."""
        decision = self.policy.decide(step, fleet)
        return replace(decision, refusal=self.admission.refusal(decision))
