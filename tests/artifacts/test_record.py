"""Chunks that hold the same share one mapping, told apart by its number."""

from itertools import product

from hetero_connector.artifacts.record import UNNUMBERED, SharedTiers, Tier
from hetero_connector.spec.state_types import StateType

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA


def test_equal_mappings_are_one_object_of_one_number() -> None:
    shared = SharedTiers()
    first, number = shared.share({KV: Tier.DRAM, SWA: Tier.SSD})
    again, same = shared.share({SWA: Tier.SSD, KV: Tier.DRAM})
    assert again is first
    assert same == number


def test_other_mappings_have_other_numbers() -> None:
    shared = SharedTiers()
    numbers = [shared.share({KV: tier})[1] for tier in Tier] + [shared.share({SWA: Tier.SSD})[1]]
    assert sorted(numbers) == [0, 1, 2, 3]


def test_beyond_a_byte_mappings_are_shared_without_a_number() -> None:
    shared = SharedTiers()
    kinds, places = list(StateType)[:6], [*Tier, None]
    mixtures = [
        {kind: tier for kind, tier in zip(kinds, mixture, strict=True) if tier}
        for mixture in product(places, repeat=len(kinds))
    ][:300]
    numbers = [shared.share(tiers)[1] for tiers in mixtures]
    assert numbers[:255] == list(range(255))
    assert numbers[255:] == [UNNUMBERED] * 45
    assert shared.share(dict(mixtures[-1])) == (mixtures[-1], UNNUMBERED)
    assert shared.share(dict(mixtures[-1]))[0] is mixtures[-1]
