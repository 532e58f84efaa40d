"""Asks the directory which peers have a chain, without ever blocking.

An answer that is not there by its deadline counts as no answer. After that, no request waits for
an answer until the directory has answered in time again. So a directory that is slow or down costs
one request its deadline, not every request. A request waits in the engine's queue, not in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from ownership.directory import ChainView, Copy, Directory
from ownership.directory.breaker import CircuitBreaker
from ownership.directory.identifiers import Epoch, Token
from ownership.member.directory_thread import DirectoryThread
from ownership.member.lease_keeper import LeaseKeeper
from ownership.member.live_peers import LivePeers

DEADLINE_S = 0.1
"""A chain that can be computed in less time is hardly worth a question."""
_CHUNKS_PER_DEADLINE = 1_024
"""The deadline is longer by itself for each so many chunks, because their records are decoded
before the answer is there: five times as long for a million tokens, which take minutes to compute.
"""

ChunkCopies = Mapping[StateType, Sequence[PeerCopy]]
"""At least one copy of each state type, the owner's first."""


class ChainLookup:
    """One question to the directory. Implements the `Lookup` port of the engine's `fleet`."""

    def __init__(
        self,
        answer: Future[list[ChunkCopies]] | None,
        until_s: float,
        clock: Callable[[], float],
        on_late: Callable[[], None],
    ) -> None:
        """`answer`: None if nothing is asked. `on_late`: called once if `until_s` passes first."""
        self._answer = answer
        self._until_s = until_s
        self._clock = clock
        self._on_late = on_late

    def poll(self) -> bool:
        """Return True once there is an answer or its deadline has passed. Never blocks.

        An answer that is late is discarded, and reported to the circuit breaker.
        """
        if self._answer is None or self._answer.done():
            return True
        if self._clock() < self._until_s:
            return False
        self._answer = None
        self._on_late()
        return True

    @property
    def found(self) -> Sequence[ChunkCopies]:
        """The readable copies of each chunk asked for; empty without an answer."""
        answer = self._answer
        if answer is None or not answer.done() or answer.exception() is not None:
            return ()
        return answer.result()


class _Question(NamedTuple):
    asked_s: float
    deadline_s: float


class ChainLookups:
    """Asks for one engine, on its scheduler's thread."""

    def __init__(
        self,
        thread: DirectoryThread,
        keeper: LeaseKeeper,
        peers: LivePeers,
        recorder: Recorder,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        on_found_own: Callable[[Mapping[ArtifactId, Token]], None] = lambda _: None,
        may_adopt_from: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`deadline_s`: how long a request waits for an answer about a short chain. `on_found_own`:
        called on the directory's thread with artifacts that the directory says this worker owns.
        `may_adopt_from`: returns True for a storage whose orphaned artifacts may be read here.
        """
        self._thread = thread
        self._keeper = keeper
        self._peers = peers
        self._recorder = recorder
        self._deadline_s = deadline_s
        self._clock = clock
        self._on_found_own = on_found_own
        self._may_adopt_from = may_adopt_from
        self._breaker = CircuitBreaker(clock)

    def find(self, chain: Sequence[ChunkKey]) -> ChainLookup:
        """Ask which peers have copies of these chunks. Returns at once."""
        now_s = self._clock()
        lease = self._keeper.lease
        if lease is None or not lease.is_valid:
            return self._not_asked("alone")
        factor = 1.0 + len(chain) / _CHUNKS_PER_DEADLINE
        question = _Question(now_s, factor * self._deadline_s)
        if self._breaker.is_open:
            if not self._breaker.admit():
                # A timely answer closes the breaker. This request does not wait for it.
                self._ask(chain, question)
            return self._not_asked("paused")
        answer = self._ask(chain, question)
        on_late = partial(self._breaker.on_failure, now_s)
        return ChainLookup(answer, now_s + question.deadline_s, self._clock, on_late)

    def _not_asked(self, outcome: str) -> ChainLookup:
        self._recorder.add("heterocache_directory_lookups", outcome=outcome)
        return ChainLookup(None, 0.0, self._clock, lambda: None)

    def _ask(self, chain: Sequence[ChunkKey], question: _Question) -> Future[list[ChunkCopies]]:
        asked_s = question.asked_s

        def look_up(directory: Directory, own: Epoch) -> list[ChunkCopies]:
            view = directory.lookup(chain)
            return self._readable(directory, view, chain, own, asked_s)

        answer = self._thread.ask(look_up, question.deadline_s)
        answer.add_done_callback(lambda done: self._on_answer(done, question))
        return answer

    def _on_answer(self, answer: Future[list[ChunkCopies]], question: _Question) -> None:
        """Count the outcome. Called on the directory's thread."""
        seconds = self._clock() - question.asked_s
        if answer.exception() is not None:
            outcome = "failed"
        elif seconds > question.deadline_s:
            outcome = "late"
        else:
            outcome = "found" if any(answer.result()) else "nothing"
            self._breaker.on_success()
        if outcome in ("failed", "late"):
            self._breaker.on_failure(question.asked_s)
        self._recorder.observe("heterocache_directory_lookup_seconds", seconds)
        self._recorder.add("heterocache_directory_lookups", outcome=outcome)

    def _readable(
        self,
        directory: Directory,
        view: ChainView,
        chain: Sequence[ChunkKey],
        own: Epoch,
        asked_s: float,
    ) -> list[ChunkCopies]:
        """Return the copies in other workers' DRAM, and those that ended workers left on SSD."""
        found: list[ChunkCopies] = []
        holders: set[Epoch] = set()
        ended: set[Epoch] = set()
        owned: dict[ArtifactId, Token] = {}
        seen: dict[ArtifactId, Token] = {}
        for key, records in zip(chain, view.chunks, strict=True):
            copies: dict[StateType, list[PeerCopy]] = {}
            for state_type, record in records.items():
                tokens = owned if record.owner == own else seen
                tokens[ArtifactId(key, state_type)] = record.token
                for holder, token, copy in view.copies_in(record):
                    if holder == own or copy.dram_offset < 0:
                        continue
                    holders.add(holder)
                    listed = _peer_copy(copy, holder, token, asked_s)
                    copies.setdefault(state_type, []).append(listed)
                storage = view.adoptable_in(record)
                if storage and self._may_adopt_from(storage):
                    ended.add(record.owner)
                    orphan = _peer_copy(record.copy, record.owner, record.token, asked_s, storage)
                    copies.setdefault(state_type, []).append(orphan)
            found.append(copies)
        self._peers.note_tokens(seen)
        if owned:
            self._on_found_own(owned)
        # The records name workers that joined or ended since the directory was asked for them.
        if not all(map(self._peers.was_live, holders)) or any(map(self._peers.was_live, ended)):
            refreshed_s = self._clock()
            self._peers.refresh(directory.workers(), refreshed_s)
        return found


def _peer_copy(
    copy: Copy, holder: Epoch, token: Token, asked_s: float, storage: str = ""
) -> PeerCopy:
    return PeerCopy(
        holder,
        -1 if storage else copy.dram_offset,
        copy.generation,
        copy.size_bytes,
        copy.checksum,
        token,
        asked_s,
        storage,
    )
