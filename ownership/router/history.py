"""The newest requests that a process has sent, and their sessions: what the fleet's page shows."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from hetero_connector.containers import BoundedDict
from ownership.router.doors import Refusal
from ownership.router.placer import Candidates, Placed, Placer
from ownership.router.requests import RouterRequest
from ownership.scheduling import Ledger

MAX_DECISIONS = 64
MAX_SESSIONS = 1024
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-")


class Progress(StrEnum):
    """The stages of a request."""

    PREFILLING = "prefilling"
    """It was sent, and nothing of the answer has come."""
    ANSWERING = "answering"
    ENDED = "ended"
    FAILED = "failed"
    """The worker answered with an error or was lost."""


class Decision(msgspec.Struct, eq=False):
    """One request that was sent. Times are seconds from the sending."""

    time: float
    """Unix time."""
    path: str
    """The door's name."""
    worker: str
    prefill_worker: str
    """"": the same."""
    is_stream: bool
    session: str
    trace: str
    """The W3C trace id; "" without a trace."""
    certainty: str
    reasons: Sequence[str]
    action: str
    prompt_tokens: int | None = None
    """None if no policy has placed it."""
    resume_tokens: int | None = None
    """Tokens that the worker need not compute, as predicted."""
    holder_tokens: Mapping[str, int] = {}
    """Tokens of the prompt whose state each worker has. Workers with none are left out."""
    predicted_s: float | None = None
    """Until the first token."""
    cost_s: Mapping[str, float] = {}
    """The predicted price by term."""
    progress: Progress = Progress.PREFILLING
    prefill_s: float | None = None
    """Until the end of a remote prefill."""
    prefill_problem: str = ""
    first_byte_s: float | None = None
    total_s: float | None = None
    events: int | None = None
    """Events of a stream."""


class SessionTurns(msgspec.Struct, eq=False):
    """A session, as far as this process has served it."""

    session: str
    """A digest."""
    worker: str
    """The worker at which it decoded last."""
    time: float
    """Unix time of the last change."""
    turns: int = 0
    running: int = 0
    moves: int = 0
    """Turns at another worker than the one before."""
    tokens: int = 0
    """The length of its longest prompt."""


class History:
    """A `Placer` around another one, which remembers what that has decided and what came of it."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._open: dict[Placed, tuple[Decision, float]] = {}
        """The decisions under way, and when each was sent."""
        self._sessions = BoundedDict[str, SessionTurns](MAX_SESSIONS)

    @property
    def ledger(self) -> Ledger | None:
        return self._placer.ledger

    def decisions(self) -> list[Decision]:
        """Return the newest decisions, the newest first."""
        return list(reversed(self._decisions))

    def sessions(self, most: int) -> list[SessionTurns]:
        """Return the newest sessions, the newest first."""
        return [x for _, x in zip(range(most), reversed(self._sessions.values()), strict=False)]

    async def place(self, request: RouterRequest, candidates: Candidates) -> Placed | Refusal:
        return await self._placer.place(request, candidates)

    def on_sent(self, placed: Placed, now_s: float) -> None:
        decision = _decision(placed)
        self._decisions.append(decision)
        self._open[placed] = decision, now_s
        if decision.session:
            self._begin_turn(decision)
        self._placer.on_sent(placed, now_s)

    def on_prefilled(self, placed: Placed, answer: bytes, problem: str, now_s: float) -> None:
        decision, sent_s = self._open[placed]
        decision.prefill_s, decision.prefill_problem = now_s - sent_s, problem
        self._placer.on_prefilled(placed, answer, problem, now_s)

    def on_first_byte(self, placed: Placed, now_s: float) -> None:
        decision, sent_s = self._open[placed]
        decision.first_byte_s, decision.progress = now_s - sent_s, Progress.ANSWERING
        self._placer.on_first_byte(placed, now_s)

    def on_ended(self, placed: Placed, num_events: int, now_s: float) -> None:
        self._end(placed, Progress.ENDED, num_events, now_s)
        self._placer.on_ended(placed, num_events, now_s)

    def on_failed(self, placed: Placed, now_s: float) -> None:
        self._end(placed, Progress.FAILED, 0, now_s)
        self._placer.on_failed(placed, now_s)

    def _end(self, placed: Placed, progress: Progress, num_events: int, now_s: float) -> None:
        decision, sent_s = self._open.pop(placed)
        decision.progress, decision.total_s = progress, now_s - sent_s
        decision.is_stream = placed.request.is_stream  # another proxy tells it at the end
        if decision.is_stream:
            decision.events = num_events
        session = self._sessions.get(decision.session)
        if session is not None:
            session.running = max(0, session.running - 1)
            session.time = time.time()

    def _begin_turn(self, decision: Decision) -> None:
        name = decision.session
        session = self._sessions.get(name) or SessionTurns(name, decision.worker, decision.time)
        session.moves += session.worker != decision.worker
        session.worker, session.time = decision.worker, decision.time
        session.turns += 1
        session.running += 1
        session.tokens = max(session.tokens, decision.prompt_tokens or 0)
        self._sessions[name] = session


def _decision(placed: Placed) -> Decision:
    request, prefill = placed.request, placed.prefill
    decision = Decision(
        time.time(),
        request.door.name,
        placed.worker.name,
        "" if prefill is None else prefill.worker.name,
        request.is_stream,
        placed.session_id,
        request.spans.trace_id or _trace_id(request),
        placed.certainty,
        placed.reasons,
        placed.action,
    )
    forecast = placed.forecast()
    if forecast is not None:
        decision.prompt_tokens, decision.resume_tokens = (
            forecast.prompt_tokens,
            forecast.resume_tokens,
        )
        decision.holder_tokens = {
            name: tokens for name, x in forecast.prefixes.items() if (tokens := x.local_tokens)
        }
        decision.predicted_s, decision.cost_s = forecast.ttft_s, forecast.cost_s
    return decision


def _trace_id(request: RouterRequest) -> str:
    """Return the trace id that the client has sent; "" if it has sent none."""
    for name, value in request.headers:
        if name == b"traceparent":
            found = _TRACE.match(value)
            return found[1].decode() if found else ""
    return ""
