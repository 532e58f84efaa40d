"""A fleet in a simulated world: crashes, pauses, partitions, late messages, clock jumps.

Two workers call the directory over a network that loses requests, loses answers and delivers
requests long after their caller has given up. Whatever happens: never two owners of one
artifact in one epoch of time, tokens only grow, a stale epoch changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import StaleEpochError
from ownership.directory import (
    NO_EPOCH,
    NO_TOKEN,
    ChainView,
    Directory,
    Epoch,
    EpochStatus,
    GrantOutcome,
    Token,
    Worker,
)
from ownership.member.fencing import Fence
from ownership.member.held_lease import HeldLease
from tests.ownership.fleet_bench import (
    BENCHES,
    LEASE_S,
    LIMITS,
    DirectoryBench,
    artifact,
    claim_of,
    copies_at,
)

pytestmark = pytest.mark.long

NAMES = ("ann", "bob")
ARTIFACTS = [artifact("machine", 0), artifact("machine", 1)]
CHAIN = [a.chunk for a in ARTIFACTS]
workers = st.sampled_from(NAMES)
artifacts = st.sampled_from([ARTIFACTS[0]] * 4 + [ARTIFACTS[1]])

fates = st.sampled_from(["answered"] * 3 + ["unanswered", "late", "late", "lost"])
"""A call's request or answer may be lost, or arrive when its caller has given up."""
delays = st.sampled_from([0.0, 0.0, 0.5, LEASE_S])
"""A pause or a slow network between a call and its answer."""


@dataclass
class Actor:
    """A worker: its beliefs, and the one call it waits for."""

    name: str
    held: HeldLease | None = None
    owned: dict[ArtifactId, Token] = field(default_factory=dict)
    releasing: dict[ArtifactId, Token] = field(default_factory=dict)
    greatest: int = 0
    """The greatest number it has seen, which survives its crash."""

    def forget(self) -> None:
        self.held = None
        self.owned.clear()
        self.releasing.clear()

    @property
    def is_valid(self) -> bool:
        return self.held is not None and self.held.is_valid


Request = Callable[[Directory], Any]


class FleetMachine(RuleBasedStateMachine):
    """Real time is `now_s`; the directory's clock is the bench's and may jump."""

    bench_name: ClassVar[str] = "memory"
    jumps_ahead: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.bench: DirectoryBench = BENCHES[self.bench_name](replace(LIMITS, max_workers=1_000))
        self.directory = self.bench.open()
        self.now_s = 0.0
        self.actors = {name: Actor(name) for name in NAMES}
        self.late: list[tuple[Epoch | None, Request]] = []
        self.tokens: dict[ArtifactId, tuple[Token, Epoch]] = {}
        """The last token of each artifact at the directory, and its owner."""
        self.dead: set[Epoch] = set()
        """Epochs that were seen not to be live."""
        self.fence = Fence(lambda: self.now_s, horizon_s=60.0)
        self.answers: list[tuple[float, ChainView]] = []
        self.used: dict[ArtifactId, Token] = {}

    def teardown(self) -> None:
        self.directory.close()
        self.bench.close()

    # The world

    @rule(seconds=st.sampled_from([LEASE_S / 4, LEASE_S / 2, LEASE_S, 1.2 * LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.bench.advance(seconds)

    @rule(seconds=st.floats(0.1, 100 * LEASE_S))
    def directory_clock_is_set_back(self, seconds: float) -> None:
        self.bench.advance(-seconds)

    @precondition(lambda self: self.jumps_ahead)
    @rule(seconds=st.floats(0.1, 3 * LEASE_S))
    def directory_clock_jumps_ahead(self, seconds: float) -> None:
        self.bench.advance(seconds)

    @rule(name=workers)
    def crash(self, name: str) -> None:
        self.actors[name].forget()

    @precondition(lambda self: self.late)
    @rule(latest=st.booleans())
    def late_request_arrives(self, latest: bool) -> None:
        epoch, request = self.late.pop(-1 if latest else 0)
        self.execute(epoch, request)

    @rule()
    def sweep(self) -> None:
        self.directory.sweep(100)

    # Calls

    def execute(self, epoch: Epoch | None, request: Request) -> Any:
        """Run the call at the directory. A stale epoch is refused and changes nothing."""
        before = self.snapshot()
        try:
            answer = request(self.directory)
        except StaleEpochError as stale:
            assert self.snapshot() == before, "a stale epoch changed something"
            assert epoch not in self.directory.workers()
            return stale
        assert epoch is None or epoch not in self.dead, "an ended epoch lived again"
        return answer

    def snapshot(self) -> object:
        view = self.directory.lookup(CHAIN)
        return (
            [dict(c) for c in view.chunks],
            self.directory.workers(),
            self.directory.count_users(CHAIN),
        )

    def call(self, actor: Actor, epoch: Epoch | None, fate: str, request: Request) -> Any:
        """Return the answer, or None. A call ends before the next one begins."""
        if fate == "late":
            self.late.append((epoch, request))
        elif fate != "lost":
            answer = self.execute(epoch, request)
            if isinstance(answer, StaleEpochError):
                actor.forget()
            elif fate == "answered":
                return answer
        return None

    @initialize()
    def all_register(self) -> None:
        for name in NAMES:
            self.register(name, "answered", 0.0)

    @rule(name=workers, fate=fates, delay_s=delays)
    def register(self, name: str, fate: str, delay_s: float) -> None:
        actor = self.actors[name]
        actor.forget()
        asked_s, floor = self.now_s, actor.greatest
        lease = self.call(actor, None, fate, lambda d: d.register(Worker(name), LEASE_S, floor))
        self.time_passes(delay_s)
        if lease is not None:
            assert lease.epoch > floor
            actor.greatest = lease.epoch
            actor.held = HeldLease(lease, asked_s, lambda: self.now_s)

    @rule(name=workers, fate=fates, delay_s=delays)
    def renew(self, name: str, fate: str, delay_s: float) -> None:
        actor = self.actors[name]
        if (held := actor.held) is None:
            return
        asked_s, epoch = self.now_s, held.epoch

        def request(directory: Directory) -> bool:
            directory.renew_lease(epoch)
            return True

        if self.call(actor, epoch, fate, request):
            held.on_renewed(asked_s)
        self.time_passes(delay_s)

    @rule(name=workers, fate=fates)
    def leave(self, name: str, fate: str) -> None:
        actor = self.actors[name]
        if actor.held is None:
            return
        epoch = actor.held.epoch
        actor.forget()
        self.call(actor, None, fate, lambda d: d.end_lease(epoch))

    @rule(name=workers, what=artifacts, fate=fates, delay_s=delays)
    def claim(self, name: str, what: ArtifactId, fate: str, delay_s: float) -> None:
        actor = self.actors[name]
        if not actor.is_valid:
            self.register(name, "answered", 0.0)
        if actor.held is None or what in actor.releasing:
            return
        epoch = actor.held.epoch

        def request(directory: Directory) -> Any:
            return directory.claim_owner(epoch, [claim_of(what)])

        grants = self.call(actor, epoch, fate, request)
        self.time_passes(delay_s)
        if grants and grants[0].outcome is GrantOutcome.OWNED:
            assert grants[0].owner == epoch
            actor.owned[what] = grants[0].token
            actor.greatest = max(actor.greatest, grants[0].token)

    @rule(name=workers, what=artifacts, fate=fates)
    def release(self, name: str, what: ArtifactId, fate: str) -> None:
        """Repeat a release without an answer before claiming again."""
        actor = self.actors[name]
        token = actor.owned.pop(what, None) or actor.releasing.get(what)
        if actor.held is None or token is None:
            return
        actor.releasing[what] = token
        epoch = actor.held.epoch

        def request(directory: Directory) -> bool:
            directory.release(epoch, {what: token})
            return True

        if self.call(actor, epoch, fate, request):
            del actor.releasing[what]

    @rule(name=workers, what=artifacts, fate=fates)
    def replicate(self, name: str, what: ArtifactId, fate: str) -> None:
        actor = self.actors[name]
        if actor.held is not None:
            epoch = actor.held.epoch
            self.call(
                actor, epoch, fate, lambda d: d.replicate_readonly(epoch, [claim_of(what)], 15.0)
            )

    # A reader

    @rule()
    def reader_asks(self) -> None:
        self.answers.append((self.now_s, self.directory.lookup(CHAIN)))

    @precondition(lambda self: self.answers)
    @rule(which=st.integers(0, 99), index=st.integers(0, 1))
    def reader_uses_an_answer(self, which: int, index: int) -> None:
        asked_s, view = self.answers[which % len(self.answers)]
        for holder, token, copy in copies_at(view, index):
            assert copy == claim_of(ARTIFACTS[index]).copy
            if self.fence.admit(ARTIFACTS[index], holder, token, asked_s):
                assert token >= self.used.get(ARTIFACTS[index], NO_TOKEN)
                self.used[ARTIFACTS[index]] = token

    # What must always hold

    @invariant()
    def tokens_only_grow_and_each_has_one_owner(self) -> None:
        view = self.directory.lookup(CHAIN)
        for what, chunk in zip(ARTIFACTS, view.chunks, strict=True):
            record = chunk.get(what.state_type)
            if record is None or record.owner == NO_EPOCH:
                continue
            token, owner = self.tokens.get(what, (NO_TOKEN, NO_EPOCH))
            assert record.token >= token
            assert record.token > token or record.owner == owner
            self.tokens[what] = (record.token, record.owner)

    @invariant()
    def ended_epochs_stay_ended(self) -> None:
        live = set(self.directory.workers())
        assert not live & self.dead
        view = self.directory.lookup(CHAIN)
        self.dead |= set(view.workers) - live
        for epoch in live:
            assert view.status(epoch) is EpochStatus.LIVE

    @invariant()
    def whoever_acts_as_owner_is_the_owner(self) -> None:
        """So there are never two owners, unless the directory's clock jumps ahead."""
        if self.jumps_ahead:
            return
        view = self.directory.lookup(CHAIN)
        for actor in self.actors.values():
            for what, token in actor.owned.items():
                if actor.held is not None and actor.is_valid:
                    record = view.chunks[CHAIN.index(what.chunk)][what.state_type]
                    assert (record.owner, record.token) == (actor.held.epoch, token)
                    assert view.status(record.owner) is not EpochStatus.ENDED


class UserMachine(FleetMachine):
    """Chain users, too."""

    @rule(name=workers, fate=fates, add=st.booleans())
    def reader_comes_or_goes(self, name: str, fate: str, add: bool) -> None:
        actor = self.actors[name]
        if actor.held is not None:
            epoch = actor.held.epoch
            self.call(
                actor,
                epoch,
                fate,
                lambda d: (d.add_chain_user if add else d.remove_chain_user)(epoch, "r", CHAIN[:1]),
            )


class JumpingMachine(FleetMachine):
    """The directory's clock jumps ahead, too: guarantees that need no clock must still hold."""

    jumps_ahead = True


for machine, examples in ((FleetMachine, 400), (UserMachine, 100), (JumpingMachine, 100)):
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None
    )
TestFleetMachine = FleetMachine.TestCase
TestUserMachine = UserMachine.TestCase
TestJumpingMachine = JumpingMachine.TestCase
