"""Generations: who shares state after which resets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.generation import FIRST, Generation


def test_after_its_own_reset_an_engine_shares_with_no_other() -> None:
    ann, bob = FIRST.after_own_reset(), FIRST.after_own_reset()
    assert len({ann.tag, bob.tag, FIRST.tag}) == 3
    assert ann.adopted == 0


def test_after_a_reset_of_the_fleet_all_share_again() -> None:
    ann = FIRST.after_own_reset().with_fleet(5)
    assert ann.private, "the number it had when the engine parted is no reset"
    assert ann.with_fleet(5) is ann
    assert ann.with_fleet(6) == FIRST.with_fleet(6) == Generation(6)
    assert ann.with_fleet(6).adopted == 6


def test_a_smaller_number_of_the_fleet_is_ignored() -> None:
    assert Generation(7).with_fleet(3) == Generation(7)
    assert Generation(7).after_own_reset().with_fleet(3).fleet == 7


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=12))
def test_no_tag_is_used_twice(resets: list[int | None]) -> None:
    """None: the engine's own reset; a number: what it hears of the fleet's."""
    generation, seen = FIRST, [FIRST.tag]
    for fleet in resets:
        generation = generation.after_own_reset() if fleet is None else generation.with_fleet(fleet)
        if generation.tag != seen[-1]:
            seen.append(generation.tag)
    assert len(set(seen)) == len(seen)
