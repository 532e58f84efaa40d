"""Refuses steps early, in front of any policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ownership.scheduling.decision import PlacementDecision, Refusal
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step


@dataclass(frozen=True)
class GatedPolicy:
    """A scheduling policy that refuses a step if its predicted TTFT is over the objective.

    Source: Mooncake's early rejection (Qin et al., FAST 2025, section 7).
    """

    policy: SchedulingPolicy
    ttft_objective_s: float

    def __post_init__(self) -> None:
        if not self.ttft_objective_s > 0.0:
            raise ValueError(f"an objective is above 0 s, got {self.ttft_objective_s}")

    @property
    def name(self) -> str:
        return self.policy.name

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        decision = self.policy.decide(step, fleet)
        if decision.refusal is not None:
            return decision
        ttft_s, objective_s = decision.predicted.ttft_s, self.ttft_objective_s
        if ttft_s <= objective_s:
            return decision
        reason = f"first token after {ttft_s:.3g} s, the objective is {objective_s:g} s"
        return replace(decision, refusal=Refusal(reason, ttft_s))
