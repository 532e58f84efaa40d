"""A request that claims to be prefilled costs the directory so many questions, and no more."""

from __future__ import annotations

from hetero_connector.engine.scheduler.asking_again import AskingAgain

STEP_S = 1e-3
WAITED_S = 0.5


class Asked:
    """Requests that ask as soon as they may."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.asking = AskingAgain(lambda: self.now_s)

    def ask(self, requests: int) -> list[list[float]]:
        """When each asked, of so many that wait for half a second."""
        begun_s = self.now_s
        asked = [[begun_s] for _ in range(requests)]
        while self.now_s < begun_s + WAITED_S:
            self.now_s += STEP_S
            for times in asked:
                if self.asking.may_ask(times[-1], len(times)):
                    times.append(self.now_s)
        return asked


def test_the_first_questions_follow_fast_and_later_ones_do_not() -> None:
    [asked] = Asked().ask(1)
    assert asked[1] - asked[0] <= 0.012
    assert asked[4] - asked[0] <= 0.05, "a handoff takes some 10 ms"
    assert len(asked) <= 11


def test_all_requests_together_ask_so_often_and_no_more() -> None:
    asked = Asked().ask(1_000)
    assert sum(len(times) - 1 for times in asked) <= 50 + 200 * WAITED_S + 1
