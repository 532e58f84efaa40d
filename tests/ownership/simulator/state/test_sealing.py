from __future__ import annotations

from hetero_connector.planner.checkpoints import (
    Adaptive,
    CheckpointRates,
    CheckpointSizes,
    Full,
    Periodic,
    Reuse,
    Zero,
)
from ownership.simulator.state.sealing import Sealer
from ownership.simulator.traces.block_runs import BlockRuns

CHAIN = BlockRuns(((100, 8), (7, 3)))
SIZES = CheckpointSizes(256, 1_000, 10)


def asked(sealer: Sealer, prompt_tokens: int, stored: int, resumed: int) -> tuple[list[int], Reuse]:
    return sealer.prompt(CHAIN, prompt_tokens, 256, stored=stored, local=0, resumed=resumed)


def kept(sealer: Sealer, prompt_tokens: int, stored: int = 0, resumed: int = 0) -> list[int]:
    return asked(sealer, prompt_tokens, stored, resumed)[0]


def test_a_prompts_end_is_kept_under_every_policy() -> None:
    assert kept(Sealer(Zero()), 8 * 256 + 9) == [8]
    # Sent again, a prompt that ends on a boundary resumes one boundary earlier.
    assert kept(Sealer(Zero()), 8 * 256) == [7, 8]
    assert kept(Sealer(Zero()), 200) == []


def test_what_was_computed_is_asked_for_boundary_by_boundary() -> None:
    assert kept(Sealer(Full()), 11 * 256 + 1, stored=6, resumed=6) == [7, 8, 9, 10, 11]
    assert kept(Sealer(Periodic(4)), 11 * 256 + 1, resumed=2) == [4, 8, 11]


def test_where_a_checkpoint_was_missed_one_is_kept() -> None:
    rates = CheckpointRates(write_s_per_byte=1e-9, load_s_per_byte=0.0, recompute_s_per_token=1e-4)

    def sealer() -> Sealer:
        return Sealer(Adaptive(SIZES, rates=lambda: rates, prior_requests=0))

    assert kept(sealer(), 9 * 256 + 1, stored=6, resumed=2) == [6, 9]
    assert kept(sealer(), 9 * 256 + 1, stored=0, resumed=2) == [9]


def test_where_a_peer_sent_a_checkpoint_none_was_missed() -> None:
    for fetched, kept_chunks in ((0, 0), (6, 6), (5, 0)):
        _, reuse = Sealer(Zero()).prompt(
            CHAIN, 9 * 256 + 1, 256, stored=6, local=0, resumed=6, fetched=fetched
        )
        assert (reuse.matched, reuse.kept) == (6, kept_chunks)


def test_the_policy_hears_of_reuse() -> None:
    policy = Adaptive(SIZES)
    sealer, before = Sealer(policy), policy.costs_s()
    _, reuse = asked(sealer, 9 * 256 + 1, 6, 6)
    assert policy.costs_s() == before
    sealer.ended(CHAIN, 9, 11, reuse)
    assert policy.costs_s() != before


def test_the_end_of_an_answer_is_kept_and_on_the_way_to_it_what_the_policy_keeps() -> None:
    reuse = Reuse(6)
    assert Sealer(Zero()).ended(CHAIN, 8, 11, reuse) == [11]
    assert Sealer(Full()).ended(CHAIN, 8, 11, reuse) == [9, 10, 11]
    assert Sealer(Full()).ended(CHAIN, 11, 11, reuse) == [11]
    assert Sealer(Full()).ended(None, 8, 11, reuse) == []
