"""The planner's decision for one request, and the candidates it was taken from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.candidates import CandidateSet, RestoreCandidate
from hetero_connector.planner.cost_model import CostTerms
from hetero_connector.planner.plan import RestorePlan


class RestoreAction(StrEnum):
    """One consequence of a decision."""

    LOAD_COMPRESSED_KV = "LOAD_COMPRESSED_KV"
    """Prefix-proportional state is loaded."""
    LOAD_SWA_CHECKPOINT = "LOAD_SWA_CHECKPOINT"
    """Boundary state is loaded: windows, tails, recurrent state."""
    RECOMPUTE_TAIL = "RECOMPUTE_TAIL"
    """Tokens after the boundary are computed; all tokens if nothing is loaded."""
    RECOMPUTE_SWA = "RECOMPUTE_SWA"
    """Windows are rebuilt by computing tokens before the boundary again."""
    PREFETCH_ARTIFACT = "PREFETCH_ARTIFACT"
    """Artifacts are staged in DRAM, and the request is admitted when they are there."""
    DROP_LOW_UTILITY_ARTIFACT = "DROP_LOW_UTILITY_ARTIFACT"
    """Deeper artifacts are not loaded, because computing is cheaper; they are evicted first."""


@dataclass(frozen=True)
class RestoreDecision:
    """The plan for one request, and its predicted cost.

    `declined`, `actions` and `candidates` are computed when they are first asked for, from prices
    of the moment of decision, so that they need not delay the first token.
    """

    plan: RestorePlan | None
    """None: restore nothing."""
    predicted: CostTerms
    considered: CandidateSet = field(repr=False, compare=False)
    by_cost: bool = True
    """False if the planner's mode, not the cost, decided."""

    @property
    def nothing(self) -> CostTerms:
        """The cost of computing everything after the local tokens."""
        return self.considered.nothing

    @property
    def reuse_benefit_s(self) -> float:
        """C_prefill - C_load - C_recompute - C_stall, in seconds; 0 if nothing is loaded.

        C_prefill is the cost of computing everything after the local tokens, stall included.
        """
        prefill, chosen = self.nothing, self.predicted
        return (prefill.compute_s + prefill.stall_s) - (
            chosen.load_s + chosen.compute_s + chosen.stall_s
        )

    @cached_property
    def declined(self) -> tuple[Tier, ...]:
        """Tiers from which nothing is loaded for its cost, although the request would resume later.

        Nothing is learned about them this time, so `LoadModel.fade` lets a tier that was slow
        once be tried again.
        """
        return self.considered.declined_tiers(self.plan) if self.by_cost else ()

    @cached_property
    def actions(self) -> tuple[RestoreAction, ...]:
        """The consequences, in order."""
        return tuple(self._actions())

    def candidates(self) -> tuple[RestoreCandidate, ...]:
        """Every candidate, restoring nothing first, then by boundary.

        Takes milliseconds: for people.
        """
        return tuple(self.considered.candidates(self.plan))

    def _actions(self) -> Iterator[RestoreAction]:
        plan, considered = self.plan, self.considered
        if plan is not None:
            if plan.prefix_types:
                yield RestoreAction.LOAD_COMPRESSED_KV
            if plan.boundary_types:
                yield RestoreAction.LOAD_SWA_CHECKPOINT
            if plan.replay_tokens:
                yield RestoreAction.RECOMPUTE_SWA
            if considered.needs_staging(plan):
                yield RestoreAction.PREFETCH_ARTIFACT
        if considered.prompt_tokens > (plan.boundary if plan else considered.local_tokens):
            yield RestoreAction.RECOMPUTE_TAIL
        if self.by_cost and considered.has_deeper(plan):
            yield RestoreAction.DROP_LOW_UTILITY_ARTIFACT
