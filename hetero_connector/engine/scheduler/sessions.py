"""Notify the store of the sessions that requests belong to: their turns, chains and next turns.

A request names its session by vLLM's own `session_id` (the request's field, or the header
X-Session-ID) or in `kv_transfer_params`. Otherwise its session is recognised by its tokens
(`planner.sessions`). Its parameters say when the next turn is due, how long its chain is to stay,
whether the session has ended, and from which other session it was forked (`request_params`).

Clients are not trusted: an id is valid only within the request's cache salt, a hint protects state
for an hour at most, and when there are more sessions than can be remembered each salt has its
share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, Tier
from hetero_connector.engine.scheduler.request_identifier import adapter_name
from hetero_connector.engine.scheduler.request_params import (
    ParamsReader,
    Priority,
    RequestParams,
)
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.session_book import SessionBook
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.sessions import Conversations, ReturnWindow, ThinkTimes
from hetero_connector.session_ids import session_key, tenant_of
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import PinRefusal
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, staging_start_s

Mode = Literal["auto", "hint", "off"]
_PROTECTED_S = 60.0
"""Seconds for which a session's chain is protected if its think time is unknown."""
_LONGEST_PROTECTED_S = 3_600.0
"""Longest protection by a hint, in seconds. Later the chain is prefetched when it is due."""
_SEAL_S = 1.0
"""Seconds after which chunks that leave first are looked at: the last ones are not sealed yet."""


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
        self.params = ParamsReader()
        self._conversations = Conversations(layout.chunk_tokens, layout.model.alignment)

    def on_asked(self, tracker: RequestTracker, *, has_matched: bool) -> None:
        """Begin the request's turn, once, and let what it comes to live on.

        `has_matched`: its chain was compared with what is stored. Only then a session without a
        name can be recognised.
        """
        request, params = tracker.request, tracker.params
        if tracker.session is None:
            session_id = request.session_id or params.session_id
            if session_id is not None:
                self._begin(tracker, session_key(request.cache_salt, session_id))
            elif has_matched:
                num_tokens, matched = request.num_prompt_tokens, tracker.matched_chunks
                self._begin(tracker, self._conversations.take(tracker.chain, num_tokens, matched))
        if has_matched and not tracker.has_matched:
            tracker.has_matched = True
            if not params.limits_life:
                self._store.retention.lift_limits(_found(tracker))

    def _begin(self, tracker: RequestTracker, session: Hashable) -> None:
        tracker.session = session
        request, params = tracker.request, tracker.params
        tenant = tenant_of(request.cache_salt)
        self._think_times.on_turn_start(session, self._clock())
        self.book.on_turn_start(session, tenant, adapter_name(request))
        if params.fork is not None:
            self._fork(session, session_key(request.cache_salt, params.fork), tenant)
        if self._mode != "off":
            self._store.session_returned(session)

    def on_finished(self, tracker: RequestTracker, computed: int) -> None:
        """End the request's turn; it has `computed` tokens in its pages."""
        session, params = tracker.session, tracker.params
        if session is None:
            return
        if isinstance(session, int):
            self._conversations.record(tracker.chain, tracker.request.num_prompt_tokens, session)
        hint_s = params.expected_back_s
        expected = self._think_times.on_turn_end(session, self._clock(), hint_s)
        known = min(tracker.chain.num_tokens, computed)
        leaves = self._leaves(tracker, known)
        window_s = None if expected is None else (expected.earliest_s, expected.latest_s)
        earlier = self._earlier_ends(tracker, session, known)
        self.book.on_turn_end(session, (*leaves, *earlier), known, window_s)
        self._limit_lives(tracker)
        if params.end_session:
            self._end(session, leaves)
            return
        if leaves:
            self._pin(tracker, session, leaves)
            until_s = self._protected_until_s(params, expected)
            self._store.retention.protect_chain(
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

    def _protected_until_s(self, params: RequestParams, expected: ReturnWindow | None) -> float:
        """Return until when the session's chain leaves last, by the store's clock."""
        now_s = self._clock()
        until_s = now_s + _PROTECTED_S if expected is None else expected.latest_s
        if params.expected_back_s is not None:
            until_s = min(until_s, now_s + _LONGEST_PROTECTED_S)
        if params.priority is Priority.HIGH:
            until_s = max(until_s, now_s + _LONGEST_PROTECTED_S)
        if params.priority is Priority.LOW:
            until_s = now_s
        return until_s if params.ttl_s is None else min(until_s, now_s + params.ttl_s)

    def _fork(self, session: Hashable, parent: Hashable, tenant: bytes) -> None:
        """Let a new session use its parent's chain until its own turn ends."""
        record = self.book.find(parent)
        if record is not None and record.leaves and parent != session:
            self.book.on_fork(session, parent)
            until_s = self._clock() + _LONGEST_PROTECTED_S
            self._store.retention.protect_chain(session, record.leaves, until_s, tenant)

    def _end(self, session: Hashable, leaves: tuple[ChunkKey, ...]) -> None:
        """Expect the session no more, and let its own state leave first."""
        self._think_times.forget(session)
        self._store.retention.retire_session(session, leaves)
        self.book.forget(session)

    def _pin(self, tracker: RequestTracker, session: Hashable, leaves: Sequence[ChunkKey]) -> None:
        """Pin the chain if the request says so; else an earlier pin keeps what was added."""
        request, seconds = tracker.request, tracker.params.pin_s
        if seconds is None:
            self._store.retention.move_pin(session, leaves)
        elif not seconds:
            self._store.retention.unpin_chain(session)
        else:
            tenant = tenant_of(request.cache_salt)
            pinned = self._store.retention.pin_chain(session, leaves, seconds, tenant)
            if isinstance(pinned, PinRefusal):
                self.params.warn_refused("pin_s", request.request_id, pinned.value)

    def _limit_lives(self, tracker: RequestTracker) -> None:
        """Let what only this request stored leave when its parameters say."""
        ttl_s, chunks = tracker.params.ttl_s, tracker.new_chunks
        if chunks:
            seconds = _SEAL_S if ttl_s is None else ttl_s
            self._store.retention.limit_life(chunks, seconds, is_forgotten=ttl_s is not None)

    def _leaves(self, tracker: RequestTracker, known: int) -> tuple[ChunkKey, ...]:
        """Return the chunks at which the session may resume: tail, last chunk, prompt's last."""
        size, prompt = self._layout.chunk_tokens, min(known, tracker.request.num_prompt_tokens)
        ends = {known - known % self._model.alignment, known - known % size, prompt - prompt % size}
        return tuple(tracker.chain.ending_at(end).key for end in sorted(ends, reverse=True) if end)

    def _earlier_ends(
        self, tracker: RequestTracker, session: Hashable, known: int
    ) -> Iterator[ChunkKey]:
        """Yield where the session's chains ended before, if this one does not go on from there."""
        size, record = self._layout.chunk_tokens, self.book.find(session)
        for chunk in self._store.known(record.leaves if record else ()):
            is_full = chunk.end <= known and chunk.end % size == 0
            if not is_full or tracker.chain.ending_at(chunk.end).key != chunk.key:
                yield chunk.key

    def _stage_s(self, tokens: int) -> float:
        """Return the predicted seconds to stage all state of `tokens` tokens from SSD."""
        chunks = tokens // self._layout.chunk_tokens + 1
        sizes = self._layout.max_bytes
        load_bytes = {t: float(chunks * sizes[t]) for t in self._model.prefix_types}
        load_bytes |= {t: float(sizes[t]) for t in self._model.boundary_types}
        return self._costs.load.predict(Tier.SSD, load_bytes)


def _found(tracker: RequestTracker) -> Iterator[ChunkKey]:
    """Yield the chunks that were found stored, the deepest first."""
    if tracker.restore is not None:
        yield tracker.restore.plan.chunks[-1].chunk.key
    yield from tracker.chain.keys_back_from(tracker.matched_chunks)
