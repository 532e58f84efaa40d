"""Real workers over a Redis that loses records: all agree two leases after the faults stop.

Time is simulated; turns are taken by hand. Records go one by one, hash by hash, all at once, or
back to what a replica had heard; calls are not made, or not answered; workers crash.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_connector.artifacts.copies import PeerCopy
from tests.ownership.fleet_bench import LEASE_S
from tests.ownership.history import Served
from tests.ownership.member.members import KV, change
from tests.ownership.stepped_members import CHAIN, IDS, NAMES, NUMBERS, Member, SteppedFleet

pytestmark = pytest.mark.long

HASHES = ("fleet", "epochs", "names", "peers", "chunks", "runs")
names = st.sampled_from(NAMES)
numbers = st.sampled_from(NUMBERS)


class LossyFleet(SteppedFleet, RuleBasedStateMachine):
    """Two workers that store, move and drop the same artifacts."""

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        SteppedFleet.__init__(self)
        self.snapshot: dict[bytes, bytes] | None = None
        self.losses = 0

    @initialize()
    def join(self) -> None:
        self.run_s(1.0)

    def teardown(self) -> None:
        self.calm_down()
        self.close()

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
        self.forget_revived_ends()

    def _time_is_lost(self) -> None:
        """Time passes between two losses."""
        self.now_s += 1.0
        self.bench.advance(1.0)

    # A reader

    @rule(name=names)
    def reader_asks(self, name: str) -> None:
        """Use every copy of the answer at once that may be used."""
        member = self.members[name]
        lookup = member.worker.find(CHAIN)
        asked_s = self.now_s
        member.thread.run_turn()
        if not lookup.poll():
            return
        for what, copies in zip(IDS, lookup.found, strict=False):
            for copy in copies.get(KV, ()):
                self._use(member, what, copy, asked_s)

    def _use(self, member: Member, what: Any, copy: PeerCopy, asked_s: float) -> None:
        if member.worker.peers.may_use(what, copy):
            reader = (member.name, id(member))
            self.history.append(Served(what, copy.holder, copy.token, asked_s, reader))

    # What must hold

    @invariant()
    def ends_are_noted(self) -> None:
        self.note_ends()

    @rule()
    def faults_stop(self) -> None:
        self.calm_down()


LossyFleet.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestLossyFleet = LossyFleet.TestCase
