"""The ledger's loads are those of the requests in flight, whatever is lost or comes late."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ownership.scheduling.decision import Placement, PlacementAction
from ownership.scheduling.fleet import FleetView, WorkerLoad
from ownership.scheduling.ledger import NO_OTHERS, Ledger, LedgerLimits, OthersShare, Share, Work
from ownership.scheduling.step import Step, WorkerPrefix
from tests.ownership.scheduling.fleets import fleet_of, worker

LIMITS = LedgerLimits(trust_s=10.0, lost_s=100.0, max_requests=20, max_sessions=4)


def pair() -> FleetView:
    return fleet_of(worker("a"), worker("b"))


def work(
    at: str = "a", prompt: int = 1_000, new: int = 400, session: str = "", **more: int
) -> Work:
    return Work(at, at, prompt, new, session, **more)


def remote(prompt: int = 1_000) -> Work:
    return Work("a", "b", prompt, prompt)


def test_the_work_of_a_placement() -> None:
    prefixes = {"a": WorkerPrefix(0, 100, 300), "b": WorkerPrefix(0, 700)}
    step = Step(1_000, prefixes, "s", boundary_tokens=600)
    here = Placement(PlacementAction.COLOCATED_PREFILL, "a", "a")
    assert Work.of(step, here) == Work("a", "a", 1_000, 700, "s", 600)
    fetched = replace(here, source_worker="b")
    assert Work.of(step, fetched).new_tokens == 300
    apart = replace(here, prefill_worker="b")
    assert Work.of(step, apart) == Work("b", "a", 1_000, 300, "s", 600)
    known = Step(1_000, {"a": WorkerPrefix(1_000)})
    assert Work.of(known, here).new_tokens == 1, "the last token is always computed"


def test_a_request_counts_from_when_it_is_sent_until_it_ends() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    ledger.sent("y", work(), 0.0)
    load = ledger.load("a")
    assert (load.queued_tokens, load.waiting_requests, load.running_requests) == (800, 1, 1)
    ledger.first_token("x", 1.0)
    load = ledger.load("a")
    assert (load.queued_tokens, load.waiting_requests, load.running_requests) == (400, 0, 2)
    assert load.context_tokens == 2_000 + 128, "half an answer of 256 tokens is decoded"
    assert load.hbm_used_bytes == load.context_tokens
    ledger.ended("x", 16, 21.0)
    ledger.failed("y", 21.0)
    assert ledger.load("a") == WorkerLoad(residence_s=0.05 * 21.0)
    assert ledger.output_tokens == pytest.approx(256 - 0.01 * 240)
    assert (len(ledger), ledger.lost_requests) == (0, 0)


def test_a_request_that_is_sent_again_is_demand_once() -> None:
    ledger, once = Ledger(pair(), LIMITS), Ledger(pair(), LIMITS)
    once.sent("x", work(), 0.0)
    for retry in range(3):
        ledger.sent(retry, work(), 0.0)
        ledger.failed(retry, 0.0)
    assert ledger.view(0.0).prefill_demand == 0.0
    ledger.sent("x", work(), 0.0)
    expected = once.view(0.0).prefill_demand
    assert ledger.view(0.0).prefill_demand == pytest.approx(expected)
    ledger.first_token("x", 0.0)
    ledger.failed("x", 0.0)
    assert ledger.view(0.0).prefill_demand == pytest.approx(expected), "it has computed"


def test_a_prefill_that_was_computed_stays_demand_if_its_request_fails() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    expected = ledger.view(0.0).prefill_demand
    ledger.failed("x", 0.0, was_computed=True)
    assert ledger.view(0.0).prefill_demand == expected > 0.0


def test_a_prefill_that_was_handed_off_stays_demand_if_its_decode_fails() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", remote(), 0.0)
    expected = ledger.view(0.0).prefill_demand
    assert expected > 0.0
    ledger.handed_off("x", 0.0)
    ledger.failed("x", 0.0)
    assert ledger.view(0.0).prefill_demand == expected


def test_nothing_is_learned_from_a_request_that_ended_before_its_first_token() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    ledger.ended("x", 0, 21.0)
    assert (ledger.output_tokens, ledger.load("a")) == (256.0, WorkerLoad())


@pytest.mark.parametrize(("output_tokens", "computed"), [(16, 716), (0, 700)])
def test_an_answer_leaves_its_prompt_and_its_tokens_at_the_worker_that_decoded(
    output_tokens: int, computed: int
) -> None:
    """Tokens of other prompts are not of the session, and an unknown length is no length."""
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", Work("a", "b", 1_000, 1_000, "s", other_tokens=300), 0.0)
    ledger.handed_off("x", 1.0)
    ledger.first_token("x", 2.0)
    mean = ledger.output_tokens
    ledger.ended("x", output_tokens, 3.0)
    assert ledger.sessions.last_turn("s") == ("b", computed)
    assert (ledger.output_tokens == mean) == (not output_tokens)
    ledger.sent("y", Work("a", "a", 2_000, 2_000, "s"), 4.0)
    ledger.ended("y", 0, 5.0)
    assert ledger.sessions.last_turn("s") == ("b", computed), "it had no first token"


def test_a_remote_prefill_moves_to_the_worker_that_decodes() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", remote(), 0.0)
    assert (ledger.own("a"), ledger.own("b")) == (Share(1_000, 1, 0, 1_000), Share())
    ledger.handed_off("x", 1.0)
    assert (ledger.own("a"), ledger.own("b")) == (Share(), Share(1, 1, 0, 1_000))
    ledger.first_token("x", 2.0)
    assert ledger.own("b") == Share(0, 0, 1, 1_000)


def test_the_worker_that_will_decode_expects_what_another_prefills() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", remote(), 0.0)
    table = ledger.view(0.0).table()
    assert (table.queued_tokens.tolist(), table.running.tolist()) == ([1_000.0, 0.0], [1.0, 1.0])
    assert table.context_tokens.tolist() == [1_000.0, 1_000.0 + 128.0]
    ledger.reported("b", WorkerLoad(), 0.5)
    assert ledger.others("b") == NO_OTHERS
    assert ledger.load("b").running_requests == 1, "the worker cannot report it yet"
    ledger.handed_off("x", 1.0)
    table = ledger.view(1.0).table()
    assert (table.queued_tokens.tolist(), table.running.tolist()) == ([0.0, 1.0], [0.0, 1.0])
    assert table.context_tokens.tolist() == [0.0, 1_000.0]


def _answer(ledger: Ledger) -> None:
    ledger.handed_off("x", 1.0)
    ledger.ended("x", 9, 1.0)


def _give_up(ledger: Ledger) -> None:
    ledger.sent("y", work(), 1.0 + LIMITS.lost_s)
    ledger.failed("y", 1.0 + LIMITS.lost_s)


def _lose_the_prefiller(ledger: Ledger) -> None:
    ledger.set_fleet(fleet_of(worker("b")), 1.0)


def _lose_the_decoder(ledger: Ledger) -> None:
    ledger.set_fleet(fleet_of(worker("a")), 1.0)
    ledger.handed_off("x", 1.0)


def _lose_the_decoder_for_a_while(ledger: Ledger) -> None:
    ledger.set_fleet(fleet_of(worker("a")), 1.0)
    ledger.set_fleet(pair(), 1.0)
    _answer(ledger)


@pytest.mark.parametrize(
    "end",
    [
        _answer,
        lambda ledger: ledger.failed("x", 1.0),
        lambda ledger: ledger.ended("x", 9, 1.0),
        _give_up,
        _lose_the_prefiller,
        _lose_the_decoder,
        _lose_the_decoder_for_a_while,
    ],
)
def test_no_decode_is_expected_once_its_request_has_ended(end: Callable[[Ledger], None]) -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", remote(), 0.0)
    ledger.view(0.0)
    end(ledger)
    assert len(ledger) == 0
    idle = [0.0] * len(ledger.workers)
    table = ledger.view(300.0).table()
    assert [table.running.tolist(), table.waiting.tolist()] == [idle, idle]
    assert [table.queued_tokens.tolist(), table.context_tokens.tolist()] == [idle, idle]


def test_events_of_unknown_requests_change_nothing() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.handed_off("x", 0.0)
    ledger.first_token("x", 0.0)
    ledger.ended("x", 1_000, 0.0)
    ledger.failed("x", 0.0)
    assert (ledger.own("a"), ledger.output_tokens) == (Share(), 256.0)


def test_a_request_is_sent_once() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    with pytest.raises(ValueError, match="'x' is in flight"):
        ledger.sent("x", work("b"), 0.0)
    with pytest.raises(KeyError):
        ledger.sent("y", work("c"), 0.0)
    assert len(ledger) == 1


def test_the_view_has_the_loads_of_now() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    assert ledger.view(0.0).table().queued_tokens.tolist() == [400.0, 0.0]
    ledger.first_token("x", 1.0)
    table = ledger.view(1.0).table()
    assert (table.queued_tokens.tolist(), table.running.tolist()) == ([0.0, 0.0], [1.0, 0.0])


def test_a_report_adds_what_others_sent_and_is_not_counted_twice() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    theirs = WorkerLoad(700, 1, 2, 3_000)
    ledger.reported("a", theirs, 1.0)
    assert ledger.others("a") == OthersShare(300, 1, 1, 2_000)
    assert ledger.load("a")[:4] == (700, 1, 2, 3_000)
    ledger.sent("y", work(), 1.3)
    assert ledger.load("a").queued_tokens == 700 + 400
    assert ledger.report_age_s("a", 3.0) == 2.0
    assert ledger.report_age_s("b", 3.0) == math.inf


def test_a_report_is_compared_with_what_was_in_flight_at_its_time() -> None:
    """It has the request that has ended since, and not the one that was sent since."""
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    ledger.ended("x", 9, 2.0)
    ledger.sent("y", work(), 3.0)
    ledger.reported("a", WorkerLoad(400, 0, 1, 1_000), 1.0)
    assert ledger.others("a") == NO_OTHERS
    ledger.reported("a", WorkerLoad(400, 0, 1, 1_000), 0.5)
    assert ledger.report_age_s("a", 5.0) == 4.0, "an older report is ignored"
    ledger.reported("a", WorkerLoad(400, 0, 1, 1_000), 2.5)
    assert ledger.others("a").running_requests == 1, "at that time this router had none"


def test_what_others_sent_is_believed_for_a_while() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.reported("a", WorkerLoad(700, 1, 2, 3_000), 1.0)
    assert ledger.view(10.9).table().queued_tokens[0] == 700
    assert ledger.view(11.0).table().queued_tokens[0] == 0
    ledger.reported("a", WorkerLoad(700, 1, 2, 3_000), 12.0)
    ledger.reported("a", WorkerLoad(600, 1, 2, 3_000), 20.0)
    assert ledger.view(23.0).table().queued_tokens[0] == 600, "the newer report counts"


def test_a_report_gives_up_no_request() -> None:
    """A request may be on its way for long, as in a slow handoff: a worker does not have it yet."""
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    ledger.reported("a", WorkerLoad(), 90.0)
    assert (len(ledger), ledger.lost_requests) == (1, 0)


def test_a_lost_request_is_given_up_in_time() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work(), 0.0)
    ledger.sent("y", work("b"), 100.0)
    assert len(ledger) == 2
    ledger.sent("z", work("b"), 100.1)
    assert (len(ledger), ledger.own("a"), ledger.lost_requests) == (2, Share(), 1)


@pytest.mark.parametrize("end", [lambda ledger: ledger.failed("x", 1.0), _give_up])
def test_a_request_that_has_failed_and_is_sent_again_is_no_return(
    end: Callable[[Ledger], None],
) -> None:
    ledger = Ledger(pair(), LIMITS)
    times = ledger.sessions._think_times
    ledger.sent("x", work(session="s"), 0.0)
    end(ledger)
    ledger.sent("again", work("b", session="s"), 101.0)
    assert times.pace.num_gaps == 0
    assert not ledger.sessions.has_sibling("s", 0)
    ledger.ended("again", 9, 102.0)
    ledger.sent("next", work("b", session="s"), 103.0)
    assert times.pace.num_gaps == 1


def test_what_others_sent_is_kept_once_a_worker_though_nothing_is_placed() -> None:
    ledger = Ledger(pair(), LIMITS)
    for number in range(10_000):
        ledger.reported("ab"[number % 2], WorkerLoad(700, 1, 2, 3_000), number)
    assert len(ledger._trusted) == 2
    assert ledger.view(10_007.0).table().queued_tokens.tolist() == [700.0, 700.0]
    assert ledger.view(10_008.0).table().queued_tokens.tolist() == [0.0, 700.0]


def test_memory_is_bounded_whatever_is_lost() -> None:
    ledger = Ledger(pair(), LIMITS)
    for number in range(1_000):
        session = str(number)
        ledger.sent(number, work("ab"[number % 2], session=session), 0.001 * number)
        ledger.view(0.001 * number)
    assert (len(ledger), len(ledger.sessions), ledger.lost_requests) == (20, 4, 980)
    assert ledger.own("a").prefilling + ledger.own("b").prefilling == 20


def test_workers_come_and_go_with_their_requests_and_sessions() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.sent("x", work("a", session="s"), 0.0)
    ledger.sent("y", Work("b", "a", 100, 100, "t"), 0.0)
    ledger.set_fleet(fleet_of(worker("b"), worker("c")), 1.0)
    assert ledger.sessions.owner("s") is ledger.sessions.owner("t") is None
    ledger.handed_off("y", 2.0)
    assert (len(ledger), ledger.own("b")) == (0, Share())
    ledger.sent("z", work("c"), 2.0)
    assert ledger.view(2.0).table().queued_tokens.tolist() == [0.0, 400.0]


def test_a_draining_worker_is_shown_as_such() -> None:
    ledger = Ledger(pair(), LIMITS)
    ledger.accepts("a", False)
    assert ledger.view(0.0).table().accepting.tolist() == [0.0, 1.0]
    ledger.reported("a", WorkerLoad(accepting=True), 1.0)
    assert ledger.view(1.0).table().accepting.tolist() == [1.0, 1.0]


def test_limits_are_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        LedgerLimits(trust_s=0.0)


class Interleavings(RuleBasedStateMachine):
    """Requests of one router in any order, with reports of workers that also serve others."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.fleet = pair()
        self.ledger = Ledger(self.fleet, replace(LIMITS, max_requests=1_000, lost_s=1e9))
        self.flights: dict[int, tuple[Work, str, bool]] = {}
        """The work of each request in flight, its worker, and whether its first token came."""
        self.count = 0
        self.ends: list[int] = []

    @rule(passed_s=st.floats(0.0, 3.0))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(
        at=st.sampled_from("ab"),
        decode=st.sampled_from("ab"),
        tokens=st.integers(1, 500),
        session=st.sampled_from(["", "s", "t", "u", "v", "w"]),
        boundary=st.sampled_from([0, 5]),
    )
    def send(self, at: str, decode: str, tokens: int, session: str, boundary: int) -> None:
        self.count += 1
        sent = Work(at, decode, 500, tokens, session, boundary)
        self.ledger.sent(self.count, sent, self.now_s)
        self.flights[self.count] = sent, at, False

    def _some(self, draw: int) -> int | None:
        return sorted(self.flights)[draw % len(self.flights)] if self.flights else None

    @rule(draw=st.integers(0, 99))
    def answer(self, draw: int) -> None:
        request = self._some(draw)
        if request is not None:
            sent, at, _ = self.flights[request]
            if at != sent.decode_worker:
                self.ledger.handed_off(request, self.now_s)
                self.flights[request] = sent._replace(new_tokens=1), sent.decode_worker, False
            else:
                self.ledger.first_token(request, self.now_s)
                self.flights[request] = sent, at, True

    @rule(draw=st.integers(0, 99), fails=st.booleans())
    def end(self, draw: int, fails: bool) -> None:
        request = self._some(draw)
        if request is not None:
            del self.flights[request]
            self.ends.append(request)
            if fails:
                self.ledger.failed(request, self.now_s)
            else:
                self.ledger.ended(request, 7, self.now_s)

    @rule(draw=st.integers(0, 99))
    def end_again(self, draw: int) -> None:
        if self.ends:
            self.ledger.ended(self.ends[draw % len(self.ends)], 7, self.now_s)

    @rule(at=st.sampled_from("ab"), waiting=st.integers(0, 3), lag_s=st.floats(0.0, 4.0))
    def report(self, at: str, waiting: int, lag_s: float) -> None:
        """The worker has at least the requests that this router sent."""
        held = sum(where == at for _, where, _ in self.flights.values())
        load = WorkerLoad(queued_tokens=900, waiting_requests=waiting, running_requests=held)
        self.ledger.reported(at, load, self.now_s - lag_s)

    @invariant()
    def the_own_share_is_what_is_in_flight(self) -> None:
        for name in "ab":
            mine = [(w, first) for w, at, first in self.flights.values() if at == name]
            expected = Share(
                sum(w.new_tokens for w, first in mine if not first),
                sum(not first for _, first in mine),
                sum(first for _, first in mine),
                sum(w.prompt_tokens for w, _ in mine),
            )
            assert self.ledger.own(name) == expected
        assert len(self.ledger) == len(self.flights)

    @invariant()
    def no_figure_is_negative_or_less_than_what_is_in_flight(self) -> None:
        table = self.ledger.view(self.now_s).table()
        for name, at in self.fleet.index.items():
            load = self.ledger.load(name)
            assert min(load) >= 0.0
            held = [w for w, where, _ in self.flights.values() if name in (where, w.decode_worker)]
            assert load.waiting_requests + load.running_requests >= len(held)
            assert load.context_tokens >= sum(w.prompt_tokens for w in held)
            if not self.flights:
                others = self.ledger.others(name)
                assert load.running_requests == others.running_requests
                assert load.context_tokens == others.context_tokens
            seen = (table.queued_tokens, table.waiting, table.running)
            expected = (load.queued_tokens, load.waiting_requests, load.running_requests)
            assert tuple(row[at] for row in seen) == expected
            returning = (table.returning[at], table.returning_tokens[at])
            assert returning == (load.returning, load.returning_tokens)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.ledger.sessions) <= LIMITS.max_sessions


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
