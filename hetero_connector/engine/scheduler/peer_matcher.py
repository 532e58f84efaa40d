"""Find the chunks that peers store of a request's chain, after the end of the engine's own store.

The directory is asked once per request, for the chunks after the last boundary that the own store
can restore. If the own store has later chunks but lacks some before them, peers may fill the gap.
The answer is used until the request is admitted or gives up. The restorer excludes copies that
could not be read, like other failed artifacts.

A request may say that another engine has just computed its prompt (`handoff`). Its last chunks may
not be in the directory yet. So the directory is asked again for up to half a second, but not for
chunks that the other engine says it has not stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkRange,
    SharedTiers,
    StoredChunk,
    Tier,
    num_unbroken,
)
from hetero_connector.engine.scheduler.fleet import Fleet, Lookup
from hetero_connector.engine.scheduler.handoff import handoff_tokens, was_prefilled
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.metrics import Recorder
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure

_HANDOFF_SHARE = 20
"""The chunks of a handoff are waited for up to a twentieth of a restore's deadline, by default half
a second. The other engine needs about 10 ms to seal them, sum their bytes and claim them."""
_ANSWER_VALID_S = 5.0
"""A request that is not admitted within this time asks again."""

_RETRY_PAUSE_S = 0.01
_QUICK_RETRIES = 5
"""Retries before the pauses double: a claim takes about 10 ms."""
_RETRIES_PER_S = 200.0
_RETRY_BURST = 50.0


class RetryLimit:
    """Limits the lookups that one engine repeats for handoffs.

    Any client can say that its prompt was prefilled elsewhere. So the pauses between the retries of
    one request grow, and all requests together have a limited rate.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = _RETRY_BURST
        self._counted_s = clock()

    def try_acquire(self, asked_s: float, asked: int) -> bool:
        """Take one retry for a request that asked `asked` times, last at `asked_s`; False: wait."""
        now_s = self._clock()
        if now_s < asked_s + _RETRY_PAUSE_S * 2.0 ** max(0, asked - _QUICK_RETRIES):
            return False
        self._left = min(_RETRY_BURST, self._left + _RETRIES_PER_S * (now_s - self._counted_s))
        self._counted_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass
class _Search:
    """The directory's answer for one request, or the lookup that waits for it."""

    asked_s: float
    retry_until_s: float
    """Missing chunks of a handoff are looked up again until then."""
    start: int
    """Tokens before the first chunk looked up."""
    chunks: list[ChunkRange]
    """Full chunks looked up, in order."""
    tails: list[ChunkRange]
    """Short chunks looked up, and a full one that ends after the last token to restore; in any
    order."""
    lookup: Lookup
    local_ends: frozenset[int]
    """Ends of the full chunks that the own store has after a gap."""
    handoff: int | None
    """Tokens that the prefilling engine says it has stored; 0: none, or all are here; None: it
    does not say."""
    asked: int = 1
    """Number of lookups so far."""
    is_read: bool = False
    """True once the answer of `lookup` has been taken over."""
    earlier: _Search | None = None
    """The search that `lookup` repeats, until it is answered. Used if it is not."""
    remote: dict[int, StoredChunk] = field(default_factory=dict)
    """Full chunks at peers, by their end."""
    remote_tails: dict[int, StoredChunk] = field(default_factory=dict)
    """Chunks of `tails` at peers, by their end."""
    copies: dict[ArtifactId, PeerCopy] = field(default_factory=dict)
    spare_copies: dict[ArtifactId, list[PeerCopy]] = field(default_factory=dict)
    """Further copies of an artifact, best first."""

    def end(self, size: int) -> int:
        """Tokens up to which every full chunk was found at a peer, or is here after a gap."""
        end = self.start
        while end + size in self.remote or end + size in self.local_ends:
            end += size
        return end


class PeerMatcher:
    """Matches the chains of one engine's requests at its peers. Without a fleet it finds none."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: ArtifactStore,
        fleet: Fleet | None,
        recorder: Recorder,
        clock: Callable[[], float],
        load_deadline_s: float,
    ) -> None:
        model = layout.model
        self._layout = layout
        self._recorder = recorder
        self._clock = clock
        self._handoff_s = load_deadline_s / _HANDOFF_SHARE
        self._size = layout.chunk_tokens
        self._store = store
        # Chunks are fetched parents first, so each must have prefix-proportional state.
        self._fleet = fleet if model.prefix_types else None
        self._close = None if fleet is None else fleet.close
        self._model = model
        has_tails = StateType.RECURRENT not in model.state_types
        self._tail_step = model.alignment if has_tails else self._size
        self._shared = SharedTiers()
        self._retries = RetryLimit(clock)
        self._searches: dict[str, _Search] = {}
        self._nothing_to_ask: dict[str, tuple[float, int, int]] = {}
        """(clock time until which it is true, local tokens, limit) of requests without a search."""

    def search(self, tracker: RequestTracker, local_tokens: int, limit: int) -> bool:
        """Search the first `limit` tokens of the request's chain; return True when that is done.

        The first call starts the search. Never blocks.
        """
        if self._fleet is None:
            return True
        request_id, now_s = tracker.request.request_id, self._clock()
        search = self._searches.get(request_id)
        if search is None or now_s - search.asked_s > _ANSWER_VALID_S:
            until_s, *place = self._nothing_to_ask.get(request_id, (-math.inf, 0, 0))
            if now_s <= until_s and place == [local_tokens, limit]:
                return True
            search = self._start_search(self._fleet, tracker, local_tokens, limit)
            if search is None:
                self.forget(tracker)
                until_s = now_s + _ANSWER_VALID_S
                self._nothing_to_ask[request_id] = until_s, local_tokens, limit
                return True
            self._searches[request_id] = search
        while search.lookup.poll():
            if search.earlier is not None and not search.lookup.found:
                self._searches[request_id] = search.earlier
                return True
            if not search.is_read:
                self._read_answer(search)
                tracker.lacks_answer = not search.lookup.found
                self._look_up_tails(self._fleet, tracker, search, limit)
            elif not self._is_incomplete(search, limit):
                return True
            elif not self._retries.try_acquire(search.asked_s, search.asked):
                return False
            else:
                again = self._start_search(self._fleet, tracker, local_tokens, limit)
                if again is None:
                    return True
                again.retry_until_s = search.retry_until_s
                again.asked = search.asked + 1
                again.earlier = search
                search = self._searches[request_id] = again
        return False

    def extend(self, tracker: RequestTracker, stored: list[StoredChunk]) -> list[StoredChunk]:
        """Return the own store's full chunks, completed and continued by those of peers.

        Chunks of which nothing is stored anywhere stay in the list.
        """
        search = self._searches.get(tracker.request.request_id)
        if search is None or not search.remote:
            return stored
        first = min(search.remote)
        merged = [
            self._merge(s, search.remote.get(s.chunk.end)) if s.chunk.end >= first else s
            for s in stored
        ]
        end = merged[-1].chunk.end if merged else 0
        while (following := search.remote.get(end + self._size)) is not None:
            merged.append(following)
            end += self._size
        return merged

    def tail(self, tracker: RequestTracker, end: int, limit: int) -> list[StoredChunk]:
        """Return the longest short chunk that a peer has right after `end` tokens, if any."""
        search = self._searches.get(tracker.request.request_id)
        if search is None:
            return []
        ends = [e for e in search.remote_tails if end < e <= min(limit, end + self._size)]
        return [search.remote_tails[max(ends)]] if ends else []

    def chunk_beyond(self, tracker: RequestTracker, end: int, limit: int) -> list[StoredChunk]:
        """Return the longest chunk that a peer has from `end` to after `limit` tokens, if any."""
        search = self._searches.get(tracker.request.request_id)
        if search is None:
            return []
        ends = [e for e in search.remote_tails if limit < e <= end + self._size]
        return [search.remote_tails[max(ends)]] if ends else []

    def copies(self, tracker: RequestTracker) -> Mapping[ArtifactId, PeerCopy]:
        """Return the place of each artifact found at peers."""
        search = self._searches.get(tracker.request.request_id)
        return {} if search is None else search.copies

    def switch_copies(
        self, tracker: RequestTracker, failed: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """Switch artifacts that could not be read to a spare copy; return those without one."""
        self._nothing_to_ask.pop(tracker.request.request_id, None)  # peers may have them
        search = self._searches.get(tracker.request.request_id)
        lost = []
        for artifact in failed:
            spares = search.spare_copies.get(artifact) if search else None
            if search and spares:
                search.copies[artifact] = spares.pop(0)
            else:
                lost.append(artifact)
        return lost

    def forget(self, tracker: RequestTracker) -> None:
        """Drop the search of a request that was admitted or has ended."""
        self._searches.pop(tracker.request.request_id, None)
        self._nothing_to_ask.pop(tracker.request.request_id, None)

    @property
    def accepts_claims(self) -> bool:
        """True if peers, where there are any, will find what is sealed now."""
        return self._fleet is None or self._fleet.accepts_claims

    def close(self) -> None:
        """Leave the fleet."""
        if self._close is not None:
            self._close()

    def _start_search(
        self, fleet: Fleet, tracker: RequestTracker, local_tokens: int, limit: int
    ) -> _Search | None:
        """Look up the chunks that are worth it; None if there are none."""
        size = self._size
        chunks = list(tracker.chain.chunks(limit))
        stored = self._store.holdings(chunks)
        first = num_unbroken(stored, self._model.prefix_types, local_tokens)
        last_is_here = first == 0 or bool(stored[first - 1].tiers)
        if (first + 1) * size <= local_tokens or not last_is_here:
            return None  # chunks cannot be fetched without their parents
        local_ends = frozenset(s.chunk.end for s in stored[first:] if self._has_prefix_state(s))
        while first and not self._is_whole(stored[first - 1]):
            first -= 1
        first = max(first, local_tokens // size)
        prefilled = was_prefilled(tracker.request)
        handoff = handoff_tokens(tracker.request, limit)
        if handoff and self._has_tail(tracker, handoff, first * size):
            handoff = 0
        reached = max(first * size, local_tokens)
        least = self._tail_step if prefilled and handoff is None else size
        if limit - reached < least and (handoff or 0) <= reached:
            return None
        wanted = chunks[first:]
        ends = {first * size, len(chunks) * size}
        tails = [tail for end in sorted(ends) for tail in self._possible_tails(tracker, end, limit)]
        lookup = fleet.find([chunk.key for chunk in (*wanted, *tails)])
        now_s = self._clock()
        until_s = now_s + self._handoff_s if prefilled else now_s
        return _Search(now_s, until_s, first * size, wanted, tails, lookup, local_ends, handoff)

    def _has_tail(self, tracker: RequestTracker, end: int, start: int) -> bool:
        """True if the own store has all of the short chunk from `start` to `end`."""
        if not start < end < start + self._size:
            return False
        return any(map(self._is_whole, self._store.match([tracker.chain.ending_at(end)])))

    def _possible_tails(self, tracker: RequestTracker, end: int, limit: int) -> list[ChunkRange]:
        """Return every chunk that may begin at `end` and ends the restore: short, or cut."""
        step = self._tail_step
        last = min(limit, end + self._size - 1)
        ends = set(range(end + step, last + 1, step))
        if self._model.last_cut(limit) > end:
            beyond = limit + 1 + -(limit + 1) % step
            ends.update(range(beyond, min(tracker.chain.num_tokens, end + self._size) + 1, step))
        handoff = handoff_tokens(tracker.request, limit)
        if handoff is not None and end < handoff <= last:
            ends.add(handoff)
        return [tracker.chain.ending_at(at) for at in sorted(ends)]

    def _read_answer(self, search: _Search) -> None:
        found = search.lookup.found
        search.is_read, search.earlier = True, None
        looked_up = (*search.chunks, *search.tails)
        for index, (chunk, records) in enumerate(zip(looked_up, found, strict=False)):
            copies = self._without_wrong_sizes(chunk, records)
            if not copies:
                continue
            tiers, _ = self._shared.share({t: _tier_of(best) for t, (best, *_) in copies.items()})
            stored = StoredChunk(chunk, tiers)
            if index < len(search.chunks):
                search.remote[chunk.end] = stored
            elif self._is_whole(stored):  # a tail is of use only with all of its state
                search.remote_tails[chunk.end] = stored
            for state_type, (best, *spares) in copies.items():
                artifact = ArtifactId(chunk.key, state_type)
                search.copies[artifact] = best
                search.spare_copies[artifact] = spares

    def _is_incomplete(self, search: _Search, limit: int) -> bool:
        """True if chunks of a handoff are missing that may still come into the directory."""
        if self._clock() >= search.retry_until_s or not search.lookup.found:
            return False  # too late, or the directory does not answer
        end, handoff = search.end(self._size), search.handoff
        expected = limit if handoff is None else handoff
        if end < expected // self._size * self._size:
            return True
        if handoff is not None:
            return handoff > end and handoff not in search.remote_tails
        if (limit + 1) % self._tail_step == 0:
            # The prompt ends on a boundary and has its last state there, where no request may
            # resume: it is of use only if it can be cut.
            return end < self._model.last_cut(limit) and limit + 1 not in search.remote_tails
        last = limit - limit % self._tail_step
        return last % self._size != 0 and last not in search.remote_tails

    def _is_whole(self, stored: StoredChunk) -> bool:
        return self._model.is_complete(stored.tiers.keys(), stored.chunk.end)

    def _has_prefix_state(self, stored: StoredChunk) -> bool:
        """True if the chunk has all the state that chunks after it need."""
        return all(t in stored.tiers for t in self._model.prefix_types)

    def _without_wrong_sizes(
        self, chunk: ChunkRange, records: Mapping[StateType, Sequence[PeerCopy]]
    ) -> Mapping[StateType, Sequence[PeerCopy]]:
        """Return the copies of the right size. A checksum over other bytes would prove nothing."""
        right: dict[StateType, Sequence[PeerCopy]] = {}
        refused = 0
        for state_type, copies in records.items():
            size_bytes = self._layout.artifact_bytes(state_type, chunk.start, chunk.end)
            kept = [copy for copy in copies if copy.size_bytes == size_bytes]
            refused += len(copies) - len(kept)
            if kept:
                right[state_type] = kept
        if refused:
            self._recorder.add(
                "heterocache_failures",
                refused,
                cause=Failure.BAD_RECORD.value,
                tier=Tier.PEER.value,
            )
        return right

    def _look_up_tails(
        self, fleet: Fleet, tracker: RequestTracker, search: _Search, limit: int
    ) -> None:
        """Look up the short chunks after the last full chunk found, if the search has not."""
        end = search.end(self._size)
        if not any(tail.start == end for tail in search.tails):
            tails = self._possible_tails(tracker, end, limit)
            if tails and end > search.start:
                search.chunks, search.tails, search.is_read = [], tails, False
                search.lookup = fleet.find([chunk.key for chunk in tails])

    def _merge(self, own: StoredChunk, remote: StoredChunk | None) -> StoredChunk:
        if remote is None or own.tiers.keys() >= remote.tiers.keys():
            return own
        if not own.tiers:
            return remote
        tiers, _ = self._shared.share({**remote.tiers, **own.tiers})
        return StoredChunk(own.chunk, tiers)


def _tier_of(copy: PeerCopy) -> Tier:
    """Return the tier that a copy is read from: a peer's DRAM, or the SSD of a dead engine."""
    return Tier.SSD if copy.storage else Tier.PEER
