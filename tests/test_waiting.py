"""A wait returns what it waited for, and says what never came."""

from types import SimpleNamespace

import pytest

from tests.clock import Clock
from tests.waiting import until


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    given = SimpleNamespace(monotonic=clock, sleep=clock.passes)
    monkeypatch.setattr("tests.waiting.time", given)
    return clock


def test_the_first_true_answer_is_returned(clock: Clock) -> None:
    answers = iter([None, 0, "yes", "no"])
    assert until(lambda: next(answers), pause_s=0.25) == "yes"
    assert clock.now_s == 1_000.5


def test_without_patience_it_is_asked_once() -> None:
    assert until(lambda: True, patience_s=0.0)
    asked: list[None] = []
    with pytest.raises(AssertionError, match="it never happened"):
        until(lambda: asked.append(None), patience_s=0.0)
    assert len(asked) == 1


def test_it_is_asked_once_more_when_the_patience_is_over(clock: Clock) -> None:
    assert until(lambda: clock.now_s >= 1_003.0, patience_s=2.0, pause_s=3.0)

    def asks_for_long() -> bool:
        clock.passes(5.0)
        return clock.now_s >= 1_010.0

    assert until(asks_for_long, patience_s=2.0)


def test_the_message_is_made_only_if_it_never_came() -> None:
    until(lambda: True, lambda: pytest.fail("it came"))
    with pytest.raises(AssertionError, match="the log"):
        until(lambda: False, lambda: "the log")
