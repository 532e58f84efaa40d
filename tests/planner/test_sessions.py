"""Think times are learned and predicted; conversations are recognised by their tokens."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.planner import sessions
from hetero_connector.planner.sessions import EARLY, LATE, Conversations, ThinkTimes
from tests.interleaving import at_each_step


def played(rng: random.Random, sessions: int, turns: int, sigma: float) -> tuple[ThinkTimes, float]:
    """Play sessions of different think times; return the share of returns inside the window."""
    times, inside, predicted = ThinkTimes(), 0, 0
    for session in range(sessions):
        pace, now_s = rng.gauss(math.log(20), 1.0), 1e6 * session
        for turn in range(turns):
            times.on_turn_start(session, now_s)
            now_s += 1.0
            expected = times.on_turn_end(session, now_s)
            now_s += math.exp(rng.gauss(pace, sigma))
            if turn and turn < turns - 1 and session > sessions // 4:
                assert expected is not None
                predicted += 1
                inside += expected.earliest_s <= now_s <= expected.latest_s
    return times, inside / predicted


@pytest.mark.parametrize("sigma", [0.1, 0.4, 1.0])
def test_sessions_come_back_when_predicted(sigma: float) -> None:
    _, share = played(random.Random(1), 80, 20, sigma)
    assert LATE - EARLY - 0.12 < share <= 1.0


def test_a_regular_session_is_predicted_closely_and_a_new_one_by_all_others() -> None:
    times = ThinkTimes()
    rng = random.Random(2)
    now_s = 0.0
    for _ in range(200):
        times.on_turn_start("mixed", now_s)
        times.on_turn_end("mixed", now_s)
        now_s += math.exp(rng.gauss(3.0, 1.5))
    now_s = 1e9
    for _ in range(30):
        times.on_turn_start("regular", now_s)
        expected = times.on_turn_end("regular", now_s)
        now_s += 7.0
    assert expected is not None
    ended_s = now_s - 7.0
    assert 4.0 < expected.earliest_s - ended_s < 7.0 < expected.latest_s - ended_s < 13.0
    new = times.on_turn_end("new", now_s)
    assert new is not None
    assert new.latest_s - new.earliest_s > 5 * (expected.latest_s - expected.earliest_s)


def test_before_any_gap_only_hints_are_used() -> None:
    times = ThinkTimes()
    times.on_turn_start("a", 0.0)
    assert times.on_turn_end("a", 1.0) is None
    times.on_turn_start("b", 0.0)
    hinted = times.on_turn_end("b", 100.0, hint_s=10.0)
    assert hinted is not None
    assert 105.0 < hinted.earliest_s < 110.0 < hinted.latest_s < 116.0
    assert times.on_turn_end("c", 0.0, hint_s=0.0) is not None, "at once"


def test_wrong_hints_are_corrected() -> None:
    times, now_s = ThinkTimes(), 0.0
    for _ in range(100):
        times.on_turn_start("a", now_s)
        expected = times.on_turn_end("a", now_s, hint_s=10.0)
        now_s += 30.0  # each time three times as long
    assert expected is not None
    assert expected.earliest_s <= now_s <= expected.latest_s
    assert expected.earliest_s > now_s - 30.0 + 15.0


def test_lost_sessions_reduce_the_probability_of_returns() -> None:
    faithful, fickle = ThinkTimes(), ThinkTimes()
    for i in range(300):
        for times, back in ((faithful, True), (fickle, i % 3 == 0)):
            times.on_turn_start(i, 1000.0 * i)
            times.on_turn_end(i, 1000.0 * i)
            if back:
                times.on_turn_start(i, 1000.0 * i + 10)
                times.on_turn_end(i, 1000.0 * i + 10)
    one, other = faithful.on_turn_end("new", 1e6), fickle.on_turn_end("new", 1e6)
    assert one is not None
    assert other is not None
    assert other.probability < 0.8 * one.probability


@pytest.mark.parametrize("hint_s", [None, 1e8])
def test_a_long_session_does_not_hide_lost_ones(hint_s: float | None) -> None:
    """A turn that runs for hours, or a hint of a year."""
    times = ThinkTimes()
    for i in range(10):
        times.on_turn_start("faithful", 10.0 * i)
        times.on_turn_end("faithful", 10.0 * i)
    before = times.on_turn_end("faithful", 100.0)
    times.on_turn_start("long", 101.0)
    if hint_s is not None:
        times.on_turn_end("long", 101.0, hint_s)
    for i in range(300):
        times.on_turn_start(i, 1000.0 * i)
        times.on_turn_end(i, 1000.0 * i)
    after = times.on_turn_end("new", 1e6)
    assert before is not None
    assert after is not None
    assert after.probability < 0.2 * before.probability


def test_concurrent_turns_count_as_one() -> None:
    times = ThinkTimes()
    times.on_turn_start("a", 0.0)
    times.on_turn_start("a", 1.0)
    assert times.on_turn_end("a", 2.0, hint_s=5.0) is None, "another is still running"
    assert times.on_turn_end("a", 3.0, hint_s=5.0) is not None
    assert times.on_turn_end("a", 4.0, hint_s=5.0) is not None, "one that never began does no harm"


def test_memory_is_bounded() -> None:
    times = ThinkTimes(max_sessions=10)
    for i in range(1000):
        times.on_turn_start(i, float(i))
        times.on_turn_end(f"unheard of {i}", float(i))
        times.on_turn_start("again", float(i))
        times.on_turn_end("again", float(i), hint_s=1e8)
    assert len(times) <= 10
    assert len(times._lost) <= 100


GAPS_S = st.floats(0.0, 1e7)


@given(
    st.lists(st.tuples(st.integers(0, 3), GAPS_S, st.none() | GAPS_S), max_size=40), GAPS_S, GAPS_S
)
def test_answers_are_valid_for_any_sequence_of_events(
    turns: list[tuple[int, float, float | None]], idle_s: float, within_s: float
) -> None:
    times, now_s = ThinkTimes(max_sessions=3), 0.0
    for session, gap_s, hint_s in turns:
        now_s += gap_s
        times.on_turn_start(session, now_s)
        expected = times.on_turn_end(session, now_s, hint_s)
        if expected is not None:
            assert now_s <= expected.earliest_s < expected.latest_s < math.inf
            assert 0.0 < expected.probability <= 1.0
    chance = times.return_probability(idle_s, within_s)
    assert 0.0 <= chance <= 1.0
    assert times.return_probability(idle_s, 2 * within_s) >= chance


def test_another_thread_gets_a_probability_at_any_moment() -> None:
    times = ThinkTimes()
    times.on_turn_end("a", 0.0)
    answers: list[float] = []
    with at_each_step(lambda: answers.append(times.return_probability(1e-3, 1e6)), sessions):
        times.on_turn_start("a", 30.0)
    assert answers
    assert max(answers) <= 1.0


def test_a_longer_idle_session_is_less_likely_to_return_soon() -> None:
    times = ThinkTimes()
    for i in range(100):
        times.on_turn_start("a", 60.0 * i)
        times.on_turn_end("a", 60.0 * i + 40)  # 20 s
    soon, later = times.return_probability(15.0, 10.0), times.return_probability(300.0, 10.0)
    assert soon > 0.5 > 0.05 > later


@pytest.mark.parametrize("hint_s", [0.0, 1e308])
def test_any_hint_gives_finite_times(hint_s: float) -> None:
    known = ThinkTimes()
    for turn in range(20):
        known.on_turn_start("wild", 10.0 * turn)
        expected = known.on_turn_end("wild", 10.0 * turn + 1, hint_s)
        assert expected is not None
        assert 10.0 * turn < expected.earliest_s <= expected.latest_s < 1e10


CHUNK, GRAIN = 16, 4
HASHER = ChainHasher(b"f", CHUNK)


class Talk:
    """Requests whose whole chain is stored."""

    def __init__(self, capacity: int = 64) -> None:
        self.conversations = Conversations(CHUNK, GRAIN, capacity)

    def turn(self, prompt: list[int], matched: int | None = None) -> int:
        chain = RequestChain(HASHER)
        chain.extend(prompt)
        full = len(prompt) // CHUNK if matched is None else matched
        conversation = self.conversations.take(chain, len(prompt), full)
        self.conversations.record(chain, len(prompt), conversation)
        return conversation


def text(seed: int, count: int) -> list[int]:
    return [seed * 1000 + i for i in range(count)]


def test_the_next_turn_is_recognised_whatever_the_answer() -> None:
    talk = Talk()
    first = text(1, 40)
    conversation = talk.turn(first)
    second = [*first, *text(2, 30)]
    assert talk.turn(second) == conversation
    assert talk.turn([*second, *text(3, 50)]) == conversation
    assert len(talk.conversations) == 1


def test_a_common_beginning_is_not_a_continuation() -> None:
    talk, system = Talk(), text(0, 2 * CHUNK)
    one = talk.turn([*system, *text(1, 8)])
    other = talk.turn([*system, *text(2, 8)])
    assert one != other
    assert talk.turn([*system, *text(1, 8), *text(3, 40)]) == one
    assert talk.turn([*system, *text(2, 8), *text(4, 40)]) == other


def test_each_turn_is_continued_once() -> None:
    talk, prompt = Talk(), text(1, 40)
    first = talk.turn(prompt)
    assert talk.turn([*prompt, *text(2, 20)]) == first
    assert talk.turn([*prompt, *text(3, 20)]) != first, "asked again: a branch"


def test_chunks_that_are_not_stored_are_not_searched() -> None:
    talk, prompt = Talk(), text(1, 40)
    first = talk.turn(prompt)
    assert talk.turn([*prompt, *text(2, 20)], matched=0) != first


def test_prompts_shorter_than_a_chunk_continue_nothing() -> None:
    talk = Talk()
    assert talk.turn(text(1, CHUNK - 1)) != talk.turn(text(1, CHUNK - 1))
    assert len(talk.conversations) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=40), st.integers(1, 8))
def test_conversations_are_not_mixed_and_memory_is_bounded(
    turns: list[tuple[int, int]], capacity: int
) -> None:
    talk = Talk(capacity)
    prompts: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    for who, count in turns:
        prompts[who] = [*prompts.get(who, text(who, CHUNK)), *text(100 + who, count)]
        conversation = talk.turn(prompts[who])
        assert owner.setdefault(conversation, who) == who
        assert len(talk.conversations) <= capacity
        assert all(len(x) <= 8 for x in talk.conversations._turns.values())


def test_one_client_s_wrong_hints_hardly_move_what_others_hints_mean() -> None:
    """It says "at once" and comes back after half a minute."""
    times = ThinkTimes()
    for turn in range(300):
        times.on_turn_start("wrong", 30.0 * turn)
        times.on_turn_end("wrong", 30.0 * turn, hint_s=0.0)
    expected = times.on_turn_end("right", 1e6, hint_s=60.0)
    assert expected is not None
    assert expected.latest_s <= 1e6 + 5 * 60.0
