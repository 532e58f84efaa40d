"""Seconds of loads: latency, bytes by type, bytes in flight."""

from __future__ import annotations

import math
import random

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec import StateType

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
PROFILE = {Tier.SSD: TierRates(0.01, {KV: 1e-9, SWA: 4e-9}, 2e-9)}


def test_a_load_is_latency_bytes_by_type_and_bytes_in_flight() -> None:
    model = LoadModel([KV, SWA], PROFILE)
    seconds = model.predict(Tier.SSD, {KV: 50_000_000, SWA: 1_000_000}, 30_000_000)
    assert seconds == pytest.approx(0.01 + 0.05 + 0.004 + 0.06)


def test_a_load_of_no_bytes_takes_no_time() -> None:
    model = LoadModel([KV, SWA], PROFILE)
    assert model.predict(Tier.SSD, {}) == 0.0
    assert model.predict(Tier.SSD, {KV: 0}, in_flight_bytes=10**9) == 0.0


def test_the_defaults_order_the_tiers_by_speed() -> None:
    model = LoadModel([KV])
    dram, ssd, peer = (model.predict(t, {KV: 10**8}) for t in (Tier.DRAM, Tier.SSD, Tier.PEER))
    assert 0.0 < dram < ssd < peer


def test_a_type_that_the_profile_lacks_gets_the_default() -> None:
    model = LoadModel([KV, SWA], {Tier.SSD: TierRates(0.01, {KV: 1e-9}, 1e-9)})
    assert model.rates(Tier.SSD).seconds_per_byte[SWA] == pytest.approx(1 / 3e9)


@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidths_are_found_in_noise_with_outliers(seed: int) -> None:
    rng = random.Random(seed)
    model = LoadModel([KV, SWA])
    for _ in range(300):
        kv, swa = rng.randint(0, 10**9), rng.choice([0, 10**6, 10**8])
        seconds = (0.004 + kv / 0.8e9 + swa / 0.2e9) * (1 + 0.1 * rng.gauss(0, 1))
        if rng.random() < 0.08:
            seconds *= 10
        if kv + swa:
            model.observe(Tier.SSD, {KV: kv, SWA: swa}, seconds)
    for sizes in ({KV: 10**8}, {SWA: 10**8}, {KV: 5 * 10**8, SWA: 10**6}):
        expected = 0.004 + sizes.get(KV, 0) / 0.8e9 + sizes.get(SWA, 0) / 0.2e9
        assert model.predict(Tier.SSD, sizes) == pytest.approx(expected, rel=0.12)
    assert model.errors(Tier.SSD).median < 0.15


@pytest.mark.parametrize("speed", [0.04, 0.2, 0.6, 2.0, 25.0])
@pytest.mark.parametrize("types", [1, 2])
def test_a_few_loads_show_a_change_of_speed(speed: float, types: int) -> None:
    rng = random.Random(1)
    model = LoadModel([KV, SWA])
    sizes = [{KV: n, SWA: n // 30} if types == 2 else {KV: n} for n in (10**7, 4 * 10**7, 10**8)]

    def load(sizes: dict[StateType, int], bandwidth: float) -> float:
        return (1e-3 + sum(sizes.values()) / bandwidth) * (1 + 0.05 * rng.gauss(0, 1))

    for size in sizes * 60:
        model.observe(Tier.SSD, size, load(size, 0.5e9))
    for size in sizes * 2:
        model.observe(Tier.SSD, size, load(size, speed * 0.5e9))
    for size in sizes:
        changed_s = 1e-3 + sum(size.values()) / (speed * 0.5e9)
        assert model.predict(Tier.SSD, size) == pytest.approx(changed_s, rel=0.2)


def test_unaffected_small_loads_do_not_hide_a_slower_disk() -> None:
    model = LoadModel([KV])
    for size in (10**4, 10**8) * 100:
        model.observe(Tier.SSD, {KV: size}, 1e-3 + size / 2.5e9)
    for size in (10**4, 10**8) * 4:
        model.observe(Tier.SSD, {KV: size}, 1e-3 + size / 0.1e9)
    assert model.predict(Tier.SSD, {KV: 10**8}) == pytest.approx(1.0, rel=0.1)
    assert model.predict(Tier.SSD, {KV: 10**4}) == pytest.approx(1e-3, rel=0.2)


def test_a_load_behind_others_does_not_make_the_tier_look_slow() -> None:
    model = LoadModel([KV])
    for ahead in (0, 10**8, 4 * 10**8) * 20:
        model.observe(Tier.SSD, {KV: 10**8}, (ahead + 10**8) / 1e9, ahead)
    assert model.predict(Tier.SSD, {KV: 10**8}) == pytest.approx(0.1, rel=0.1)
    assert model.predict(Tier.SSD, {KV: 10**8}, 10**8) == pytest.approx(0.2, rel=0.1)


def test_failed_loads_show_that_a_tier_is_slow() -> None:
    model = LoadModel([KV])
    for _ in range(100):
        model.observe(Tier.SSD, {KV: 10**9}, 0.3)
    for _ in range(3):
        model.observe(Tier.SSD, {KV: 10**9}, 12.0, at_least=True)
    assert model.predict(Tier.SSD, {KV: 10**9}) == pytest.approx(12.0, rel=0.05)


def test_a_load_that_failed_before_its_predicted_end_teaches_nothing() -> None:
    model = LoadModel([KV], PROFILE)
    before = model.rates(Tier.SSD)
    model.observe(Tier.SSD, {KV: 10**9}, 1.0, at_least=True)
    assert model.rates(Tier.SSD) is before
    assert model.errors(Tier.SSD).count == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_invalid_seconds_teach_nothing(seconds: float) -> None:
    model = LoadModel([KV, SWA], PROFILE)
    before = model.rates(Tier.SSD)
    model.observe(Tier.SSD, {SWA: 10**9}, seconds)
    assert model.rates(Tier.SSD) is before


def test_tiers_are_learned_separately() -> None:
    model = LoadModel([KV])
    before = model.rates(Tier.DRAM)
    model.observe(Tier.SSD, {KV: 10**8}, 5.0)
    assert model.rates(Tier.DRAM) is before
    assert model.predict(Tier.SSD, {KV: 10**8}) == pytest.approx(5.0, rel=0.1)


def test_rates_are_one_object_until_the_next_load() -> None:
    model = LoadModel([KV])
    before = model.rates(Tier.SSD)
    assert model.rates(Tier.SSD) is before
    old = before.seconds({KV: 10**8}, 0)
    model.observe(Tier.SSD, {KV: 10**8}, 5.0)
    assert model.rates(Tier.SSD) is not before
    assert before.seconds({KV: 10**8}, 0) == old


def test_of_declined_loads_one_is_due_every_ten_minutes_however_many_there_are() -> None:
    model = LoadModel([KV])
    for tenth in range(6_000):
        model.on_declined(Tier.SSD, 10**8, 0.1 * tenth)
    assert not model.has_due
    model.on_declined(Tier.SSD, 10**8, 600.0)
    assert model.has_due
    assert not model.due({Tier.PEER: 10**8, Tier.DRAM: 10**8})
    assert model.due({Tier.SSD: 10**8}).keys() == {Tier.SSD}
    model.on_tried(Tier.SSD, 10**8)
    assert not model.has_due
    model.on_declined(Tier.SSD, 10**8, 601.0)
    model.on_declined(Tier.SSD, 10**8, 1_200.0)
    assert not model.has_due
    model.on_declined(Tier.SSD, 10**8, 1_201.0)
    assert model.has_due


def test_what_is_declined_now_and_then_and_loaded_otherwise_is_not_due() -> None:
    """A queue before the disk is a reason to compute, and no reason to try the disk."""
    model = LoadModel([KV])
    for minute in range(60):
        model.on_declined(Tier.SSD, 10**8, 60.0 * minute)
        model.observe(Tier.SSD, {KV: 10**8}, 0.5)
    assert not model.has_due
    for now_s in (3_600.0, 4_200.0):
        model.on_declined(Tier.SSD, 10**8, now_s)
    assert model.has_due
    model.observe(Tier.SSD, {KV: 10**8}, 0.5)
    assert not model.has_due


def test_small_loads_that_are_declined_take_no_turn_of_large_ones() -> None:
    model = LoadModel([KV])
    for now_s in (0.0, 600.0):
        model.on_declined(Tier.SSD, 10**5, now_s)
        model.on_declined(Tier.SSD, 10**8, now_s)
    model.on_tried(Tier.SSD, 10**5)
    assert not model.due({Tier.SSD: 10**5})
    assert model.due({Tier.SSD: 10**8})


def test_what_is_tried_is_priced_as_before_the_first_load() -> None:
    model = LoadModel([KV], {Tier.SSD: TierRates(0.5, {KV: 1e-6}, 1e-6)})
    for _ in range(50):
        model.observe(Tier.SSD, {KV: 10**8}, 5.0)
    for now_s in (0.0, 600.0):
        model.on_declined(Tier.SSD, 10**8, now_s)
    tried = model.due({Tier.SSD: 10**8})[Tier.SSD].seconds({KV: 10**8}, 10**7)
    assert tried == pytest.approx(LoadModel([KV]).predict(Tier.SSD, {KV: 10**8}, 10**7))


@pytest.mark.parametrize("taught", [0, 200], ids=["a profile", "a profile and loads"])
def test_an_hour_of_small_loads_that_are_declined_takes_nothing_from_what_is_known(
    taught: int,
) -> None:
    """Many a second; then one large load is an outlier."""
    model = LoadModel([KV], {Tier.SSD: TierRates(1e-3, {KV: 5e-9}, 5e-9)})
    for _ in range(taught):
        model.observe(Tier.SSD, {KV: 10**8}, 0.5)
    known = model.rates(Tier.SSD)
    for tenth in range(36_000):
        model.on_declined(Tier.SSD, 10**5, 0.1 * tenth)
        if model.has_due:
            model.on_tried(Tier.SSD, 10**5)
    assert model.rates(Tier.SSD) is known
    model.observe(Tier.SSD, {KV: 10**8}, 50.0)
    assert model.predict(Tier.SSD, {KV: 10**8}) == pytest.approx(0.5, rel=0.1)


def test_another_load_is_due_at_once_if_the_one_that_was_tried_took_half_as_long() -> None:
    model, size = LoadModel([KV]), {KV: 10**8}
    for _ in range(50):
        model.observe(Tier.SSD, size, 5.0)
    model.observe(Tier.SSD, size, 0.1)
    assert not model.has_due, "none was declined"
    for seconds, is_due in ((4.0, False), (0.1, True)):
        for now_s in (0.0, 600.0):
            model.on_declined(Tier.SSD, 10**8, now_s)
        assert model.has_due
        model.on_tried(Tier.SSD, 10**8)
        model.observe(Tier.PEER, size, 0.1)  # this and the next two prove nothing about it
        model.observe(Tier.SSD, {KV: 10**5}, 1e-4)
        model.observe(Tier.SSD, {}, 1e-4)
        assert not model.has_due
        model.observe(Tier.SSD, size, seconds)
        assert model.has_due == is_due


def test_a_type_measured_as_free_is_learned_later() -> None:
    measured = LoadModel([KV, SWA])
    for n in (10**6, 10**7, 10**8) * 30:
        for swa in (0, n // 2):  # those with windows happened to be faster
            measured.observe(Tier.SSD, {KV: n, SWA: swa}, 1e-3 + n * 1e-8 - swa * 1e-9)
    rates = measured.rates(Tier.SSD)
    assert rates.seconds_per_byte[SWA] < 1e-20
    model = LoadModel([KV, SWA], {Tier.SSD: rates})
    assert model.predict(Tier.SSD, {SWA: 10**7}) == pytest.approx(rates.latency_s)
    for n in (10**6, 10**7, 10**8) * 30:
        model.observe(Tier.SSD, {SWA: n}, 1e-3 + n * 5e-9)
    assert model.predict(Tier.SSD, {SWA: 10**8}) == pytest.approx(0.5, rel=0.1)


def test_a_coefficient_missing_in_a_profile_is_learned_like_a_default() -> None:
    profile = {Tier.SSD: TierRates(0.01, {KV: 1e-9}, 1e-9)}
    model = LoadModel([KV, SWA], profile)
    model.observe(Tier.SSD, {SWA: 10**8}, 1.0)
    assert model.rates(Tier.SSD).seconds_per_byte[SWA] == pytest.approx(1e-8, rel=0.2)


def test_a_load_without_bytes_teaches_nothing() -> None:
    model = LoadModel([KV])
    model.observe(Tier.SSD, {KV: 0}, 1.0, in_flight_bytes=100)
    model.observe(Tier.SSD, {KV: 100}, 0.0)
    assert model.errors(Tier.SSD).count == 0
    with pytest.raises(KeyError):
        model.observe(Tier.SSD, {SWA: 100}, 1.0)


def test_the_cost_of_loads_while_computing_is_separated() -> None:
    """By turns while it computes and while it does not, of three sizes."""
    model = LoadModel([KV])
    for turn in range(60):
        computing, size = turn % 2 == 1, (1 << 20) << (turn % 3)
        model.observe(
            Tier.SSD, {KV: size}, 2e-3 + 3e-3 * computing + 1e-8 * size, while_computing=computing
        )
    rates = model.rates(Tier.SSD)
    assert rates.latency_s == pytest.approx(2e-3, rel=0.1)
    assert rates.while_computing_s == pytest.approx(3e-3, rel=0.1)
    alone_s, while_computing_s = (
        model.predict(Tier.SSD, {KV: 1 << 20}, while_computing=b) for b in (False, True)
    )
    assert while_computing_s - alone_s == pytest.approx(3e-3, rel=0.1)


def test_few_loads_while_computing_suffice_after_eighty_idle_loads() -> None:
    model, size = LoadModel([KV]), 1 << 19
    for _ in range(80):
        model.observe(Tier.SSD, {KV: size}, 5e-3)
    for _ in range(6):
        model.observe(Tier.SSD, {KV: size}, 8.5e-3, while_computing=True)
    assert model.predict(Tier.SSD, {KV: size}, while_computing=True) == pytest.approx(
        8.5e-3, rel=0.1
    )
    assert model.predict(Tier.SSD, {KV: size}) == pytest.approx(5e-3, rel=0.05)
