"""Ledgers of several routers, fed by each other's messages, of which some are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownership.router.shared_ledger import LEASE_S, SharedLedger
from ownership.router.view import Reason
from ownership.scheduling import FleetView, Ledger, Work
from tests.ownership.scheduling.fleets import fleet_of, worker

WORKERS = "abc"
STEP_S = 0.02


def fleet(names: str = WORKERS) -> FleetView:
    return fleet_of(*(worker(name) for name in names))


class Routers:
    """Routers that exchange messages once each round."""

    def __init__(self, count: int) -> None:
        self.now_s = 100.0
        self.one = Ledger(fleet())
        """The ledger that one router would have that sends everything."""
        self.all = list[SharedLedger]()
        self._sent = list[tuple[int, str]]()
        for _ in range(count):
            self.start()

    def start(self) -> SharedLedger:
        self.all.append(SharedLedger(f"r{len(self.all)}", fleet()))
        return self.all[-1]

    def send(self, router: int, worker: str, decoder: str, tokens: int) -> str:
        name = f"q{len(self._sent)}"
        self._sent.append((router, name))
        work = Work(worker, decoder, tokens, max(1, tokens // 2), f"s{tokens}", tokens // 3)
        for ledger in (self.one, self.all[router]):
            ledger.sent(name, work, self.now_s)
        return name

    def each(self, pick: int) -> Iterator[tuple[Ledger, str]]:
        """Yield the ledgers that see an event of a request, and its name."""
        if self._sent:
            router, name = self._sent[pick % len(self._sent)]
            yield self.one, name
            yield self.all[router], name

    def round(self, lost: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Carry all messages but those lost from one router to another."""
        self.now_s += STEP_S
        messages = [x.take_message(self.now_s) for x in self.all]
        for source, message in enumerate(messages):
            for target, ledger in enumerate(self.all):
                if message and (source, target) not in lost:
                    ledger.take_in(message, self.now_s, self.now_s)
        for ledger in self.all:
            ledger.on_exchanged(self.now_s)

    def settle(self) -> None:
        """Let a second pass, after which heartbeats have shown what is missing."""
        for _ in range(150):
            self.round()

    def assert_alike(self) -> None:
        for ledger in self.all:
            assert ledger.doubts(self.now_s) == []
            assert [ledger.own(x) for x in WORKERS] == [self.one.own(x) for x in WORKERS]
            assert len(ledger) == len(self.one)


ROUTER, PICK = st.integers(0, 2), st.integers(0, 50)
EVENTS = st.one_of(
    st.tuples(st.just("send"), ROUTER, st.sampled_from("abc"), st.sampled_from("abc")),
    st.tuples(st.sampled_from(["handed_off", "first_token", "ended", "failed"]), PICK),
    st.tuples(st.just("round"), st.frozensets(st.tuples(ROUTER, ROUTER), max_size=3)),
    st.tuples(st.just("fail"), ROUTER),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.integers(1, 500))
def test_ledgers_that_lose_messages_agree_in_the_end(
    events: list[tuple[object, ...]], tokens: int
) -> None:
    routers, handed = Routers(3), set[str]()
    routers.round()
    routers.round()
    for event in events:
        match event:
            case ("send", int(router), str(worker), str(decoder)):
                routers.send(router, worker, decoder, tokens)
            case ("round", frozenset() as lost):
                routers.round(lost)
            case ("fail", int(router)):
                routers.all[router].on_lost(routers.now_s)
            case (str(kind), int(pick)):
                for ledger, name in routers.each(pick):
                    if kind == "ended":
                        ledger.ended(name, 7, routers.now_s)
                    elif kind != "handed_off":
                        getattr(ledger, kind)(name, routers.now_s)
                    elif (name, id(ledger)) not in handed:
                        handed.add((name, id(ledger)))
                        ledger.handed_off(name, routers.now_s)
    routers.settle()
    routers.assert_alike()


def test_a_session_that_one_router_has_served_is_known_to_all() -> None:
    routers = Routers(2)
    routers.round()
    routers.round()
    first, second = routers.all
    first.sent("q", Work("a", "b", 1_000, 500, "s", other_tokens=300), routers.now_s)
    first.handed_off("q", routers.now_s)
    first.first_token("q", routers.now_s)
    first.ended("q", 7, routers.now_s)
    routers.round()
    assert second.sessions.last_turn("s") == first.sessions.last_turn("s") == ("b", 707)


def test_a_lost_message_is_noticed_by_the_next_one_and_repeated() -> None:
    routers = Routers(2)
    routers.round()
    routers.round()
    other = routers.all[0]
    routers.send(1, "a", "a", 300)
    routers.round(frozenset({(1, 0)}))
    assert (len(other), other.doubts(routers.now_s)) == (0, [])
    routers.send(1, "b", "b", 300)
    routers.round()
    assert (len(other), other.doubts(routers.now_s)) == (1, [Reason.PEER_GAP])
    routers.settle()
    routers.assert_alike()


def test_a_router_that_starts_later_knows_all_after_two_exchanges() -> None:
    routers = Routers(2)
    routers.round()
    routers.send(0, "a", "b", 300)
    done = routers.send(1, "b", "b", 500)
    routers.all[1].first_token(done, routers.now_s)
    routers.one.first_token(done, routers.now_s)
    routers.round()
    late = routers.start()
    assert late.doubts(routers.now_s) == [Reason.PEERS_LOST]
    routers.round()
    routers.round()
    routers.assert_alike()
    assert late.num_peers == 2
    assert late.num_peer_requests == 2


def test_a_router_that_dies_leaves_no_load_behind() -> None:
    routers = Routers(2)
    routers.round()
    routers.send(1, "a", "a", 300)
    routers.round()
    left = routers.all[0]
    assert left.own("a").prefilling == 1
    routers.all.pop()
    for _ in range(int(LEASE_S / STEP_S) - 2):
        routers.round()
        assert left.own("a").prefilling == 1
    for _ in range(4):
        routers.round()
    assert left.own("a").prefilling == len(left) == left.num_peers == 0


def test_what_a_router_computed_stays_demand_however_its_end_is_known() -> None:
    """By its message, by one that lacks the request, or because it is not heard any more."""
    routers = Routers(2)
    routers.round()
    named, lacking, _ = (routers.send(1, "a", "a", 3_000) for _ in range(3))
    routers.round()
    left, other = routers.all
    expected = left.view(routers.now_s).prefill_demand
    other.failed(named, routers.now_s, was_computed=True)
    routers.round()
    other.ended(lacking, 7, routers.now_s)
    routers.round(frozenset({(1, 0)}))
    for _ in range(100):
        routers.round()
    assert (len(left), left.doubts(routers.now_s)) == (1, [])
    routers.all.pop()
    for _ in range(int(LEASE_S / STEP_S) + 2):
        routers.round()
    assert len(left) == 0
    passed_s = routers.now_s - 100.0 - 2 * STEP_S
    assert left.view(routers.now_s).prefill_demand == pytest.approx(
        expected * math.exp(-passed_s / 60.0)
    )
    routers = Routers(2)
    routers.round()
    failed = routers.send(1, "a", "a", 3_000)
    routers.round()
    routers.all[1].failed(failed, routers.now_s)
    routers.round()
    assert routers.all[0].view(routers.now_s).prefill_demand == pytest.approx(0.0)


def test_without_exchanges_a_router_goes_on_with_its_own_and_says_so() -> None:
    routers = Routers(2)
    routers.round()
    routers.send(0, "a", "a", 300)
    routers.send(1, "b", "b", 300)
    routers.round()
    routers.round()
    alone = routers.all[0]
    assert alone.doubts(routers.now_s) == []
    for _ in range(int(LEASE_S / STEP_S) + 2):
        routers.now_s += STEP_S
        alone.take_message(routers.now_s)
        alone.on_lost(routers.now_s)
    assert alone.doubts(routers.now_s) == [Reason.PEERS_LOST]
    assert (alone.own("a").prefilling, alone.own("b").prefilling) == (1, 0)
    routers.settle()
    routers.assert_alike()


def test_a_worker_that_was_unknown_gets_its_peers_requests() -> None:
    routers = Routers(2)
    routers.round()
    routers.all[0].set_fleet(fleet("ab"), routers.now_s)
    routers.send(1, "c", "c", 300)
    routers.round()
    assert len(routers.all[0]) == 0
    routers.all[0].set_fleet(fleet(), routers.now_s)
    routers.settle()
    routers.assert_alike()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([2, "x", 1, True, True, []]),
        msgspec.msgpack.encode([1, "x", 1, True, True, [["s", 1]]]),
        msgspec.msgpack.encode([1, "x", 1, True, True, [["s", 1, ["a", "a", -5, 1, "", 0]]]]),
        msgspec.msgpack.encode([1, "x", 1, True, True, [["s", 1, ["a", "a", 5, 9, "", 0]]]]),
        msgspec.msgpack.encode([1, "x", 1, True, True, [["s", 1, ["a", "a", 5, 1, "", 0, 6]]]]),
    ],
)
def test_messages_of_another_version_are_noticed_and_left_out(content: bytes) -> None:
    routers = Routers(1)
    routers.round()
    [ledger] = routers.all
    ledger.take_in(content, routers.now_s, routers.now_s)
    assert ledger.doubts(routers.now_s) == [Reason.PEER_DIFFERS]
    assert (len(ledger), ledger.num_peers) == (0, 0)
    assert ledger.doubts(routers.now_s + LEASE_S) == [Reason.PEERS_LOST]
