"""Sessions as a router knows them: their ends are unknown."""

from __future__ import annotations

from random import Random

import pytest

from hetero_connector.planner.sessions import ThinkTimes
from ownership.scheduling.session_table import LastTurn, SessionTable


def table(max_sessions: int = 100) -> SessionTable:
    return SessionTable(ThinkTimes(max_sessions), max_sessions)


def turn(sessions: SessionTable, name: str, owner: str, begin_s: float, end_s: float) -> None:
    sessions.on_turn_start(name, owner, 0, begin_s)
    sessions.on_turn_end(name, 0, end_s)


def test_the_owner_is_the_worker_of_the_last_turn() -> None:
    sessions = table()
    assert sessions.owner("s") is None
    turn(sessions, "s", "a", 0.0, 1.0)
    turn(sessions, "s", "b", 2.0, 3.0)
    assert sessions.owner("s") == "b"
    sessions.forget_worker("b")
    assert (sessions.owner("s"), len(sessions)) == (None, 0)


def test_the_last_answer_stays_known_while_a_later_turn_runs_or_fails() -> None:
    sessions = table()
    assert sessions.last_turn("s") is None
    sessions.on_computed("s", "a", 10)
    assert sessions.last_turn("s") is None, "it never began"
    sessions.on_turn_start("s", "a", 0, 0.0)
    assert sessions.last_turn("s") is None
    sessions.on_computed("s", "a", 1_007)
    sessions.on_turn_end("s", 0, 1.0)
    sessions.on_turn_start("s", "b", 1_007, 2.0)
    sessions.on_turn_failed("s", 1_007)
    assert (sessions.owner("s"), sessions.last_turn("s")) == ("b", LastTurn("a", 1_007))


def test_a_sibling_continues_from_the_same_boundary_at_the_same_time() -> None:
    sessions = table()
    sessions.on_turn_start("s", "a", 500, 0.0)
    assert sessions.has_sibling("s", 500)
    assert not sessions.has_sibling("s", 400)
    assert not sessions.has_sibling("t", 500)
    sessions.on_turn_end("s", 500, 1.0)
    assert not sessions.has_sibling("s", 500)
    sessions.on_turn_start("s", "a", 0, 2.0)
    assert not sessions.has_sibling("s", 0), "two requests that continue nothing are no fork"


def test_chats_of_one_request_are_not_expected_back() -> None:
    sessions = table()
    for number in range(50):
        turn(sessions, str(number), "a", number, number + 0.5)
    assert sessions.returning("a") == 0.0


def returning_sessions(sessions: SessionTable, turns: int, until_s: float = 0.0) -> float:
    """Let ten sessions take turns, five seconds apart; return the time of the last one's end."""
    rng, now_s = Random(1), until_s
    for _ in range(turns):
        for number in range(10):
            turn(sessions, str(number), "ab"[number % 2], now_s, now_s + 0.1)
            now_s += 0.5 + 0.01 * rng.random()
    return now_s


def test_sessions_are_expected_back_if_others_came_back() -> None:
    sessions = table()
    now_s = returning_sessions(sessions, 20)
    assert sessions.returning("a") == pytest.approx(5, rel=0.1)
    assert sessions.returning("b") == pytest.approx(5, rel=0.1)
    assert sessions.on_turn_start("0", "b", 0, now_s) == {"a"}, "one session waits less"
    assert sessions.returning("a") == pytest.approx(4, rel=0.1)


def test_sessions_that_come_back_need_the_tokens_of_their_last_prompt() -> None:
    sessions = table()
    now_s = returning_sessions(sessions, 20)
    assert sessions.returning_tokens("a") == pytest.approx(0.0)
    sessions.on_turn_start("0", "a", 0, now_s, 7_000)
    sessions.on_turn_end("0", 0, now_s + 0.1)
    assert sessions.returning_tokens("a") == pytest.approx(7_000, rel=0.1)
    sessions.expire(now_s + 60.0)
    assert sessions.returning_tokens("a") == 0.0


def test_overdue_sessions_are_expected_no_more() -> None:
    sessions = table()
    now_s = returning_sessions(sessions, 20)
    assert sessions.expire(now_s) == set()
    assert sessions.expire(now_s + 60.0) == {"a", "b"}
    assert (sessions.returning("a"), sessions.returning("b")) == (0.0, 0.0)


def test_a_session_with_a_turn_under_way_is_not_idle() -> None:
    sessions = table()
    now_s = returning_sessions(sessions, 5)
    before = sessions.returning("a")
    for _ in range(2):
        sessions.on_turn_start("0", "a", 0, now_s)
    sessions.on_turn_end("0", 0, now_s + 1.0)
    assert sessions.returning("a") < before
    sessions.on_turn_end("0", 0, now_s + 1.5)
    assert sessions.returning("a") == pytest.approx(before, rel=0.1)


def test_a_session_is_not_expected_back_after_a_turn_that_has_failed() -> None:
    sessions = table()
    now_s = returning_sessions(sessions, 5)
    before = sessions.returning("a")
    for _ in range(3):
        sessions.on_turn_start("0", "a", 5, now_s)
    waiting = sessions.returning("a")
    sessions.on_turn_failed("0", 5)
    sessions.on_turn_end("0", 5, now_s + 1.0)
    assert sessions.has_sibling("0", 5)
    assert sessions.returning("a") == waiting < before, "another turn is under way"
    sessions.on_turn_end("0", 5, now_s + 1.5)
    assert sessions.returning("a") == pytest.approx(before, rel=0.1)
    sessions.on_turn_start("0", "a", 5, now_s + 2.0)
    sessions.on_turn_failed("0", 5)
    assert not sessions.has_sibling("0", 5)
    assert sessions.returning("a") == pytest.approx(waiting)


def test_a_turn_that_fails_leaves_what_its_session_has_taught() -> None:
    think_times = ThinkTimes(100)
    sessions = SessionTable(think_times, 10)
    for turn in range(12):
        sessions.on_turn_start("a", "w", 5, 301.0 * turn)
        expected = think_times.on_turn_end("a", 301.0 * turn + 1.0)
        think_times.on_turn_start("a", 301.0 * turn + 1.0)  # the table ends the turn itself
        sessions.on_turn_end("a", 5, 301.0 * turn + 1.0)
    sessions.on_turn_start("a", "w", 5, 4000.0)
    sessions.on_turn_failed("a", 5)
    sessions.on_turn_start("a", "w", 5, 4000.1)
    again = think_times.on_turn_end("a", 4001.0)
    assert expected is not None
    assert again is not None
    assert again.latest_s - 4001.0 > 100.0, "its own pauses, and not a tenth of a second"


def test_the_sessions_seen_last_are_kept() -> None:
    sessions = SessionTable(ThinkTimes(100), 5)
    now_s = returning_sessions(sessions, 3)
    assert len(sessions) == 5
    assert 1.0 < sessions.returning("a") + sessions.returning("b") <= 5
    assert sessions.owner("0") is None
    sessions.expire(now_s + 1_000.0)
    assert sessions.returning("a") + sessions.returning("b") == 0.0
