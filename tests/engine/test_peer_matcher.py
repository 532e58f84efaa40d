"""`RetryLimit`: a request that claims a handoff costs the directory a limited number of lookups."""

from __future__ import annotations

from hetero_connector.engine.scheduler.peer_matcher import RetryLimit

STEP_S = 1e-3
WAITED_S = 0.5


class Waiting:
    """Requests that retry as soon as they may, for half a second."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.limit = RetryLimit(lambda: self.now_s)

    def lookup_times(self, requests: int) -> list[list[float]]:
        """Return the times in seconds of each request's lookups."""
        begun_s = self.now_s
        lookups = [[begun_s] for _ in range(requests)]
        while self.now_s < begun_s + WAITED_S:
            self.now_s += STEP_S
            for times in lookups:
                if self.limit.try_acquire(times[-1], len(times)):
                    times.append(self.now_s)
        return lookups


def test_the_first_retries_follow_fast_and_later_ones_do_not() -> None:
    [times] = Waiting().lookup_times(1)
    assert times[1] - times[0] <= 0.012
    assert times[4] - times[0] <= 0.05, "a handoff takes some 10 ms"
    assert len(times) <= 11


def test_all_requests_together_have_a_limited_rate() -> None:
    lookups = Waiting().lookup_times(1_000)
    assert sum(len(times) - 1 for times in lookups) <= 50 + 200 * WAITED_S + 1
