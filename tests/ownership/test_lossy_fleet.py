"""Workers as they are, over a Redis that loses records: after faults stop all agree in two leases.

Time is simulated; turns are taken by hand. Records go one by one, hash by hash, all at once, or
back to what a replica had heard; calls are not made, or not answered; workers crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_connector.artifacts.peer_copy import PeerCopy
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import Recorder
from ownership.directory import ChainView, Directory, Grant, Outcome, Standing
from ownership.fleet_worker import FleetWorker
from ownership.identifiers import NOBODY, Epoch
from ownership.redis_directory.scripts import fleet_key
from tests.ownership.fleet_bench import LEASE_S, LIMITS
from tests.ownership.history import Ended, Event, Granted, Served, faults
from tests.ownership.ledgers import KV, ListedStore, change
from tests.ownership.redis_bench import RedisBench, shared_server

NAMES = ("ann", "bob")
NUMBERS = range(1, 7)
IDS = [change(number).id for number in NUMBERS]
CHAIN = [what.chunk for what in IDS]
HASHES = ("fleet", "epochs", "names", "peers", "chunks", "runs")
STEP_S = 0.01
MOST_TURNS = 5_000

names = st.sampled_from(NAMES)
numbers = st.sampled_from(NUMBERS)


class Line:
    """A worker's way to the directory: what is asked may be lost, or its answer."""

    def __init__(self, directory: Directory, heard: Callable[[str, Sequence[Any], Any], None]):
        self.fate = "answered"
        self._directory = directory
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._directory, name)

        def call(*args: Any) -> Any:
            if self.fate == "lost":
                raise DirectoryUnavailableError("lost")
            answer = method(*args)
            self._heard(name, args, answer)
            if self.fate == "unanswered":
                raise DirectoryUnavailableError("unanswered")
            return answer

        return call


class Member:
    """A worker and its store."""

    def __init__(self, name: str, fleet: LossyFleet) -> None:
        self.name = name
        self.store = ListedStore()
        self.line = Line(fleet.bench.open(), fleet.heard)
        self.worker = FleetWorker(
            self.line,  # type: ignore[arg-type]
            name,
            LEASE_S,
            Recorder(),
            call_s=0.1,
            listing_ttl_s=30 * LEASE_S,
            horizon_s=3 * LEASE_S,
            clock=lambda: fleet.now_s,
        )
        self.thread = self.worker._thread
        self.thread.start = lambda: None  # type: ignore[method-assign]
        self.worker.start(self.store)

    @property
    def epoch(self) -> Epoch:
        lease = self.worker._keeper.lease
        return NOBODY if lease is None or not lease.is_valid else lease.epoch

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to be told."""
        ledger = self.worker._ledger
        assert ledger is not None
        waiting = (self.thread._claims, ledger._releases, ledger._unlisted)
        return not any(waiting) and self.thread._batches is None


class LossyFleet(RuleBasedStateMachine):
    """Two workers that hold, move and drop the same artifacts."""

    wait_leases: ClassVar[float] = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_000.0
        self.bench = RedisBench(replace(LIMITS, max_artifacts=1_000, max_workers=1_000))
        self.raw = redis.Redis.from_url(shared_server().url)
        self.looks = self.bench.open()
        self.history: list[Event] = []
        self.ended: set[Epoch] = set()
        self.known: set[Epoch] = set()
        self.snapshot: dict[bytes, bytes] | None = None
        self.losses = 0
        self.asked: list[tuple[float, ChainView]] = []

    @initialize()
    def join(self) -> None:
        self.members = {name: Member(name, self) for name in NAMES}
        self.run_s(1.0)

    def teardown(self) -> None:
        if hasattr(self, "members"):
            self.calm_down()
        self.bench.close()
        self.raw.close()

    # What is noted

    def heard(self, name: str, args: Sequence[Any], answer: Any) -> None:
        """The directory has done this."""
        if name in ("claim_owner", "promote"):
            claims = args[1] if name == "promote" else [claim.artifact for claim in args[1]]
            grants: list[Grant] = answer
            for artifact, grant in zip(claims, grants, strict=True):
                if grant.outcome is Outcome.OWNED:
                    self.history.append(Granted(artifact, grant.owner, grant.token))

    # The world

    def run_s(self, seconds: float) -> None:
        """Let time pass, and each worker take its turns."""
        until_s, turns = self.now_s + seconds, 0
        while self.now_s < until_s:
            idle_s = min(member.thread._idle_s() for member in self.members.values())
            step_s = min(max(STEP_S, idle_s), until_s - self.now_s)
            self.now_s += step_s
            self.bench.advance(step_s)
            for member in self.members.values():
                if member.thread._idle_s() == 0.0:
                    member.thread._turn()
            turns += 1
            assert turns < MOST_TURNS, "somebody is never done"

    @rule(seconds=st.sampled_from([0.05, LEASE_S / 4, LEASE_S / 2, 1.2 * LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.run_s(seconds)

    @rule(name=names, fate=st.sampled_from(["answered", "lost", "unanswered"]))
    def line_changes(self, name: str, fate: str) -> None:
        self.members[name].line.fate = fate

    @rule(name=names)
    def crash(self, name: str) -> None:
        self.members[name] = Member(name, self)

    @rule(name=names, which=st.sets(numbers, min_size=1))
    def seal(self, name: str, which: set[int]) -> None:
        member = self.members[name]
        member.store.put(*(change(n) for n in which if change(n).id not in member.store.here))
        member.worker.wake()

    @rule(name=names, number=numbers, offset=st.integers(1, 9))
    def move(self, name: str, number: int, offset: int) -> None:
        member = self.members[name]
        if change(number).id in member.store.here:
            member.store.put(change(number, 4096 * offset))
            member.worker.wake()

    @rule(name=names, number=numbers)
    def drop(self, name: str, number: int) -> None:
        member = self.members[name]
        if change(number).id in member.store.here:
            member.store.drop(number)
            member.worker.wake()

    @rule(name=names, number=numbers)
    def it_leaves_and_nobody_takes_the_changes(self, name: str, number: int) -> None:
        self.drop(name, number)
        store = self.members[name].store
        store.has_lost = bool(store.take_exports()) or store.has_lost

    # Losses

    def key(self, name: str) -> str:
        return fleet_key(self.bench.fleet, name)

    @rule(which=st.sets(numbers, min_size=1), key=st.sampled_from(["chunks", "runs"]))
    def some_records_are_lost(self, which: set[int], key: str) -> None:
        self.raw.hdel(self.key(key), *(CHAIN[number - 1] for number in which))

    @rule(key=st.sampled_from(HASHES))
    def a_hash_is_evicted(self, key: str) -> None:
        self.raw.delete(self.key(key))
        self._time_is_lost()

    @rule()
    def everything_is_lost(self) -> None:
        self.raw.delete(*(self.key(key) for key in HASHES))
        self._time_is_lost()

    @rule()
    def a_replica_hears_everything(self) -> None:
        self.snapshot = {
            key: self.raw.dump(key)
            for key in self.raw.keys(self.key("*"))  # type: ignore[misc]
        }

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def the_replica_takes_over(self) -> None:
        assert self.snapshot is not None
        self.raw.delete(*(self.key(key) for key in HASHES))
        for key, value in self.snapshot.items():
            self.raw.restore(key, 0, value, replace=True)
        self.losses += 1
        self.raw.hset(self.key("fleet"), "memory", f"server {self.losses}")
        self._time_is_lost()

    def _time_is_lost(self) -> None:
        """Nobody loses records and goes on in the same microsecond."""
        self.now_s += 1.0
        self.bench.advance(1.0)

    # A reader

    @rule(name=names)
    def reader_asks(self, name: str) -> None:
        """What it may use of the answer, it uses at once."""
        member = self.members[name]
        lookup = member.worker.find(CHAIN)
        asked_s = self.now_s
        member.thread._turn()
        if not lookup.done:
            return
        for what, copies in zip(IDS, lookup.found, strict=False):
            for copy in copies.get(KV, ()):
                self._use(member, what, copy, asked_s)

    def _use(self, member: Member, what: Any, copy: PeerCopy, asked_s: float) -> None:
        if member.worker.peers.admits(what, copy):
            reader = (member.name, id(member))
            self.history.append(Served(what, copy.holder, copy.token, asked_s, reader))

    # What must hold

    @invariant()
    def history_is_sound(self) -> None:
        live = set(self.looks.workers())
        self.history += [Ended(epoch, self.now_s) for epoch in self.known - live - self.ended]
        self.ended |= self.known - live
        self.known |= live

    @rule()
    def calm_down(self) -> None:
        """Faults stop; two leases later the directory says what the stores hold."""
        for member in self.members.values():
            member.line.fate = "answered"
            member.worker.wake()
        self.run_s(self.wait_leases * LEASE_S)
        for member in self.members.values():
            assert member.epoch != NOBODY
            assert member.is_idle, f"{member.name} has something left to tell"
        view = self.looks.lookup(CHAIN)
        for index, what in enumerate(IDS):
            self._agree(what, view, index)
        assert list(faults(self.history)) == []

    def _agree(self, what: Any, view: ChainView, index: int) -> None:
        holders = {m.epoch: m for m in self.members.values() if what in m.store.here}
        holding = view.chunks[index].get(KV)
        if not holders:
            assert holding is None or view.standing(holding.owner) is Standing.ENDED
            assert holding is None or not view.copies(index, KV)
            return
        assert holding is not None, "it is here, and not known"
        assert holding.owner in holders, "it is owned by one who has it"
        owner = holders.pop(holding.owner)
        assert owner.store.tokens[what] == holding.token
        assert holding.copy.dram_offset == owner.store.here[what].copy.dram_offset  # type: ignore[union-attr]
        assert {r.holder for r in holding.replicas if r.expires_s > view.now_s} == holders.keys()
        assert all(what in m.store.replicas for m in holders.values())


LossyFleet.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestLossyFleet = LossyFleet.TestCase
