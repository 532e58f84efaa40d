from ownership.directory.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, CircuitBreaker
from tests.clock import Clock


def test_a_failure_refuses_calls_for_a_pause_and_a_success_ends_it() -> None:
    clock = Clock(0.0)
    breaker = CircuitBreaker(clock)
    assert breaker.admit() == 0.0
    breaker.on_failure()
    assert breaker.admit() == FIRST_PAUSE_S
    clock.now_s += FIRST_PAUSE_S
    assert breaker.admit() == 0.0
    breaker.on_success()
    assert breaker.admit() == 0.0
    assert not breaker.is_open


def test_only_one_call_tries_at_the_end_of_a_pause() -> None:
    clock = Clock(0.0)
    breaker = CircuitBreaker(clock)
    breaker.on_failure()
    clock.now_s += FIRST_PAUSE_S
    assert breaker.admit() == 0.0
    assert breaker.admit() > 0.0


def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock(0.0)
    breaker = CircuitBreaker(clock)
    pauses = []
    for _ in range(8):
        breaker.on_failure()
        pauses.append(breaker.admit())
        clock.now_s += pauses[-1]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_calls_that_fail_together_count_once() -> None:
    clock = Clock(0.0)
    breaker = CircuitBreaker(clock)
    for _ in range(5):
        breaker.on_failure(began_s=-1.0)
    assert breaker.admit() == FIRST_PAUSE_S
    clock.now_s += FIRST_PAUSE_S
    assert breaker.admit() == 0.0
    breaker.on_failure(began_s=clock.now_s)
    assert breaker.admit() == 2 * FIRST_PAUSE_S


def test_an_old_call_that_fails_after_a_success_counts() -> None:
    breaker = CircuitBreaker(Clock(0.0))
    breaker.on_failure(began_s=-1.0)
    breaker.on_success()
    breaker.on_failure(began_s=-1.0)
    assert breaker.admit() == FIRST_PAUSE_S
