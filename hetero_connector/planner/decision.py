"""What the planner decided for a request, and what it decided against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostTerms
from hetero_connector.planner.plan import RestorePlan


class RestoreAction(StrEnum):
    """What a decision makes happen."""

    LOAD_COMPRESSED_KV = "LOAD_COMPRESSED_KV"
    """Prefix-proportional state is loaded."""
    LOAD_SWA_CHECKPOINT = "LOAD_SWA_CHECKPOINT"
    """Boundary state is loaded: windows, tails, recurrent state."""
    RECOMPUTE_TAIL = "RECOMPUTE_TAIL"
    """Tokens after the boundary are computed: all of them where nothing is loaded."""
    RECOMPUTE_SWA = "RECOMPUTE_SWA"
    """Windows are rebuilt by recomputing tokens before the boundary."""
    PREFETCH_ARTIFACT = "PREFETCH_ARTIFACT"
    """Artifacts are brought from SSD to DRAM, and the request is admitted once they are there."""
    DROP_LOW_UTILITY_ARTIFACT = "DROP_LOW_UTILITY_ARTIFACT"
    """Artifacts that would lead further are left alone, for computing is cheaper, and leave
    their tier before all others when it needs room."""


@dataclass(frozen=True)
class EngineLoad:
    """What the engine is busy with when a request is planned."""

    queued_tokens: int = 0
    """Prompt tokens of running requests, not yet computed: scheduled ahead in any case."""
    running_decodes: int = 0
    """Requests that are being decoded."""
    in_flight_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes that earlier restores are still reading, by the tier they come from."""
    layerwise: bool = True
    """DRAM to pages runs layer by layer beside the forward pass; else it is parked, before it."""
    waiting_tokens: int = 0
    """Prompt tokens that requests before this one will compute once their own loads have ended:
    before this one's if it waits for a load too, after them if it does not."""

    @property
    def is_computing(self) -> bool:
        """Whether the engine has other work while this request loads."""
        return bool(self.running_decodes or self.queued_tokens)

    @property
    def only_decodes(self) -> int:
        """Requests that are being decoded, if nothing else is computed."""
        return 0 if self.queued_tokens else self.running_decodes


@dataclass(frozen=True)
class RestoreCandidate:
    """One way to serve the request. Slow to make: for people."""

    boundary: int
    """State of the tokens before it is restored; the local tokens where nothing is loaded."""
    resume_tokens: int
    """The engine computes from here: the boundary, or earlier by what is replayed."""
    load_bytes: Mapping[Tier, int]
    """Bytes loaded, by the tier they are in."""
    terms: CostTerms
    in_time: bool = True
    """False where staging is predicted to outlast the deadline: not taken."""
    chosen: bool = False


@dataclass(frozen=True)
class RestoreDecision:
    """What to restore and what that is predicted to take."""

    plan: RestorePlan | None
    """None: restore nothing."""
    predicted: CostTerms
    nothing: CostTerms
    """Of computing everything past the local tokens."""
    _declined: Callable[[], tuple[Tier, ...]] = field(repr=False, compare=False)
    _actions: Callable[[], Iterable[RestoreAction]] = field(repr=False, compare=False)
    _candidates: Callable[[], Iterable[RestoreCandidate]] = field(repr=False, compare=False)

    @property
    def declined(self) -> tuple[Tier, ...]:
        """Tiers of which nothing is loaded although with it the request would resume later.

        Nothing is learned of them this time: `LoadModel.fade` lets one that was slow once be
        tried again. Looked for when it is asked, for that need not be before the first token.
        """
        return self._declined()

    @property
    def actions(self) -> tuple[RestoreAction, ...]:
        """What it makes happen, in order."""
        return tuple(self._actions())

    @property
    def reuse_benefit_s(self) -> float:
        """C_prefill - C_load - C_recompute - C_stall, in seconds; 0 where nothing is loaded.

        C_prefill is computing everything past the local tokens, with the stall of that.
        """
        prefill, chosen = self.nothing, self.predicted
        return (prefill.compute_s + prefill.stall_s) - (
            chosen.load_s + chosen.compute_s + chosen.stall_s
        )

    def candidates(self) -> tuple[RestoreCandidate, ...]:
        """Everything that was weighed, shallowest first, nothing at all before the rest.

        By the costs of the moment of decision. Takes milliseconds: for people.
        """
        return tuple(self._candidates())
