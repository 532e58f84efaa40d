"""Asking the directory what peers hold of a chain, without ever waiting for it.

An answer that does not come in time is no answer. After one that did not come, others are not
waited for until the directory has answered in time again: a directory that is slow or gone costs
a request its deadline once, not every request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from hetero_connector.artifacts.peer_copy import PeerCopy
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
"""A chain that takes less to compute is hardly worth asking for."""

ChunkCopies = Mapping[StateType, Sequence[PeerCopy]]
"""By state type, the owner's copy first. At least one each."""


class ChainLookup:
    """One question under way. Implements `hetero_connector.engine.scheduler.fleet.Lookup`."""

    def __init__(
        self,
        answer: Future[list[ChunkCopies]] | None,
        until_s: float,
        clock: Callable[[], float],
        too_late: Callable[[], None],
    ) -> None:
        """`answer`: None where nothing is asked. `too_late`: called once if it does not come."""
        self._answer = answer
        self._until_s = until_s
        self._clock = clock
        self._too_late = too_late

    @property
    def done(self) -> bool:
        """Whether there is an answer, or none is waited for any more."""
        if self._answer is None or self._answer.done():
            return True
        if self._clock() < self._until_s:
            return False
        self._answer = None
        self._too_late()
        return True

    @property
    def found(self) -> Sequence[ChunkCopies]:
        """What can be read of each chunk asked for; empty where there was no answer."""
        answer = self._answer
        if answer is None or not answer.done() or answer.exception() is not None:
            return ()
        return answer.result()


@dataclass
class _Asked:
    """A question."""

    asked_s: float
    failed: bool = False


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
        found_own: Callable[[Mapping[ArtifactId, Token]], None] = lambda _: None,
        may_adopt_from: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`deadline_s`: how long an answer is waited for. `found_own`: told, on the directory's
        thread, of artifacts that the directory says are this worker's. `may_adopt_from`: whether
        what a dead worker left on a storage may be read here.
        """
        self._thread = thread
        self._keeper = keeper
        self._peers = peers
        self._recorder = recorder
        self._deadline_s = deadline_s
        self._clock = clock
        self._found_own = found_own
        self._may_adopt_from = may_adopt_from
        self._breaker = CircuitBreaker(clock)

    def find(self, chain: Sequence[ChunkKey]) -> ChainLookup:
        """What peers hold of these chunks."""
        now_s = self._clock()
        lease = self._keeper.lease
        if lease is None or not lease.is_valid:
            return self._nothing("alone")
        if self._breaker.is_open:
            if not self._breaker.admit():
                self._ask(chain, _Asked(now_s))  # not waited for: it tells whether to ask again
            return self._nothing("paused")
        asked = _Asked(now_s)
        answer = self._ask(chain, asked)
        too_late = partial(self._failed, asked)
        return ChainLookup(answer, now_s + self._deadline_s, self._clock, too_late)

    def _nothing(self, outcome: str) -> ChainLookup:
        self._recorder.add("heterocache_directory_lookups", outcome=outcome)
        return ChainLookup(None, 0.0, self._clock, lambda: None)

    def _failed(self, asked: _Asked) -> None:
        """A question's answer did not come in time: it counts once, whoever notices first."""
        if not asked.failed:
            asked.failed = True
            self._breaker.on_failure()

    def _ask(self, chain: Sequence[ChunkKey], asked: _Asked) -> Future[list[ChunkCopies]]:
        asked_s = asked.asked_s

        def look(directory: Directory, own: Epoch) -> list[ChunkCopies]:
            view = directory.lookup(chain)
            return self._readable(directory, view, chain, own, asked_s)

        answer = self._thread.ask(look, self._deadline_s)
        answer.add_done_callback(lambda ended: self._ended(ended, asked))
        return answer

    def _ended(self, answer: Future[list[ChunkCopies]], asked: _Asked) -> None:
        """On the directory's thread."""
        seconds = self._clock() - asked.asked_s
        if answer.exception() is not None:
            outcome = "failed"
        elif seconds > self._deadline_s:
            outcome = "late"
        else:
            outcome = "found" if any(answer.result()) else "nothing"
            self._breaker.on_success()
        if outcome in ("failed", "late"):
            self._failed(asked)
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
        """Copies in other workers' DRAM, and those that dead ones left on SSD."""
        found: list[ChunkCopies] = []
        holders: set[Epoch] = set()
        dead: set[Epoch] = set()
        ours: dict[ArtifactId, Token] = {}
        for index, key in enumerate(chain):
            copies: dict[StateType, list[PeerCopy]] = {}
            for state_type, record in view.chunks[index].items():
                if record.owner == own:
                    ours[ArtifactId(key, state_type)] = record.token
                else:
                    self._peers.saw(ArtifactId(key, state_type), record.token)
                for holder, token, copy in view.copies(index, state_type):
                    if holder == own or copy.dram_offset < 0:
                        continue
                    holders.add(holder)
                    listed = _copy(copy, holder, token, asked_s)
                    copies.setdefault(state_type, []).append(listed)
                storage = view.adoptable(index, state_type)
                if storage and self._may_adopt_from(storage):
                    dead.add(record.owner)
                    left = _copy(record.copy, record.owner, record.token, asked_s, storage)
                    copies.setdefault(state_type, []).append(left)
            found.append(copies)
        if ours:
            self._found_own(ours)
        if not all(map(self._peers.knows, holders)) or any(map(self._peers.knows, dead)):
            refreshed_s = self._clock()
            self._peers.refresh(directory.workers(), refreshed_s)
        return found


def _copy(copy: Copy, holder: Epoch, token: Token, asked_s: float, storage: str = "") -> PeerCopy:
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
