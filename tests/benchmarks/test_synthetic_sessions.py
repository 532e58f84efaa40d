from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.synthetic_sessions import (
    CODING_AGENT,
    Constant,
    Geometric,
    LogNormal,
    SyntheticSpec,
    synthetic,
)
from ownership.simulator.traces.prefix_tree import PrefixTree
from ownership.simulator.traces.session import Session, Trace, Trigger
from ownership.simulator.traces.statistics import measure

PLAIN = SyntheticSpec(
    num_preambles=1,
    preamble_skew=0,
    preamble_tokens=Constant(100),
    first_tokens=Constant(60),
    turns=Constant(3),
    tool_fraction=1,
    tool_tokens=Constant(30),
    user_tokens=Constant(5),
    output_tokens=Constant(10),
    tool_latency_s=Constant(4),
    think_s=Constant(50),
    answer_s=Constant(2),
    fork_fraction=0,
    fork_width=Constant(2),
    fork_turns=Constant(1),
    context_tokens=10_000,
    summary_tokens=Constant(20),
)


def made(spec: SyntheticSpec, sessions: int = 2, seed: int = 0, block_tokens: int = 16) -> Trace:
    return synthetic(spec, sessions=sessions, rate=0.01, block_tokens=block_tokens, seed=seed)


def check(session: Session, block_tokens: int) -> None:
    """Check everything that a reader promises of a session."""
    for index, request in enumerate(session.requests):
        assert request.blocks.num_blocks == request.input_tokens // block_tokens
        assert request.parent is None if index == 0 else request.parent in range(index)
    for before, after in pairwise(session.requests):
        assert before.offset_s <= after.offset_s


def test_constants_worked_by_hand() -> None:
    first, second = made(PLAIN)
    assert first.preamble_tokens == 100
    assert [r.input_tokens for r in first.requests] == [160, 200, 240]
    assert [r.offset_s for r in first.requests] == [0.0, 6.0, 12.0]
    assert [r.parent for r in first.requests] == [None, 0, 1]
    assert [r.think_s for r in first.requests] == [None, 4, 4]
    assert [r.trigger for r in first.requests[1:]] == [Trigger.TOOL_RESULT] * 2
    opening, turn, _ = (r.blocks for r in first.requests)
    assert opening.shared_with(turn) == 10
    assert opening.shared_with(second.requests[0].blocks) == 6, "the preamble's full blocks"


def test_a_fork_is_requests_with_one_parent() -> None:
    (session,) = made(replace(PLAIN, fork_fraction=1, turns=Constant(2)), sessions=1)
    assert [r.parent for r in session.requests] == [None, 0, 0, 0]
    assert {r.offset_s for r in session.requests[1:]} == {6.0}
    tree = PrefixTree()
    assert [tree.add(r.blocks).known_blocks for r in session.requests] == [0, 10, 10, 10]


def test_a_prompt_beyond_the_context_is_compacted_to_its_preamble_and_a_summary() -> None:
    (session,) = made(replace(PLAIN, context_tokens=220), sessions=1)
    assert [r.input_tokens for r in session.requests] == [160, 200, 120]
    whole, _, compacted = (r.blocks for r in session.requests)
    assert whole.shared_with(compacted) == 6


def test_popular_preambles_are_drawn_more_often() -> None:
    spec = replace(PLAIN, num_preambles=4, preamble_skew=1.0, turns=Constant(1))
    heads = [s.requests[0].blocks.runs[0][0] for s in made(spec, sessions=2000)]
    counts = sorted((heads.count(head) for head in set(heads)), reverse=True)
    total = sum(1 / rank for rank in range(1, 5))
    assert counts == pytest.approx([2000 / rank / total for rank in range(1, 5)], rel=0.15)


lengths = st.integers(1, 400).map(Constant) | st.just(Geometric(90))
seconds = st.sampled_from([Constant(0), Constant(3), LogNormal(10, 60)])
specs = st.fixed_dictionaries(
    {
        "num_preambles": st.integers(1, 3),
        "preamble_tokens": lengths,
        "first_tokens": lengths,
        "turns": st.integers(1, 8).map(Constant),
        "tool_fraction": st.sampled_from([0, 0.5, 1]),
        "tool_tokens": lengths,
        "user_tokens": lengths,
        "output_tokens": lengths,
        "tool_latency_s": seconds,
        "think_s": seconds,
        "answer_s": seconds,
        "fork_fraction": st.sampled_from([0, 0.3]),
        "context_tokens": st.integers(2, 1500),
        "summary_tokens": lengths,
    }
).map(lambda changed: replace(PLAIN, **changed))


@settings(max_examples=60)
@given(specs, st.integers(0, 9), st.sampled_from([1, 16, 64]))
def test_every_trace_keeps_what_readers_promise(
    spec: SyntheticSpec, seed: int, block_tokens: int
) -> None:
    trace = made(spec, 4, seed, block_tokens)
    sessions = list(trace)
    assert sessions == list(trace)
    tree = PrefixTree()
    prefixes: dict[int, int] = {}
    for session in sessions:
        check(session, block_tokens)
        for request in session.requests:
            assert request.input_tokens <= spec.context_tokens
            names = tree.add(request.blocks).names.ids().tolist()
            for id_, name in zip(request.blocks.ids().tolist(), names, strict=True):
                assert prefixes.setdefault(id_, name) == name, "an id names one prefix"
    assert len(set(prefixes.values())) == len(prefixes), "and a prefix has one id"


def test_a_session_is_the_same_in_a_longer_trace_and_another_under_another_seed() -> None:
    few, many = list(made(CODING_AGENT, 3)), list(made(CODING_AGENT, 5))
    assert many[:3] == few
    assert list(made(CODING_AGENT, 3, seed=1)) != few


def test_the_coding_agent_is_like_the_recorded_sessions() -> None:
    trace = synthetic(CODING_AGENT, sessions=80, rate=0.05, block_tokens=64, seed=0)
    found = measure(trace)
    assert found.hit_rate == pytest.approx(0.95, abs=0.04)
    assert found.growth_tokens.percentile(50) == pytest.approx(668, rel=0.15)
    assert found.growth_tokens.percentile(90) == pytest.approx(3_900, rel=0.15)
    assert found.think_s[Trigger.TOOL_RESULT].percentile(90) == pytest.approx(68, rel=0.15)
    assert found.reuse_s.share_up_to(60) == pytest.approx(0.81, abs=0.06)
