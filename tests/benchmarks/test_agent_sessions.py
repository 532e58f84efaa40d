"""Tokens of replayed sessions: what prompts share in the trace they share as tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from benchmarks.agent_sessions import Session, Turn, synthetic, token_turns
from tests.benchmarks.scaled_agents import scaled


def turn(at_s: float, blocks: list[int], prompt_tokens: int, output_tokens: int) -> Turn:
    return Turn(at_s, np.array(blocks, np.int64), prompt_tokens, output_tokens)


GROWS = Session(
    "grows",
    (
        turn(0.0, [1, 2], 150, 20),  # 22 tokens of a third block
        turn(5.0, [1, 2, 3, 4], 256, 500),  # long enough for the answer, not for its own
        turn(9.0, [1, 7], 130, 10),
    ),
)


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def test_a_continued_prompt_is_a_prefix_of_the_next_one_and_so_is_its_answer() -> None:
    first, second, third = token_turns([GROWS])
    assert [len(t.tokens) for t in (first, second, third)] == [170, 756, 140]
    assert [t.prompt_tokens for t in (first, second, third)] == [150, 256, 130]
    assert shared(first.tokens, second.tokens) == 170
    assert shared(second.tokens, third.tokens) == 64
    assert len({second.tokens[-1], third.tokens[-1], second.tokens[255]}) == 3


def test_sessions_share_nothing_unless_their_blocks_are_the_same() -> None:
    other = Session("other", (turn(1.0, [1, 2, 9], 200, 5),))
    *_, last = token_turns([GROWS, other])
    first = next(token_turns([GROWS, other]))
    assert shared(first.tokens, last.tokens) == 128


def test_by_time_turns_of_several_sessions_interleave() -> None:
    other = Session("other", (turn(0.0, [9], 64, 5), turn(2.0, [9, 10], 128, 5)))
    times = [(t.session, t.at_s) for t in token_turns([GROWS, other], [10.0, 12.0])]
    assert times == [(0, 10.0), (1, 12.0), (1, 14.0), (0, 15.0), (0, 19.0)]


def test_a_scaled_session_keeps_what_prompts_share() -> None:
    (session,) = synthetic(1, seed=3)
    small = scaled(session, 4, 10)
    for full, cut in zip(session.turns, small.turns, strict=False):
        assert cut.prompt_tokens <= full.prompt_tokens / 2
    blocks = [set(t.blocks) for t in session.turns[:10]]
    few = [set(t.blocks) for t in small.turns]
    for i in range(9):
        assert few[i] & few[i + 1] == {b for b in blocks[i] & blocks[i + 1] if b % 4 == 0}


def test_synthetic_sessions_are_a_function_of_their_seed_and_grow() -> None:
    one, again = synthetic(4, seed=1), synthetic(4, seed=1)
    for a, b in zip(one, again, strict=True):
        assert [t.prompt_tokens for t in a.turns] == [t.prompt_tokens for t in b.turns]
    grown = [b.prompt_tokens - a.prompt_tokens for s in one for a, b in pairwise(s.turns)]
    assert 300 < np.median(grown) < 1400
    firsts = [t.tokens for t in token_turns(synthetic(12, seed=1)) if t.at_s == 0.0]
    assert max(shared(firsts[0], other) for other in firsts[1:]) > 5_000, "a common preamble"
