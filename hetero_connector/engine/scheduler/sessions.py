"""Sessions as the engine sees them: when a turn begins and ends, and what clients say.

A request names its session by vLLM's own `session_id` (the request's field, or the header
X-Session-ID) or by `kv_transfer_params`; else it is told by its tokens
(`planner.conversations`). The hint is `kv_transfer_params["expected_back_s"]`.

Clients say what they like: an id counts within its request's cache salt only, a hint keeps state
for an hour at most, and where more sessions are heard of than are remembered each salt has its
share.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, Tier
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.sessions import Conversations, ThinkTimes
from hetero_connector.store.base import Store
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, staging_start_s

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.heterocache")

Mode = Literal["auto", "hint", "off"]
_READ_S = 60.0
"""How long a session's chain is kept for it where nothing is known of its pace, in seconds."""
_LONGEST_KEPT_S = 3_600.0
"""No hint makes a session's chain leave last for longer: it is staged again when it is due."""
_LONGEST_HINT_S = 30 * 86_400.0
"""What is farther off than a month says nothing, and would say how wrong hints can be."""


class SessionHint(NamedTuple):
    """What a request's `kv_transfer_params` say of its session."""

    session_id: str | None = None
    expected_back_s: float | None = None
    """Seconds from the end of the answer to the session's next request."""

    @classmethod
    def of(cls, params: object) -> SessionHint:
        """Other fields are left alone: they may be another connector's.

        ValueError, saying what is expected, for a field of a wrong type or out of range.
        """
        if not isinstance(params, dict):
            return cls()
        session_id, back_s = params.get("session_id"), params.get("expected_back_s")
        if session_id is not None and not isinstance(session_id, str):
            raise ValueError(f"session_id must be a string, got {session_id!r}")
        if back_s is not None:
            number = isinstance(back_s, (int, float)) and not isinstance(back_s, bool)
            if not number or not 0 <= back_s <= _LONGEST_HINT_S:
                raise ValueError(
                    f"expected_back_s must be seconds from 0 to {_LONGEST_HINT_S:.0f}, "
                    f"got {back_s!r}"
                )
            back_s = float(back_s)
        return cls(session_id or None, back_s)


class Sessions:
    """Tells the store whose chains are read, and which sessions are expected back.

    On the scheduler's thread.
    """

    def __init__(
        self,
        layout: ArtifactLayout,
        store: Store,
        costs: CostModel,
        think_times: ThinkTimes,
        clock: Callable[[], float],
        mode: Mode,
    ) -> None:
        """`clock`: the store's."""
        self._layout = layout
        self._model = layout.model
        self._store = store
        self._costs = costs
        self._think_times = think_times
        self._clock = clock
        self._mode = mode
        self._conversations = Conversations(layout.chunk_tokens, layout.model.alignment)
        self._complained = False

    def began(self, tracker: RequestTracker) -> None:
        """The request has been matched for the first time; later calls change nothing."""
        if tracker.session is not None:
            return
        request = tracker.request
        session_id = request.session_id or self._hint(request).session_id
        if session_id is not None:
            tracker.session = _digest(encode([request.cache_salt, session_id]))
        else:
            tracker.session = self._conversations.take(
                tracker.chain, request.num_prompt_tokens, tracker.matched_chunks
            )
        self._think_times.on_turn_start(tracker.session, self._clock())
        if self._mode != "off":
            self._store.came_back(tracker.session)

    def ended(self, tracker: RequestTracker, computed: int) -> None:
        """The request is over, with `computed` tokens in its pages."""
        session = tracker.session
        if session is None:
            return
        if isinstance(session, int):
            self._conversations.record(tracker.chain, tracker.request.num_prompt_tokens, session)
        hint_s = self._hint(tracker.request).expected_back_s
        expected = self._think_times.on_turn_end(session, self._clock(), hint_s)
        known = min(tracker.chain.num_tokens, computed)
        leaves = self._leaves(tracker, known)
        if leaves:
            now_s = self._clock()
            until_s = now_s + _READ_S if expected is None else expected.latest_s
            if hint_s is not None:
                until_s = min(until_s, now_s + _LONGEST_KEPT_S)
            self._store.reads(session, leaves, until_s, _tenant(tracker.request))
        if expected is None or self._mode == "off" or (hint_s is None and self._mode == "hint"):
            return
        if leaves:
            start_s = staging_start_s(expected.earliest_s, self._stage_s(known))
            latest_s, probability = expected.latest_s, expected.probability
            tenant = _tenant(tracker.request)
            self._store.expect(
                ExpectedReturn(session, leaves, start_s, latest_s, probability, tenant)
            )

    def _hint(self, request: Request) -> SessionHint:
        try:
            return SessionHint.of(request.kv_transfer_params)
        except ValueError as error:
            if not self._complained:  # once: it may come with every request
                self._complained = True
                logger.warning("kv_transfer_params of request %s: %s", request.request_id, error)
            return SessionHint()

    def _leaves(self, tracker: RequestTracker, known: int) -> tuple[ChunkKey, ...]:
        """Where the request's chain may end: its tail, its last chunk, its prompt's last."""
        size, prompt = self._layout.chunk_tokens, min(known, tracker.request.num_prompt_tokens)
        ends = {known - known % self._model.alignment, known - known % size, prompt - prompt % size}
        return tuple(tracker.chain.ending_at(end).key for end in sorted(ends, reverse=True) if end)

    def _stage_s(self, tokens: int) -> float:
        """Predicted seconds to stage all state of so many tokens."""
        chunks = tokens // self._layout.chunk_tokens + 1
        sizes = self._layout.max_bytes
        load_bytes = {t: float(chunks * sizes[t]) for t in self._model.prefix_types}
        load_bytes |= {t: float(sizes[t]) for t in self._model.boundary_types}
        return self._costs.load.predict(Tier.SSD, load_bytes)


def _tenant(request: Request) -> bytes:
    """Whose request it is: what shares a cache salt shares state."""
    return b"" if request.cache_salt is None else _digest(encode(request.cache_salt))


def _digest(text: bytes) -> bytes:
    """Clients choose ids and salts: only so much of each is kept."""
    return hashlib.blake2b(text, digest_size=16).digest()
