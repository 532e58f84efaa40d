"""Two real workers over a Redis; the test controls their clock and their turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import redis

from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import Recorder
from ownership.directory import ChainView, Directory, EpochStatus
from ownership.directory.identifiers import NO_EPOCH, Epoch
from ownership.directory.redis.scripts import fleet_key
from ownership.member.fleet_worker import FleetWorker, MemberTimes
from tests.ownership.fleet_bench import LEASE_S, LIMITS
from tests.ownership.history import Ended, Event, faults, granted
from tests.ownership.member.members import KV, ListedStore, change
from tests.ownership.redis_bench import RedisBench, shared_server

NAMES = ("ann", "bob")
NUMBERS = range(1, 7)
IDS = [change(number).id for number in NUMBERS]
CHAIN = [what.chunk for what in IDS]
STEP_S = 0.01
MOST_TURNS = 5_000


class Line:
    """A worker's connection to the directory, which may lose calls or answers."""

    def __init__(self, directory: Directory, on_answer: Callable[[str, Sequence[Any], Any], None]):
        self.fate = "answered"
        self._directory = directory
        self._on_answer = on_answer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._directory, name)

        def call(*args: Any) -> Any:
            if self.fate == "lost":
                raise DirectoryUnavailableError("lost")
            answer = method(*args)
            self._on_answer(name, args, answer)
            if self.fate == "unanswered":
                raise DirectoryUnavailableError("unanswered")
            return answer

        return call


class Member:
    """A worker and its store."""

    def __init__(self, name: str, fleet: SteppedFleet) -> None:
        self.name = name
        self.store = ListedStore()
        self.line = Line(fleet.bench.open(), fleet.on_answer)
        self.worker = FleetWorker(
            self.line,  # type: ignore[arg-type]
            name,
            MemberTimes(LEASE_S, call_s=0.1, listing_ttl_s=30 * LEASE_S, horizon_s=3 * LEASE_S),
            Recorder(),
            clock=lambda: fleet.now_s,
        )
        self.thread = self.worker._thread
        self.thread.start = lambda: None  # type: ignore[method-assign]
        self.worker.start(self.store)

    @property
    def epoch(self) -> Epoch:
        lease = self.worker._keeper.lease
        return NO_EPOCH if lease is None or not lease.is_valid else lease.epoch

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is left to be sent."""
        claims = self.worker._claims
        assert claims is not None
        return self.thread.is_idle and not claims.has_unsent


class SteppedFleet:
    """Workers with the same artifacts, their history, and a check that they agree in the end."""

    wait_leases = 2.0

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.bench = RedisBench(replace(LIMITS, max_artifacts=1_000, max_workers=1_000))
        self.raw = redis.Redis.from_url(shared_server().url)
        self.looks = self.bench.open()
        self.history: list[Event] = []
        self.ended: set[Epoch] = set()
        self.known: set[Epoch] = set()
        self.members = {name: Member(name, self) for name in NAMES}

    def close(self) -> None:
        self.bench.close()
        self.raw.close()

    def key(self, name: str) -> str:
        return fleet_key(self.bench.fleet, name)

    def on_answer(self, name: str, args: Sequence[Any], answer: Any) -> None:
        """Record what the directory has done."""
        if name == "claim_owner":
            self.history += granted([claim.artifact for claim in args[1]], answer)

    def run_s(self, seconds: float) -> None:
        """Let time pass while each worker takes its turns."""
        until_s, turns = self.now_s + seconds, 0
        while self.now_s < until_s:
            idle_s = min(member.thread.idle_s() for member in self.members.values())
            step_s = min(max(STEP_S, idle_s), until_s - self.now_s)
            self.now_s += step_s
            self.bench.advance(step_s)
            for member in self.members.values():
                if member.thread.idle_s() == 0.0:
                    member.thread.run_turn()
            turns += 1
            assert turns < MOST_TURNS, "somebody is never done"

    def note_ends(self) -> None:
        """Record the epochs that have ended since the last call."""
        live = set(self.looks.workers())
        self.history += [Ended(epoch, self.now_s) for epoch in self.known - live - self.ended]
        self.ended |= self.known - live
        self.known |= live

    def forget_revived_ends(self) -> None:
        """Drop the ends of epochs that an older state of the directory has brought back.

        They were lost with their records, and had not ended.
        """
        revived = self.ended & set(self.looks.workers())
        self.ended -= revived
        self.history = [
            event
            for event in self.history
            if not (isinstance(event, Ended) and event.epoch in revived)
        ]

    def calm_down(self) -> None:
        """End the faults: two leases later all agree, and no forbidden event has happened."""
        self.agree_in_the_end()
        assert list(faults(self.history)) == []

    def agree_in_the_end(self, *, listings: bool = True) -> None:
        """End the faults: two leases later the directory's records are those of the stores.

        `listings`: also of replicas. One that somebody else has listed ends in its own time.
        """
        for member in self.members.values():
            member.line.fate = "answered"
            member.worker.wake()
        self.run_s(self.wait_leases * LEASE_S)
        for member in self.members.values():
            assert member.epoch != NO_EPOCH
            assert member.is_idle, f"{member.name} has something left to tell"
        view = self.looks.lookup(CHAIN)
        for index, what in enumerate(IDS):
            self._agree(what, view, index, listings)

    def _agree(self, what: Any, view: ChainView, index: int, listings: bool) -> None:
        holders = {m.epoch: m for m in self.members.values() if what in m.store.here}
        record = view.chunks[index].get(KV)
        if not holders:
            assert record is None or view.status(record.owner) is EpochStatus.ENDED
            assert record is None or not listings or not view.copies_in(record)
            return
        assert record is not None, "it is here, and not known"
        assert record.owner in holders, "it is owned by one who has it"
        owner = holders.pop(record.owner)
        assert owner.store.tokens[what] == record.token
        assert record.copy.dram_offset == owner.store.here[what].copy.dram_offset  # type: ignore[union-attr]
        listed = {copy.holder for copy in view.copies_in(record)[1:]}
        assert listed == holders.keys() or (not listings and listed >= holders.keys())
        assert all(what in m.store.replicas for m in holders.values())
