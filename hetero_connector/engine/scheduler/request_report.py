"""The report of one request: what was decided for it, and what came of that.

`predictions` makes it. Status, the answer to a client that asks for it (`{"heterocache": {"report":
true}}` in `kv_transfer_params`), the log of requests and spans show it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.request import Request

NAMESPACE = "heterocache"
"""The field of `kv_transfer_params` that is ours alone, in requests and in answers."""
REPORT = "report"


class NothingRestored(StrEnum):
    """Reasons for which a request restores nothing."""

    NOTHING_STORED = "nothing_stored"
    """No state of its first tokens is stored."""
    DIRECTORY_LATE = "directory_late"
    """None is stored here, and the directory did not tell in time what peers store."""
    IN_ENGINE = "in_engine"
    """The engine's own prefix cache has everything that is stored."""
    NO_BOUNDARY = "no_boundary"
    """State is stored, but there is no boundary at which the request can resume."""
    COMPUTING_IS_FASTER = "computing_is_faster"
    """By the predicted costs."""
    TOO_LATE = "too_late"
    """Staging was predicted to miss the deadline, or missed it."""
    UNREADABLE = "unreadable"
    """No artifact of the plan could be read in time."""
    NEVER_LOAD = "never_load"
    """The planner's mode."""
    NOT_ASKED_FOR = "not_asked_for"
    """The request must not read the cache (`skip_reading_prefix_cache`)."""
    UNIDENTIFIED = "unidentified"
    """The request's adapter, items or embeddings have no known identity."""
    NOT_ADMITTED = "not_admitted"
    """vLLM did not admit the restored tokens."""
    LOAD_LOST = "load_lost"
    """The load could not be made."""
    STOPPED = "stopped"
    """The connector has stopped after a failed load, or is closed."""


class Phase(NamedTuple):
    """A part of a request's time, in seconds after the report's `time`."""

    name: str
    begin_s: float
    end_s: float
    within: str | None = None
    """The phase that it is a part of."""


class RequestReport(NamedTuple):
    """The decision for one request as made and as observed.

    `local_tokens`, the sum of `restored_tokens`, and `computed_tokens` add up to `prompt_tokens`.
    Moments are seconds after `time`; None for what did not happen.
    """

    request_id: str
    time: float
    """Seconds since the epoch, when vLLM first asked for the request."""
    queued_s: float
    """Seconds from its arrival at the server until then."""
    session: str | None
    """A name for its session: not the client's own."""
    prompt_tokens: int
    stored_tokens: int
    """The end of what was stored of it."""
    local_tokens: int | None
    """Found in the engine's own prefix cache; None: not known."""
    restored_tokens: Mapping[str, int]
    """By the farthest tier that each chunk needed."""
    computed_tokens: int | None
    """With the replayed ones; None: not known."""
    replayed_tokens: int
    """Restored tokens that were computed again to rebuild windows."""
    boundary: int
    """State of the tokens before it was restored; the local tokens if nothing was."""
    choice: str
    """The decision: `load`, `load_part`, `replay` or `compute`."""
    reason: str | None
    """A `NothingRestored` if nothing was restored."""
    is_parked: bool
    """True if it was loaded between steps, while the request waited."""
    predicted_s: float | None
    """Seconds from the decision to the first token; None if there was nothing to decide."""
    computing_s: float | None
    """The same without a restore, as predicted."""
    observed_s: float | None
    """The same, as observed; without a decision from `time`."""
    decided_s: float | None
    """The moment of the first decision; None without one."""
    staging_s: float
    """Seconds from the decision until everything was in DRAM."""
    read_s: Mapping[str, tuple[float, float]]
    """The moments at which reads from each tier began and ended, of those that the restore used."""
    admitted_s: float | None
    """The moment at which vLLM admitted it."""
    loaded_s: float | None
    """The moment at which all ranks had loaded; with layer-wise loads the end of a step."""
    first_token_s: float | None
    finished_s: float | None = None
    finish: str | None = None
    """vLLM's reason, such as `stop` or `length`."""
    output_tokens: int = 0
    preemptions: int = 0
    chain: tuple[str, int] | None = None
    """The last full chunk of the prompt that was hashed: its key in hexadecimal, and its end in
    tokens. A router compares it with its own."""

    @property
    def ended_at(self) -> float:
        """Seconds since the epoch: its end, or else its first token."""
        return self.time + (self.finished_s or self.first_token_s or 0.0)

    def phases(self) -> list[Phase]:
        """Return what the request went through, in order of time, without what took no time.

        Loads of a request that is not parked, and prefill, are at the same time.
        """
        phases = [Phase("queue", -self.queued_s, 0.0)]
        staged_s = 0.0
        if self.decided_s is not None:
            staged_s = self.decided_s + self.staging_s
            phases.append(Phase("look up", 0.0, self.decided_s))
            phases.append(Phase("stage", self.decided_s, staged_s))
            phases += [Phase(f"read {tier}", *x, "stage") for tier, x in self.read_s.items()]
        if self.admitted_s is not None:
            phases.append(Phase("wait for pages", staged_s, self.admitted_s))
            begin_s = self.admitted_s
            if self.loaded_s is not None:
                phases.append(Phase("load", self.admitted_s, self.loaded_s))
                begin_s = self.loaded_s if self.is_parked else begin_s
            if self.first_token_s is not None:
                phases.append(Phase("prefill", begin_s, self.first_token_s))
        if self.first_token_s is not None and self.finished_s is not None:
            phases.append(Phase("decode", self.first_token_s, self.finished_s))
        return [x for x in phases if x.end_s > x.begin_s]

    def ended(self, request: Request) -> RequestReport:
        """Return the report of the request, which has ended."""
        finish = request.get_finished_reason()
        return self._replace(
            finished_s=time.time() - self.time,
            finish=None if finish is None else str(finish),
            output_tokens=int(request.num_tokens) - int(request.num_prompt_tokens),
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values, which any encoder takes."""
        reason = None if self.reason is None else str(self.reason)
        changed: dict[str, Any] = {
            "restored_tokens": dict(self.restored_tokens),
            "read_s": dict(self.read_s),
            "chain": self.chain and list(self.chain),
        }
        return {**self._asdict(), **changed, "reason": reason}


def untracked(request: Request) -> RequestReport:
    """Return the report of a request of which nothing is known.

    It could not be identified, or ended before vLLM asked for it.
    """
    has_run = request.num_computed_tokens > 0
    return RequestReport(
        request_id=request.request_id,
        time=request.arrival_time,
        queued_s=0.0,
        session=None,
        prompt_tokens=int(request.num_prompt_tokens),
        stored_tokens=0,
        local_tokens=None,
        restored_tokens={},
        computed_tokens=None,
        replayed_tokens=0,
        boundary=0,
        choice="compute",
        reason=NothingRestored.UNIDENTIFIED if has_run else None,
        is_parked=False,
        predicted_s=None,
        computing_s=None,
        observed_s=None,
        decided_s=None,
        staging_s=0.0,
        read_s={},
        admitted_s=None,
        loaded_s=None,
        first_token_s=None,
    )


def is_report_wanted(request: Request) -> bool:
    """Return True if the client asks for a report.

    In place of `true` a proxy may have forwarded the report of the engine that computed the prompt.
    """
    params = request.kv_transfer_params
    own = params.get(NAMESPACE) if isinstance(params, dict) else None
    wanted = own.get(REPORT) if isinstance(own, dict) else None
    return wanted is True or isinstance(wanted, dict)


def report_answer(report: RequestReport) -> dict[str, Any]:
    """Return the `kv_transfer_params` of the answer to a client that asked for a report."""
    return {NAMESPACE: {REPORT: report.as_json()}}
