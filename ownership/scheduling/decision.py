"""What a policy decided for a step, and what it decided against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from ownership.scheduling.fleet import FleetView
from ownership.scheduling.step import Step, StepClass, WorkerPrefix
from ownership.scheduling.step_pricing import Route, StepPricing
from ownership.scheduling.terms import PlacementTerms

_NOTHING = WorkerPrefix()


class PlacementAction(StrEnum):
    """What a placement makes happen."""

    COLOCATED_PREFILL = "colocated_prefill"
    """Computed where it decodes, from what that worker has itself; nobody has more."""
    REMOTE_PREFILL = "remote_prefill"
    """Computed at one worker and handed off to the one that decodes."""
    DECODE_CONTINUATION = "decode_continuation"
    """The session goes on decoding at its owner."""
    ARTIFACT_FETCH = "artifact_fetch"
    """State that another worker owns and keeps is read before the rest is computed."""
    TAIL_RECOMPUTE = "tail_recompute"
    """What another worker has is computed again rather than moved."""
    STATE_MIGRATION = "state_migration"
    """The session moves: its owner's state is read, and the reader owns it from then on."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step runs. There is one worker that decodes: the session's owner from now on."""

    action: PlacementAction
    decode_worker: str
    prefill_worker: str
    """The same, unless it is a remote prefill."""
    source_worker: str | None = None
    """The worker that the prefill worker reads state from first. What it restores of that, and
    of its own, its own planner decides."""


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """One route to serve the step."""

    placement: Placement
    resume_tokens: int
    """Where the prefill worker is expected to compute from."""
    terms: PlacementTerms
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a step is not admitted."""

    reason: str
    predicted_ttft_s: float
    """Of the best placement there was."""


@dataclass(frozen=True)
class PlacementDecision:
    """Where a step goes. What it is made of is worked out when asked for, by the figures then."""

    step: Step
    step_class: StepClass
    route: Route
    names: tuple[str, ...]
    """Of the workers that `route` means."""
    pricing: StepPricing = field(repr=False, compare=False)
    remote: bool = False
    """Whether remote prefills were considered."""
    refusal: Refusal | None = None
    """Set where the step should be turned away; the placement is what it would have been."""

    @cached_property
    def placement(self) -> Placement:
        """Where the step runs."""
        return self._placement(self.route)

    @cached_property
    def predicted(self) -> PlacementTerms:
        """What that is predicted to cost."""
        return self.pricing.terms(self.route)

    def candidates(self) -> Iterator[PlacementCandidate]:
        """Everything that was considered, and the choice if it is none of that. For people."""
        shown = False
        for route in self.pricing.routes(self.remote):
            shown |= route == self.route
            yield self._candidate(route)
        if not shown:
            yield self._candidate(self.route)

    def _candidate(self, route: Route) -> PlacementCandidate:
        resume_tokens = self.pricing.resume_tokens(route)
        terms = self.pricing.terms(route)
        return PlacementCandidate(self._placement(route), resume_tokens, terms, route == self.route)

    def _placement(self, route: Route) -> Placement:
        name = self.names.__getitem__
        source = None if route.source is None else name(route.source)
        return Placement(self._action(route), name(route.decode), name(route.prefill), source)

    def _action(self, route: Route) -> PlacementAction:
        step, owner = self.step, self.step.owner
        if route.prefill != route.decode:
            return PlacementAction.REMOTE_PREFILL
        if route.source is not None:
            moves = self.names[route.source] == owner and not step.forked
            return PlacementAction.STATE_MIGRATION if moves else PlacementAction.ARTIFACT_FETCH
        if self.step_class is StepClass.DECODE_CONTINUATION and self.names[route.decode] == owner:
            return PlacementAction.DECODE_CONTINUATION
        own = step.prefixes.get(self.names[route.decode], _NOTHING).local_tokens
        if any(prefix.dram_tokens > own for prefix in step.prefixes.values()):
            return PlacementAction.TAIL_RECOMPUTE
        return PlacementAction.COLOCATED_PREFILL


def decision_of(
    step: Step,
    step_class: StepClass,
    fleet: FleetView,
    pricing: StepPricing,
    route: Route,
    refusal: Refusal | None = None,
) -> PlacementDecision:
    """A policy's choice that did not come from comparing prices."""
    return PlacementDecision(step, step_class, route, fleet.names, pricing, refusal=refusal)
