"""A worker stops before its lease ends at the directory, whatever messages and clocks do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.errors import StaleEpochError
from ownership.directory import Epoch, Lease, Worker
from ownership.directory.memory import MemoryDirectory
from ownership.member.held_lease import MARGIN, HeldLease
from tests.clock import Clock

LEASE_S = 10.0


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def test_a_lease_is_valid_from_its_request_less_the_margin(clock: Clock) -> None:
    held = HeldLease(Lease("w", Epoch(1), LEASE_S), clock.now_s, clock)
    assert held.epoch == 1
    clock.now_s = 100.0 + LEASE_S * (1 - MARGIN) - 0.01
    assert held.is_valid
    clock.now_s += 0.02
    assert not held.is_valid


def test_a_renewal_counts_from_its_request_and_never_shortens_the_lease(clock: Clock) -> None:
    held = HeldLease(Lease("w", Epoch(1), LEASE_S), clock.now_s, clock)
    held.on_renewed(108.0)
    held.on_renewed(104.0)
    clock.now_s = 116.9
    assert held.is_valid
    clock.now_s = 117.1
    assert not held.is_valid


def test_an_invalid_lease_stays_invalid(clock: Clock) -> None:
    held = HeldLease(Lease("w", Epoch(1), LEASE_S), clock.now_s, clock)
    held.invalidate()
    held.on_renewed(clock.now_s)
    assert not held.is_valid


def test_a_renewal_is_due_three_times_a_lease(clock: Clock) -> None:
    held = HeldLease(Lease("w", Epoch(1), 9.0), clock.now_s, clock)
    assert held.renew_in_s == pytest.approx(3.0)
    clock.now_s += 5.0
    assert held.renew_in_s == 0.0
    held.on_renewed(clock.now_s)
    assert held.renew_in_s == pytest.approx(3.0)


delays = st.floats(0.0, 3.0)
STEPS = st.lists(st.tuples(delays, delays, delays, st.booleans()), max_size=12)


@given(steps=STEPS, rate=st.floats(1 - MARGIN / 2, 1 + MARGIN / 2), probe=st.floats(0, 30))
def test_a_lease_ends_for_its_worker_before_it_ends_for_the_directory(
    steps: list[tuple[float, float, float, bool]], rate: float, probe: float
) -> None:
    """Renewals with any delays, lost answers, and clocks of different rates."""
    real = Clock(0.0)
    directory = MemoryDirectory(real)

    def own() -> float:
        return real.now_s * rate

    def compare() -> None:
        if held.is_valid:
            assert held.epoch in directory.workers()

    asked_s = own()
    real.now_s += 1.0
    held = HeldLease(directory.register(Worker("w"), LEASE_S), asked_s, own)
    for wait_s, there_s, back_s, answered in steps:
        real.now_s += wait_s
        compare()
        asked_s = own()
        real.now_s += there_s
        compare()
        try:
            directory.renew_lease(held.epoch)
        except StaleEpochError:
            held.invalidate()
            break
        real.now_s += back_s
        compare()
        if answered:
            held.on_renewed(asked_s)
        compare()
    real.now_s += probe
    compare()
