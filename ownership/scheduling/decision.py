"""What a policy decided for a step, and what it decided against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from ownership.scheduling.fleet import FleetView
from ownership.scheduling.step import HeldPrefix, Step, StepClass
from ownership.scheduling.step_pricing import StepPricing, Way
from ownership.scheduling.terms import Terms

_NOTHING = HeldPrefix()


class Action(StrEnum):
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

    action: Action
    decode_worker: str
    prefill_worker: str
    """The same, unless it is a remote prefill."""
    source_worker: str | None = None
    """The worker that the prefill worker reads state from first. What it restores of that, and
    of its own, its own planner decides."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the step."""

    placement: Placement
    resume_tokens: int
    """Where the prefill worker is expected to compute from."""
    terms: Terms
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a step is not admitted."""

    reason: str
    predicted_ttft_s: float
    """Of the best placement there was."""


@dataclass(frozen=True)
class Decision:
    """Where a step goes. What it is made of is worked out when asked for, by the figures then."""

    step: Step
    step_class: StepClass
    way: Way
    names: tuple[str, ...]
    """Of the workers that `way` means."""
    pricing: StepPricing = field(repr=False, compare=False)
    remote: bool = False
    """Whether remote prefills were considered."""
    refusal: Refusal | None = None
    """Set where the step should be turned away; the placement is what it would have been."""

    @cached_property
    def placement(self) -> Placement:
        """Where the step runs."""
        return self._placement(self.way)

    @cached_property
    def predicted(self) -> Terms:
        """What that is predicted to cost."""
        return self.pricing.terms(self.way)

    def candidates(self) -> Iterator[Candidate]:
        """Everything that was considered, and the choice if it is none of that. For people."""
        shown = False
        for way in self.pricing.ways(self.remote):
            shown |= way == self.way
            yield self._candidate(way)
        if not shown:
            yield self._candidate(self.way)

    def _candidate(self, way: Way) -> Candidate:
        resume_tokens = self.pricing.resume_tokens(way)
        terms = self.pricing.terms(way)
        return Candidate(self._placement(way), resume_tokens, terms, way == self.way)

    def _placement(self, way: Way) -> Placement:
        name = self.names.__getitem__
        source = None if way.source is None else name(way.source)
        return Placement(self._action(way), name(way.decode), name(way.prefill), source)

    def _action(self, way: Way) -> Action:
        step, owner = self.step, self.step.owner
        if way.prefill != way.decode:
            return Action.REMOTE_PREFILL
        if way.source is not None:
            moves = self.names[way.source] == owner and not step.forked
            return Action.STATE_MIGRATION if moves else Action.ARTIFACT_FETCH
        if self.step_class is StepClass.DECODE_CONTINUATION and self.names[way.decode] == owner:
            return Action.DECODE_CONTINUATION
        own = step.held.get(self.names[way.decode], _NOTHING).local_tokens
        if any(prefix.dram_tokens > own for prefix in step.held.values()):
            return Action.TAIL_RECOMPUTE
        return Action.COLOCATED_PREFILL


def decision_of(
    step: Step,
    step_class: StepClass,
    fleet: FleetView,
    pricing: StepPricing,
    way: Way,
    refusal: Refusal | None = None,
) -> Decision:
    """A policy's choice that did not come from comparing prices."""
    return Decision(step, step_class, way, fleet.names, pricing, refusal=refusal)
