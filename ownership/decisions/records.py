"""A router's decisions as lines of JSON, with all that they were made from: they can be made again.

A line is a decision or a fleet. A decision has the step, the loads of the workers that were not
idle, the choice, and what came of it. What it has of the fleet besides, which changes rarely, is
the line of the fleet that it names. Lines of several processes may be in one file. Lines come in
the order in which requests ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from hetero_connector.spec.state_types import StateType
from ownership.scheduling.decision import Placement, PlacementAction, PlacementDecision
from ownership.scheduling.fleet import FleetView, Role
from ownership.scheduling.footprint import StateFootprint
from ownership.scheduling.step import Step, WorkerPrefix

FORMAT = 4
"""Version of the lines. 1 had neither fleets nor loads, 2 and 3 fewer figures of a worker; up to
3 lines had a `class` of the step, which nothing reads."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, lt=2**48)]


class FleetRecord(msgspec.Struct, tag_field="kind", tag="fleet"):
    """The figures of a fleet's workers that are no loads."""

    fleet: str
    """Its name: a digest of the rest."""
    token_bytes: dict[StateType, float]
    checkpoint_bytes: dict[StateType, float]
    page_bytes_per_token: float
    num_layers: Annotated[int, msgspec.Meta(ge=1)]
    roles: Annotated[dict[str, Role], msgspec.Meta(min_length=1)]
    figures: dict[str, list[float]]
    format: int = FORMAT

    @classmethod
    def of(cls, fleet: FleetView) -> FleetRecord:
        """Return what the decisions on this fleet name."""
        size = fleet.footprint
        found = cls(
            "",
            dict(size.token_bytes),
            dict(size.checkpoint_bytes),
            size.page_bytes_per_token,
            size.num_layers,
            dict(zip(fleet.names, fleet.roles, strict=True)),
            fleet.figures(),
        )
        text = msgspec.json.encode(found)
        found.fleet = hashlib.blake2b(text, digest_size=8).hexdigest()
        return found

    def view(self) -> FleetView:
        """Return the fleet, idle. Raises ValueError if figures are missing.

        Before format 4 the price of a handoff had no part but reading.
        """
        footprint = StateFootprint(
            self.token_bytes, self.checkpoint_bytes, self.page_bytes_per_token, self.num_layers
        )
        figures = self.figures
        if self.format == 3:
            figures = {name: [*known, 0.0, 0.0] for name, known in figures.items()}
        try:
            return FleetView.of_figures(footprint, self.roles, figures)
        except KeyError as error:
            raise ValueError(f"no figures of worker {error}") from error


class DecisionRecord(msgspec.Struct, tag_field="kind", tag="decision", kw_only=True):
    """One request that was sent to a worker."""

    format: int = FORMAT
    time: float
    """Unix time of the decision, seconds."""
    process: str = ""
    """The process that decided: `chunks` counts in each for itself."""
    path: str
    model: str | None = None
    session: str = ""
    """A digest; "" if the request belongs to no session."""
    policy: str
    handoffs: bool = False
    """True if the router could have carried out a remote prefill."""
    groups: dict[str, int] | None = None
    """`FleetView.groups`: the workers that could read each other's state; null: all could."""
    certainty: str = ""
    reasons: Sequence[str] = ()
    prompt_tokens: _Tokens
    boundary_tokens: _Count = 0
    expected_output_tokens: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    forked: bool = False
    prefixes: dict[str, WorkerPrefix] = {}
    owner: str | None = None
    worker: str
    """The worker that decodes."""
    prefill_worker: str = ""
    """"": the same."""
    action: PlacementAction
    source: str | None = None
    wanted_prefill_at: str | None = None
    """The worker at which the policy wanted to prefill, if the router could not do that."""
    costs: str = ""
    """The source of the worker's costs: `learned`, or the `default`."""
    predicted: dict[str, float | None]
    """The terms of the price of what is carried out; null is infinite."""
    predicted_ttft_s: float | None
    fleet: str = ""
    """The name of a `FleetRecord`; "" in format 1."""
    loads: dict[str, list[float]] = {}
    """By worker, in the order of `WorkerLoad`; idle ones are left out."""
    prefill_demand: float = 0.0
    chunks: list[tuple[_Count, _Count]] = []
    """`[first, count]` runs of the prompt's full chunks. Equal numbers mean equal prefixes."""
    chunk_tokens: _Count = 0
    """0 if the prompt's chunks are not known."""
    first_byte_s: float | None = None
    """Seconds from the sending; None if there was none."""
    prefill_s: float | None = None
    """Seconds from the sending to the end of a remote prefill; None if there was none."""
    prefill_problem: str | None = None
    """Why the remote prefill failed, so that the worker that decodes computed the prompt."""
    total_s: float = 0.0
    events: int | None = None
    """Events of a stream; None if the answer was none."""
    failed: bool = False
    """True if the worker answered with an error or was lost."""

    @classmethod
    def of(
        cls,
        decision: PlacementDecision,
        placement: Placement,
        policy: str,
        path: str,
        time_s: float,
    ) -> DecisionRecord:
        """Return what a decision says by itself. `placement`: the one that is carried out."""
        step, predicted = decision.step, decision.terms_of(placement)
        wanted = decision.placement.prefill_worker
        return cls(
            time=time_s,
            path=path,
            session=step.session_id,
            policy=policy,
            prompt_tokens=step.prompt_tokens,
            boundary_tokens=step.boundary_tokens,
            expected_output_tokens=step.output_tokens,
            forked=step.forked,
            prefixes=dict(step.prefixes),
            owner=step.owner,
            worker=placement.decode_worker,
            prefill_worker=placement.prefill_worker,
            action=placement.action,
            source=placement.source_worker,
            wanted_prefill_at=None if wanted == placement.prefill_worker else wanted,
            predicted=predicted._asdict(),
            predicted_ttft_s=predicted.ttft_s,
        )

    def note_fleet(self, fleet: FleetView, name: str) -> None:
        """Add the present loads of the fleet that was decided on, and its record's name."""
        self.fleet, self.loads = name, fleet.busy_loads()
        self.prefill_demand = fleet.prefill_demand
        self.groups = None if fleet.groups is None else dict(fleet.groups)

    @property
    def ttft_s(self) -> float | None:
        """The observed time to first token; None if the answer was no stream, or failed."""
        return None if self.failed or self.events is None else self.first_byte_s

    def step(self) -> Step:
        """Return the step that was decided on. Raises ValueError for an impossible one."""
        return Step(
            self.prompt_tokens,
            self.prefixes,
            self.session,
            self.owner,
            self.boundary_tokens,
            self.expected_output_tokens,
            forked=self.forked,
        )

    def set_loads(self, fleet: FleetView) -> None:
        """Let the fleet have the loads and the groups that the decision was made on.

        Raises ValueError for a load that is none, or of an unknown worker.
        """
        try:
            fleet.set_busy_loads(self.loads)
        except KeyError as error:
            raise ValueError(f"a load of worker {error}, which is not of its fleet") from error
        fleet.prefill_demand, fleet.groups = self.prefill_demand, self.groups


class NewerFormatError(ValueError):
    """A later version of the package wrote the line."""


class _AnyLine(msgspec.Struct):
    format: int
    kind: str = ""


_any_decoder = msgspec.json.Decoder(_AnyLine)
_decoder = msgspec.json.Decoder(DecisionRecord | FleetRecord)
_first_decoder = msgspec.json.Decoder(DecisionRecord)
"""Lines of format 1 are decisions without a kind."""


def decode(line: bytes) -> DecisionRecord | FleetRecord:
    """Return what a line says.

    Raises NewerFormatError for a line of a later version, ValueError for one that is torn or none.
    """
    try:
        head = _any_decoder.decode(line)
        if head.format > FORMAT:
            raise NewerFormatError(f"format {head.format}, this version reads up to {FORMAT}")
        return (_decoder if head.kind else _first_decoder).decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
