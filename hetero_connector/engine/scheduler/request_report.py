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
    """The request's adapter or a media item has no known identity."""
    NOT_ADMITTED = "not_admitted"
    """vLLM did not admit the restored tokens."""
    LOAD_LOST = "load_lost"
    """The load could not be made."""
    STOPPED = "stopped"
    """The connector has stopped after a failed load, or is closed."""


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
    staging_s: float
    """Seconds until everything was in DRAM."""
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
        return {**self._asdict(), "restored_tokens": dict(self.restored_tokens), "reason": reason}


def unidentified(request: Request) -> RequestReport:
    """Return the report of a request that could not be identified: nothing is known of it."""
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
        reason=NothingRestored.UNIDENTIFIED,
        is_parked=False,
        predicted_s=None,
        computing_s=None,
        observed_s=None,
        staging_s=0.0,
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
