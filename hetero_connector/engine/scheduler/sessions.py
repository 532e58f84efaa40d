"""Notify the store of the sessions that requests belong to: their turns, chains and next turns.

A request names its session by vLLM's own `session_id` (the request's field, or the header
X-Session-ID) or in `kv_transfer_params`. Otherwise its session is recognised by its tokens
(`planner.sessions`). The hint for the next turn is `kv_transfer_params["expected_back_s"]`.

Clients are not trusted: an id is valid only within the request's cache salt, a hint protects state
for an hour at most, and when there are more sessions than can be remembered each salt has its
share.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, Tier
from hetero_connector.engine.scheduler import handoff
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.session_book import SessionBook, session_key, tenant_of
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.sessions import Conversations, ThinkTimes
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, staging_start_s

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.heterocache")

Mode = Literal["auto", "hint", "off"]
_PROTECTED_S = 60.0
"""Seconds for which a session's chain is protected if its think time is unknown."""
_LONGEST_PROTECTED_S = 3_600.0
"""Longest protection by a hint, in seconds. Later the chain is prefetched when it is due."""
_LONGEST_HINT_S = 30 * 86_400.0
"""Longest accepted hint, in seconds."""


class SessionHint(NamedTuple):
    """The fields of a request's `kv_transfer_params` that concern its session."""

    session_id: str | None = None
    expected_back_s: float | None = None
    """Seconds from the end of the answer to the session's next request."""

    @classmethod
    def of(cls, params: object) -> SessionHint:
        """Read the fields of `kv_transfer_params`. Other fields may be another connector's.

        Raises ValueError, which says what is expected, for a wrong type or range.
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


_FIELDS = frozenset(SessionHint._fields) | handoff.FIELDS
_NEAR = 0.8
"""Share of equal characters from which on a name is taken for a misspelt one."""


def misspelt(params: Mapping[str, object]) -> str:
    """Return a sentence about a field that is nearly one of ours; "" if there is none.

    Fields that resemble none of ours belong to other connectors.
    """
    for name in params.keys() - _FIELDS:
        if close := difflib.get_close_matches(str(name), _FIELDS, n=1, cutoff=_NEAR):
            return f"unknown field {name!r}; did you mean {close[0]!r}?"
    return ""


class Sessions:
    """Protects the chains of sessions in the store, and announces when sessions are due back.

    Used on the scheduler's thread.
    """

    def __init__(
        self,
        layout: ArtifactLayout,
        store: ArtifactStore,
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
        self.book = SessionBook()
        self._conversations = Conversations(layout.chunk_tokens, layout.model.alignment)
        self._has_warned = False

    def on_matched(self, tracker: RequestTracker) -> None:
        """Begin a turn at the request's first match; later calls change nothing."""
        if tracker.session is not None:
            return
        request = tracker.request
        session_id = request.session_id or self._hint(request).session_id
        if session_id is not None:
            tracker.session = session_key(request.cache_salt, session_id)
        else:
            tracker.session = self._conversations.take(
                tracker.chain, request.num_prompt_tokens, tracker.matched_chunks
            )
        self._think_times.on_turn_start(tracker.session, self._clock())
        self.book.on_turn_start(tracker.session, tenant_of(request.cache_salt))
        if self._mode != "off":
            self._store.session_returned(tracker.session)

    def on_finished(self, tracker: RequestTracker, computed: int) -> None:
        """End the request's turn; it has `computed` tokens in its pages."""
        session = tracker.session
        if session is None:
            return
        if isinstance(session, int):
            self._conversations.record(tracker.chain, tracker.request.num_prompt_tokens, session)
        hint_s = self._hint(tracker.request).expected_back_s
        expected = self._think_times.on_turn_end(session, self._clock(), hint_s)
        known = min(tracker.chain.num_tokens, computed)
        leaves = self._leaves(tracker, known)
        window_s = None if expected is None else (expected.earliest_s, expected.latest_s)
        self.book.on_turn_end(session, leaves, known, window_s)
        if leaves:
            now_s = self._clock()
            until_s = now_s + _PROTECTED_S if expected is None else expected.latest_s
            if hint_s is not None:
                until_s = min(until_s, now_s + _LONGEST_PROTECTED_S)
            self._store.protect_chain(
                session, leaves, until_s, tenant_of(tracker.request.cache_salt)
            )
        if expected is None or self._mode == "off" or (hint_s is None and self._mode == "hint"):
            return
        if leaves:
            start_s = staging_start_s(expected.earliest_s, self._stage_s(known))
            latest_s, probability = expected.latest_s, expected.probability
            tenant = tenant_of(tracker.request.cache_salt)
            self._store.expect(
                ExpectedReturn(session, leaves, start_s, latest_s, probability, tenant)
            )

    def _hint(self, request: Request) -> SessionHint:
        params = request.kv_transfer_params
        try:
            hint = SessionHint.of(params)
        except ValueError as error:
            self._warn_once(request, str(error))
            return SessionHint()
        if params and not self._has_warned and (problem := misspelt(params)):
            self._warn_once(request, problem)
        return hint

    def _warn_once(self, request: Request, problem: str) -> None:
        """Log the first problem: the same one may come with every request."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("kv_transfer_params of request %s: %s", request.request_id, problem)

    def _leaves(self, tracker: RequestTracker, known: int) -> tuple[ChunkKey, ...]:
        """Return the chunks at which the session may resume: tail, last chunk, prompt's last."""
        size, prompt = self._layout.chunk_tokens, min(known, tracker.request.num_prompt_tokens)
        ends = {known - known % self._model.alignment, known - known % size, prompt - prompt % size}
        return tuple(tracker.chain.ending_at(end).key for end in sorted(ends, reverse=True) if end)

    def _stage_s(self, tokens: int) -> float:
        """Return the predicted seconds to stage all state of `tokens` tokens from SSD."""
        chunks = tokens // self._layout.chunk_tokens + 1
        sizes = self._layout.max_bytes
        load_bytes = {t: float(chunks * sizes[t]) for t in self._model.prefix_types}
        load_bytes |= {t: float(sizes[t]) for t in self._model.boundary_types}
        return self._costs.load.predict(Tier.SSD, load_bytes)
