"""What peers hold of a request's chain, where the engine's own store ends.

The directory is asked once a request, for the chunks after the last boundary that the store
could restore. Where the store holds what continues a chain that others own, and not its
beginning, what they hold of that closes the gap. What it says is believed until the request is
admitted or gives up; what could not be read is excluded by the restorer like anything else that
failed.

A request may say that another engine has just computed its prompt (`handoff`). The last
chunks may then still be on their way into the directory: it is asked again for a moment, but not
for what that engine says it has not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.peer_copy import PeerCopy
from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkRange,
    SharedTiers,
    StoredChunk,
    Tier,
    up_to_gap,
)
from hetero_connector.engine.scheduler.asking_again import AskingAgain
from hetero_connector.engine.scheduler.fleet import Fleet, Lookup
from hetero_connector.engine.scheduler.handoff import handoff_tokens, was_prefilled
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.metrics import Recorder
from hetero_connector.spec import StateType
from hetero_connector.store.base import Failure, Store

_PREFILLS_PER_LOAD = 20
"""What a prefill has left is waited for that share of a restore's deadline, half a second by
default. Sealing, summing and claiming take some 10 ms."""
_BELIEVED_S = 5.0
"""A request that waits longer than that to be admitted asks again."""


@dataclass
class _Search:
    """One request's question."""

    asked_s: float
    awaited_until_s: float
    """Until then it is asked again for what is missing; past for a request without a prefill."""
    start: int
    """Tokens before the first chunk asked for."""
    chunks: list[ChunkRange]
    """Full chunks asked for, in order."""
    tails: list[ChunkRange]
    """Short ones asked for, in any order."""
    lookup: Lookup
    here: frozenset[int]
    """Where full chunks end that the own store holds after a gap."""
    handoff: int | None
    """Up to where the engine that has prefilled it says that it is kept; 0: nothing is, or it is
    here; None: it does not say."""
    times: int = 1
    """How often it was asked."""
    is_read: bool = False
    remote: dict[int, StoredChunk] = field(default_factory=dict)
    """Full chunks at peers, by where they end."""
    remote_tails: dict[int, StoredChunk] = field(default_factory=dict)
    copies: dict[ArtifactId, PeerCopy] = field(default_factory=dict)
    others: dict[ArtifactId, list[PeerCopy]] = field(default_factory=dict)
    """Where else it can be read, best first."""

    def end(self, size: int) -> int:
        """Tokens up to which every full chunk was found, or is here after a gap."""
        end = self.start
        while end + size in self.remote or end + size in self.here:
            end += size
        return end


class PeerMatcher:
    """Asks for one engine. Without a fleet it answers that there is nothing."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: Store,
        fleet: Fleet | None,
        recorder: Recorder,
        clock: Callable[[], float],
        load_deadline_s: float,
    ) -> None:
        model = layout.model
        self._layout = layout
        self._recorder = recorder
        self._clock = clock
        self._prefill_s = load_deadline_s / _PREFILLS_PER_LOAD
        self._size = layout.chunk_tokens
        self._store = store
        # Chunks are fetched parents first: there must be something to fetch of each.
        self._fleet = fleet if model.prefix_types else None
        self._close = None if fleet is None else fleet.close
        self._model = model
        has_tails = StateType.RECURRENT not in model.state_types
        self._tail_step = model.alignment if has_tails else self._size
        self._shared = SharedTiers()
        self._again = AskingAgain(clock)
        self._searches: dict[str, _Search] = {}

    def pending(self, tracker: RequestTracker, local_tokens: int, limit: int) -> bool:
        """Whether the answer is still to come; asks when called for the first time."""
        if self._fleet is None:
            return False
        request_id = tracker.request.request_id
        search = self._searches.get(request_id)
        if search is None or self._clock() - search.asked_s > _BELIEVED_S:
            search = self._begin(self._fleet, tracker, local_tokens, limit)
            if search is None:
                self._searches.pop(request_id, None)
                return False
            self._searches[request_id] = search
        while search.lookup.done:
            if not search.is_read:
                self._read(search)
                self._ask_for_tails(self._fleet, tracker, search, limit)
            elif not self._is_awaited(search, limit):
                return False
            elif not self._again.may_ask(search.asked_s, search.times):
                return True
            else:
                again = self._begin(self._fleet, tracker, local_tokens, limit)
                if again is None:
                    return False
                again.awaited_until_s = search.awaited_until_s
                again.times = search.times + 1
                search = self._searches[request_id] = again
        return True

    def extend(self, tracker: RequestTracker, stored: list[StoredChunk]) -> list[StoredChunk]:
        """Full chunks of the own store, completed and continued by what peers hold.

        Of a gap that they do not close, chunks that hold nothing are left.
        """
        search = self._searches.get(tracker.request.request_id)
        if search is None or not search.remote:
            return stored
        first = min(search.remote)
        merged = [
            self._merged(s, search.remote.get(s.chunk.end)) if s.chunk.end >= first else s
            for s in stored
        ]
        end = merged[-1].chunk.end if merged else 0
        while (following := search.remote.get(end + self._size)) is not None:
            merged.append(following)
            end += self._size
        return merged

    def tail(self, tracker: RequestTracker, end: int, limit: int) -> list[StoredChunk]:
        """The longest short chunk that a peer holds right after `end` tokens."""
        search = self._searches.get(tracker.request.request_id)
        if search is None:
            return []
        ends = [e for e in search.remote_tails if end < e <= min(limit, end + self._size)]
        return [search.remote_tails[max(ends)]] if ends else []

    def copies(self, tracker: RequestTracker) -> Mapping[ArtifactId, PeerCopy]:
        """Where peers have what was found."""
        search = self._searches.get(tracker.request.request_id)
        return {} if search is None else search.copies

    def without_copy(
        self, tracker: RequestTracker, failed: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """Those of what could not be read that nobody else has; the others are read elsewhere."""
        search = self._searches.get(tracker.request.request_id)
        lost = []
        for artifact in failed:
            others = search.others.get(artifact) if search else None
            if search and others:
                search.copies[artifact] = others.pop(0)
            else:
                lost.append(artifact)
        return lost

    def forget(self, tracker: RequestTracker) -> None:
        """The request was admitted, or has ended."""
        self._searches.pop(tracker.request.request_id, None)

    @property
    def accepts_claims(self) -> bool:
        """True if peers, where there are any, will find what is sealed now."""
        return self._fleet is None or self._fleet.accepts_claims

    def close(self) -> None:
        """Leave the fleet."""
        if self._close is not None:
            self._close()

    def _begin(
        self, fleet: Fleet, tracker: RequestTracker, local_tokens: int, limit: int
    ) -> _Search | None:
        """None where nothing is worth asking for."""
        size = self._size
        chunks = list(tracker.chain.chunks(limit))
        stored = self._store.holdings(chunks)
        first = up_to_gap(stored, self._model.prefix_types, local_tokens)
        last_is_here = first == 0 or bool(stored[first - 1].tiers)
        if (first + 1) * size <= local_tokens or not last_is_here:
            return None  # nobody could fetch what continues chunks that are not here
        here = frozenset(s.chunk.end for s in stored[first:] if self._leads_on(s))
        while first and not self._is_whole(stored[first - 1]):
            first -= 1
        first = max(first, local_tokens // size)
        prefilled = was_prefilled(tracker.request)
        handoff = handoff_tokens(tracker.request, limit)
        if handoff and self._has_tail(tracker, handoff, first * size):
            handoff = 0
        reached = max(first * size, local_tokens)
        worth = self._tail_step if prefilled and handoff is None else size
        if limit - reached < worth and (handoff or 0) <= reached:
            return None
        wanted = chunks[first:]
        ends = {first * size, len(chunks) * size}
        tails = [tail for end in sorted(ends) for tail in self._tails(tracker, end, limit)]
        lookup = fleet.find([chunk.key for chunk in (*wanted, *tails)])
        now_s = self._clock()
        until_s = now_s + self._prefill_s if prefilled else now_s
        return _Search(now_s, until_s, first * size, wanted, tails, lookup, here, handoff)

    def _has_tail(self, tracker: RequestTracker, end: int, start: int) -> bool:
        """Whether the own store has all of the short chunk that ends at `end`, up to `start`."""
        if not start < end < start + self._size:
            return False
        return any(map(self._is_whole, self._store.match([tracker.chain.ending_at(end)])))

    def _tails(self, tracker: RequestTracker, end: int, limit: int) -> list[ChunkRange]:
        """Every short chunk that may begin at `end`."""
        step = self._tail_step
        last = min(limit, end + self._size - 1)
        ends = set(range(end + step, last + 1, step))
        handoff = handoff_tokens(tracker.request, limit)
        if handoff is not None and end < handoff <= last:
            ends.add(handoff)
        return [tracker.chain.ending_at(at) for at in sorted(ends)]

    def _read(self, search: _Search) -> None:
        found = search.lookup.found
        search.is_read = True
        for chunk, held in zip((*search.chunks, *search.tails), found, strict=False):
            held = self._sound(chunk, held)
            if not held:
                continue
            tiers, _ = self._shared.share({t: _tier_of(best) for t, (best, *_) in held.items()})
            stored = StoredChunk(chunk, tiers)
            if chunk.end - chunk.start == self._size:
                search.remote[chunk.end] = stored
            elif self._is_whole(stored):  # a tail is of use whole or not at all
                search.remote_tails[chunk.end] = stored
            for state_type, (best, *others) in held.items():
                artifact = ArtifactId(chunk.key, state_type)
                search.copies[artifact] = best
                search.others[artifact] = others

    def _is_awaited(self, search: _Search, limit: int) -> bool:
        """Whether some of what a prefill leaves is missing and still to be expected."""
        if self._clock() >= search.awaited_until_s or not search.lookup.found:
            return False  # also where nobody answers
        end, handoff = search.end(self._size), search.handoff
        kept = limit if handoff is None else handoff
        if end < kept // self._size * self._size:
            return True
        if handoff is not None:
            return handoff > end and handoff not in search.remote_tails
        last = limit - limit % self._tail_step
        # A prompt that ends on a boundary has its last one there, where nobody may resume.
        return (
            (limit + 1) % self._tail_step != 0
            and last % self._size != 0
            and (last not in search.remote_tails)
        )

    def _is_whole(self, stored: StoredChunk) -> bool:
        return self._model.is_whole(stored.tiers.keys(), stored.chunk.end)

    def _leads_on(self, stored: StoredChunk) -> bool:
        """Whether what comes after the chunk needs nothing more of it."""
        return all(t in stored.tiers for t in self._model.prefix_types)

    def _sound(
        self, chunk: ChunkRange, held: Mapping[StateType, Sequence[PeerCopy]]
    ) -> Mapping[StateType, Sequence[PeerCopy]]:
        """Without records of other sizes than the artifacts have: their checksum proves nothing."""
        sound: dict[StateType, Sequence[PeerCopy]] = {}
        refused = 0
        for state_type, copies in held.items():
            size_bytes = self._layout.artifact_bytes(state_type, chunk.start, chunk.end)
            kept = [copy for copy in copies if copy.size_bytes == size_bytes]
            refused += len(copies) - len(kept)
            if kept:
                sound[state_type] = kept
        if refused:
            self._recorder.add(
                "heterocache_failures",
                refused,
                cause=Failure.BAD_RECORD.value,
                tier=Tier.PEER.value,
            )
        return sound

    def _ask_for_tails(
        self, fleet: Fleet, tracker: RequestTracker, search: _Search, limit: int
    ) -> None:
        """After the last chunk found, if they were not asked for."""
        end = search.end(self._size)
        if not any(tail.start == end for tail in search.tails):
            tails = self._tails(tracker, end, limit)
            if tails and end > search.start:
                search.chunks, search.tails, search.is_read = [], tails, False
                search.lookup = fleet.find([chunk.key for chunk in tails])

    def _merged(self, own: StoredChunk, remote: StoredChunk | None) -> StoredChunk:
        if remote is None or own.tiers.keys() >= remote.tiers.keys():
            return own
        if not own.tiers:
            return remote
        tiers, _ = self._shared.share({**remote.tiers, **own.tiers})
        return StoredChunk(own.chunk, tiers)


def _tier_of(copy: PeerCopy) -> Tier:
    """Where it is read from: a peer's DRAM, or the SSD on which a dead engine left it."""
    return Tier.SSD if copy.storage else Tier.PEER
