from __future__ import annotations

import pytest

from hetero_connector.planner.checkpoints import (
    Adaptive,
    CheckpointRates,
    CheckpointSizes,
    Full,
    Periodic,
    Reuse,
    Zero,
)
from ownership.simulator.state.checkpoints import CheckpointKeeper, Retention
from ownership.simulator.traces.block_runs import BlockRuns

CHAIN = BlockRuns(((100, 8), (7, 3)))
SIZES = CheckpointSizes(256, 1_000, 10)


def asked(
    keeper: CheckpointKeeper, prompt_tokens: int, stored: int, resumed: int
) -> tuple[list[int], Reuse]:
    return keeper.prompt(CHAIN, prompt_tokens, 256, stored=stored, local=0, resumed=resumed)


def kept(
    keeper: CheckpointKeeper, prompt_tokens: int, stored: int = 0, resumed: int = 0
) -> list[int]:
    return asked(keeper, prompt_tokens, stored, resumed)[0]


def test_a_prompts_end_is_kept_under_every_policy() -> None:
    assert kept(CheckpointKeeper(Zero()), 8 * 256 + 9) == [8]
    # Sent again, a prompt that ends on a boundary resumes one boundary earlier.
    assert kept(CheckpointKeeper(Zero()), 8 * 256) == [7, 8]
    assert kept(CheckpointKeeper(Zero()), 200) == []


def test_the_policy_is_asked_about_each_computed_boundary() -> None:
    assert kept(CheckpointKeeper(Full()), 11 * 256 + 1, stored=6, resumed=6) == [7, 8, 9, 10, 11]
    assert kept(CheckpointKeeper(Periodic(4)), 11 * 256 + 1, resumed=2) == [4, 8, 11]


def test_a_missed_boundary_gets_a_checkpoint() -> None:
    rates = CheckpointRates(write_s_per_byte=1e-9, load_s_per_byte=0.0, recompute_s_per_token=1e-4)

    def keeper() -> CheckpointKeeper:
        return CheckpointKeeper(Adaptive(SIZES, rates=lambda: rates, prior_requests=0))

    assert kept(keeper(), 9 * 256 + 1, stored=6, resumed=2) == [6, 9]
    assert kept(keeper(), 9 * 256 + 1, stored=0, resumed=2) == [9]


def test_a_checkpoint_from_a_peer_counts_as_kept() -> None:
    for fetched, kept_chunks in ((0, 0), (6, 6), (5, 0)):
        _, reuse = CheckpointKeeper(Zero()).prompt(
            CHAIN, 9 * 256 + 1, 256, stored=6, local=0, resumed=6, fetched=fetched
        )
        assert (reuse.matched, reuse.kept) == (6, kept_chunks)


def test_the_policy_learns_reuse_at_the_end_of_a_request() -> None:
    policy = Adaptive(SIZES)
    keeper, before = CheckpointKeeper(policy), policy.costs_s()
    _, reuse = asked(keeper, 9 * 256 + 1, 6, 6)
    assert policy.costs_s() == before
    keeper.answer(CHAIN, 9, 11, reuse)
    assert policy.costs_s() != before


def test_the_end_of_an_answer_is_always_kept() -> None:
    reuse = Reuse(6)
    assert CheckpointKeeper(Zero()).answer(CHAIN, 8, 11, reuse) == [11]
    assert CheckpointKeeper(Full()).answer(CHAIN, 8, 11, reuse) == [9, 10, 11]
    assert CheckpointKeeper(Full()).answer(CHAIN, 11, 11, reuse) == [11]
    assert CheckpointKeeper(Full()).answer(None, 8, 11, reuse) == []


@pytest.mark.parametrize(
    ("interval", "prompt_tokens", "junction", "first", "last", "kept"),
    [
        (0, 1000, 0, 1, 31, [31]),
        (0, 1024, 0, 1, 32, [31]),  # sent again it is computed from before its last token
        (0, 1000, 9, 1, 31, [9, 31]),
        (0, 1000, 9, 10, 31, [31]),  # what lies before was not computed
        (0, 1000, 0, 32, 40, []),  # an answer's end
        (256, 1000, 0, 1, 40, [8, 16, 24, 31, 32, 40]),
        (256, 1000, 0, 9, 23, [16]),
        (None, 100, 0, 1, 4, [1, 2, 3, 4]),
        (0, 20, 0, 1, 0, []),
    ],
)
def test_boundaries_of_32_tokens(
    interval: int | None,
    prompt_tokens: int,
    junction: int,
    first: int,
    last: int,
    kept: list[int],
) -> None:
    assert Retention(32, interval).boundaries(prompt_tokens, junction, 0, first, last) == kept


def test_boundaries_between_two_windows_that_touch_are_kept() -> None:
    assert Retention(32, 256, 2).boundaries(1_056, 0, 30, 1, 33) == [8, 16, 24, 30, 31, 32]
    assert Retention(32, 256, 2).boundaries(1_056, 0, 29, 29, 33) == [29, 32]


def test_part_of_a_window_is_kept_before_its_boundary_is_reached() -> None:
    assert Retention(32, 256, 2).boundaries(963, 0, 0, 25, 31) == [30, 31]
    assert Retention(32, 256, 2).boundaries(930, 0, 0, 25, 30) == [29]


def test_an_interval_shorter_than_a_chunk_keeps_what_falls_on_chunks() -> None:
    assert Retention(512, 768).boundaries(5_000, 0, 0, 1, 9) == [3, 6, 9]
    assert Retention(512, 256).boundaries(2_000, 0, 0, 1, 3) == [1, 2, 3]
