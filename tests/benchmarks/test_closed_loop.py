"""The stand-in for people and tools sends prompts that share what the trace says."""

from __future__ import annotations

from itertools import combinations, takewhile

from benchmarks.closed_loop import SessionText, StepClock
from benchmarks.faithful import trace_of
from ownership.simulator.traces.block_runs import BlockRuns

BLOCK = 32


def shared_blocks(one: list[int], other: list[int]) -> int:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return same // BLOCK


def test_prompts_share_what_the_trace_says() -> None:
    made: list[tuple[list[int], BlockRuns]] = []
    for number, session in enumerate(trace_of(BLOCK, 6)):
        text = SessionText(session, number, seed=0)
        for index, request in enumerate(session.requests):
            prompt = text.prompt(index)
            assert len(prompt) == request.input_tokens
            made.append((prompt, request.blocks))
            answer = [300 + number * 10 + index % 10] * request.output_tokens
            text.answered(index, prompt, answer)
            assert request.answered is not None
            made.append((prompt + answer, request.answered))
    shared = [
        (shared_blocks(one, other), blocks.shared_with(others))
        for (one, blocks), (other, others) in combinations(made, 2)
    ]
    assert [told for _, told in shared] == [found for found, _ in shared]
    assert any(told for _, told in shared)


def test_a_step_clock_advances_with_steps_and_waiting_only() -> None:
    clock = StepClock(0.5)
    clock.computed()
    clock.idle(0.2)
    assert clock.now_s() == 0.5
    clock.idle(3.0)
    clock.computed()
    assert clock.now_s() == 3.5
