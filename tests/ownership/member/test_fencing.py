"""The fence refuses stale copies, admits fresh ones, and stays small."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownership.directory import Epoch, Token
from ownership.member.fencing import Fence
from tests.clock import Clock
from tests.ownership.fleet_bench import artifact

A, B = artifact("a"), artifact("b")
ANN, BOB = Epoch(1), Epoch(2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fence(clock: Clock) -> Fence:
    return Fence(clock, horizon_s=30.0, capacity=4)


def num_remembered(fence: Fence) -> int:
    return len(fence._tokens._seen) + len(fence._ended._seen)


def test_the_same_and_greater_tokens_pass_and_smaller_ones_do_not(
    fence: Fence, clock: Clock
) -> None:
    now_s = clock.now_s
    assert fence.admit(A, ANN, Token(5), now_s)
    assert fence.admit(A, ANN, Token(5), now_s)
    assert fence.admit(A, BOB, Token(9), now_s)
    assert not fence.admit(A, ANN, Token(5), now_s)
    assert not fence.admit(A, ANN, Token(8), now_s)
    assert fence.admit(A, BOB, Token(9), now_s)
    assert fence.admit(B, ANN, Token(5), now_s)


def test_a_token_seen_elsewhere_counts(fence: Fence, clock: Clock) -> None:
    fence.note_token(A, Token(7))
    fence.note_token(A, Token(6))
    assert not fence.admit(A, ANN, Token(6), clock.now_s)


def test_the_chains_of_several_long_prompts_are_remembered(clock: Clock) -> None:
    fence = Fence(clock)
    fence.note_tokens({artifact(str(number)): Token(1) for number in range(100_000)})
    assert fence.admit(A, ANN, Token(5), clock.now_s), "nothing was forgotten"


def test_copies_of_an_ended_epoch_are_refused_whatever_their_token(
    fence: Fence, clock: Clock
) -> None:
    fence.note_end(ANN)
    assert not fence.admit(A, ANN, Token(99), clock.now_s)
    assert fence.admit(A, BOB, Token(99), clock.now_s)


def test_an_answer_older_than_the_horizon_is_refused(fence: Fence, clock: Clock) -> None:
    asked_s = clock.now_s
    clock.now_s += 29.9
    assert fence.admit(A, ANN, Token(5), asked_s)
    clock.now_s += 0.2
    assert not fence.admit(A, ANN, Token(5), asked_s)


def test_a_fence_forgets_tokens_older_than_the_horizon(fence: Fence, clock: Clock) -> None:
    fence.note_token(A, Token(7))
    fence.note_end(ANN)
    clock.now_s += 30.1
    fence.note_token(B, Token(8))
    fence.note_end(BOB)
    assert num_remembered(fence) == 2


def test_a_full_fence_refuses_every_earlier_answer(fence: Fence, clock: Clock) -> None:
    before_s = clock.now_s
    fence.note_token(A, Token(50))
    clock.now_s += 1.0
    for index in range(4):
        fence.note_token(artifact("many", index), Token(60))
    assert num_remembered(fence) <= 4
    assert not fence.admit(A, ANN, Token(5), before_s)
    assert not fence.admit(B, ANN, Token(5), before_s)
    assert not fence.admit(B, ANN, Token(5), clock.now_s)
    assert fence.admit(B, ANN, Token(5), clock.now_s + 0.001)


EVENTS = ["wait", "take over", "ask", "use", "hear of", "hear of end"]


class Fleet:
    """Three artifacts whose owners change, and a reference fence that forgets nothing."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fence = Fence(self.clock, horizon_s=30.0, capacity=2)
        self.owners = {index: (Epoch(index + 1), Token(index + 1)) for index in range(3)}
        self.past: list[Epoch] = []
        self.answers: list[tuple[float, int, Epoch, Token]] = []
        self.seen = dict.fromkeys(self.owners, Token(0))
        self.ended: set[Epoch] = set()
        self.last = len(self.owners)

    def step(self, event: str, which: int) -> None:
        index = which % len(self.owners)
        if event == "wait":
            self.clock.now_s += 20.0 * index
        elif event == "take over":
            self.last += 1
            self.past.append(self.owners[index][0])
            self.owners[index] = (Epoch(self.last), Token(self.last))
            if which >= len(self.owners):
                self.step("hear of", which)
        elif event == "ask":
            self.answers.append((self.clock.now_s, index, *self.owners[index]))
        elif event == "hear of":
            self.seen[index] = self.owners[index][1]
            self.fence.note_token(artifact("x", index), self.seen[index])
        elif event == "hear of end" and self.past:
            self.ended.add(self.past[-1])
            self.fence.note_end(self.past[-1])
        elif self.answers:
            self.use(*self.answers[which % len(self.answers)])

    def use(self, asked_s: float, index: int, holder: Epoch, token: Token) -> None:
        if self.fence.admit(artifact("x", index), holder, token, asked_s):
            assert token >= self.seen[index]
            assert holder not in self.ended
            self.seen[index] = token


@settings(max_examples=600)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), min_size=10, max_size=40))
def test_a_fence_is_never_more_lenient_than_one_that_remembers_everything(
    steps: Sequence[tuple[str, int]],
) -> None:
    """Use answers in any order, some long after they were given."""
    fleet = Fleet()
    for event, which in steps:
        fleet.step(event, which)
    for index, (holder, token) in fleet.owners.items():
        fleet.clock.now_s += 0.001
        fresh = fleet.fence.admit(artifact("x", index), holder, token, fleet.clock.now_s)
        assert fresh, "a fresh answer is refused"
