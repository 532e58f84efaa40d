"""A policy's decision for a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from ownership.scheduling.step import Step, WorkerPrefix
from ownership.scheduling.step_pricing import PlacementTerms, Route, StepPricing

_NO_PREFIX = WorkerPrefix()


class PlacementAction(StrEnum):
    """The work that a placement causes."""

    COLOCATED_PREFILL = "colocated_prefill"
    """Computed where it decodes, from that worker's own state. No worker has more."""
    REMOTE_PREFILL = "remote_prefill"
    """Computed at one worker and handed off to the one that decodes."""
    DECODE_CONTINUATION = "decode_continuation"
    """The session goes on decoding at its owner."""
    ARTIFACT_FETCH = "artifact_fetch"
    """State of another worker, which keeps it, is read before the rest is computed."""
    TAIL_RECOMPUTE = "tail_recompute"
    """State that another worker has is computed again, because that is cheaper than moving it."""
    STATE_MIGRATION = "state_migration"
    """The session moves: its owner's state is read, and the reader is the owner from then on."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers that serve a step. The one that decodes owns the session from then on."""

    action: PlacementAction
    decode_worker: str
    prefill_worker: str
    """The worker that decodes, except for a remote prefill."""
    source_worker: str | None = None
    """The worker that the prefill worker reads state from first. The prefill worker's planner
    decides how much of that, and of its own state, it restores."""


def whole(placement: Placement) -> Placement:
    """Return a placement at one worker: a remote prefill is computed where it decodes."""
    if placement.action is not PlacementAction.REMOTE_PREFILL:
        return placement
    worker = placement.decode_worker
    return Placement(PlacementAction.COLOCATED_PREFILL, worker, worker)


@dataclass(frozen=True)
class PlacementDecision:
    """The placement of a step. Details are computed on demand, from the figures at that time."""

    step: Step
    route: Route
    names: tuple[str, ...]
    """Names of the workers, by the index that `route` uses."""
    pricing: StepPricing = field(repr=False, compare=False)
    refusal: str | None = None
    """The reason why the step should be refused; the placement is then the best there was."""

    @cached_property
    def placement(self) -> Placement:
        """The chosen placement."""
        name, route = self.names.__getitem__, self.route
        source = None if route.source is None else name(route.source)
        return Placement(self._action(route), name(route.decode), name(route.prefill), source)

    @cached_property
    def predicted(self) -> PlacementTerms:
        """The predicted cost of the chosen placement."""
        return self.pricing.terms(self.route)

    def route_of(self, placement: Placement) -> Route:
        """Return the route that is carried out: the chosen one, or one at a single worker instead,
        as `whole` makes it."""
        if placement == self.placement:
            return self.route
        at = self.names.index(placement.decode_worker)
        return Route(at, at)

    def terms_of(self, placement: Placement) -> PlacementTerms:
        """Return the predicted cost of the placement that is carried out, as in `route_of`."""
        return self.pricing.terms(self.route_of(placement))

    def _action(self, route: Route) -> PlacementAction:
        step, owner = self.step, self.step.owner
        if route.prefill != route.decode:
            return PlacementAction.REMOTE_PREFILL
        if route.source is not None:
            moves = self.names[route.source] == owner and not step.forked
            return PlacementAction.STATE_MIGRATION if moves else PlacementAction.ARTIFACT_FETCH
        if self.names[route.decode] == owner and step.is_continuation:
            return PlacementAction.DECODE_CONTINUATION
        own = step.prefixes.get(self.names[route.decode], _NO_PREFIX).local_tokens
        if any(prefix.dram_tokens > own for prefix in step.prefixes.values()):
            return PlacementAction.TAIL_RECOMPUTE
        return PlacementAction.COLOCATED_PREFILL
