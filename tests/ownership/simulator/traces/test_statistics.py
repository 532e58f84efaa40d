"""Figures of small traces, worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import Line, PromptReader
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Request, Session, Trace, Trigger
from ownership.simulator.traces.statistics import (
    Collector,
    Recency,
    TraceStatistics,
    arrivals,
    measure,
)
from tests.ownership.simulator.traces.trace_files import agent_session, call, write_lines


def spread(found: TraceStatistics, name: str) -> list[tuple[float, float]]:
    samples = getattr(found, name)
    return list(zip(samples.values.tolist(), samples.weights.tolist(), strict=True))


def mooncake_row(timestamp_ms: int, tokens: int, ids: list[int]) -> dict[str, Any]:
    lengths = {"input_length": tokens, "output_length": 1}
    return {"timestamp": timestamp_ms, **lengths, "hash_ids": ids}


def test_four_requests_that_share_prefixes(tmp_path: Path) -> None:
    rows = [
        mooncake_row(0, 1400, [1, 2, 3]),  # nothing is there yet
        mooncake_row(10_000, 1536, [1, 2, 4]),  # 1, 2: 1,024 tokens, 10 s, 1 block since (3)
        mooncake_row(30_000, 100, [9]),  # nothing
        mooncake_row(40_000, 1400, [1, 2, 3]),  # 1, 2: 30 s ago; 3, whose 376 tokens: 40 s ago
    ]
    found = measure(open_trace(write_lines(tmp_path / "t", rows)))
    assert (found.num_sessions, found.num_requests, found.span_s) == (4, 4, 40.0)
    assert found.num_prompt_tokens == 4436
    assert found.hit_tokens == 1024 + 1400
    assert found.hit_rate == pytest.approx(0.54644, abs=1e-5)
    assert spread(found, "reuse_s") == [(10.0, 1024), (30.0, 1024), (40.0, 376)]
    # Since 1 and 2 were last used the third prompt came; since 3 was, 1, 2, 4 and 9.
    assert spread(found, "reuse_distance_tokens") == [(0, 1024), (512, 1024), (2048, 376)]
    assert found.prefixes.longest == {0.01: 1536, 0.1: 1536, 0.5: 1536}
    distinct = found.prefixes.distinct
    assert [distinct.share_up_to(n) * distinct.total / 512 for n in (1, 2, 3)] == [2, 3, 5]
    assert found.prefixes.prompt.total == 10 * 512


def test_a_session_with_a_tool_a_person_and_a_fork(tmp_path: Path) -> None:
    fork = {"t": 6.0, "type": "subagent", "requests": [call(0.0, 64, [[70, 1]])]}
    requests = [
        call(0.0, 200, [[1, 3]], api_time=2.0, input_types=["text"]),
        call(5.0, 330, [[1, 3], [9, 2]], think_time=3.0, input_types=["tool_result"]),
        fork,
        call(90.0, 150, [[1, 2]], think_time=80.0, input_types=["text", "tool_result"]),
    ]
    path = write_lines(tmp_path / "t", [agent_session(n, requests) for n in "ab"])
    found = measure(open_trace(path))
    assert (found.num_sessions, found.num_requests, found.span_s) == (2, 8, None)
    assert found.hit_tokens == 2 * (3 * 64 + 2 * 64)
    assert spread(found, "turns") == [(4, 1), (4, 1)]
    assert spread(found, "first_input_tokens") == [(200, 1), (200, 1)]
    assert [v for v, _ in spread(found, "growth_tokens")] == [-266, -266, -180, -180, 130, 130]
    assert [v for v, _ in spread(found, "new_tokens")] == [22, 22, 64, 64, 138, 138]
    assert found.think_s[Trigger.TOOL_RESULT].values.tolist() == [3.0, 3.0]
    assert found.think_s[Trigger.USER].values.tolist() == [80.0, 80.0]
    assert found.think_s[Trigger.UNKNOWN].values.tolist() == [1.0, 1.0]
    assert spread(found, "reuse_s") == [(5.0, 192), (5.0, 192), (85.0, 128), (85.0, 128)]
    assert [v for v, _ in spread(found, "reuse_distance_tokens")] == [0, 0, 64, 64]


def test_reuse_between_sessions_without_starts_has_no_time(tmp_path: Path) -> None:
    rows = [agent_session(n, [call(9.0, 64, [[1, 1]])], hash_id_scope="global") for n in "ab"]
    found = measure(open_trace(write_lines(tmp_path / "t", rows)))
    assert (found.hit_tokens, found.reuse_s.total, found.reuse_distance_tokens.total) == (64, 0, 0)


def test_an_empty_trace() -> None:
    found = measure(Trace("nothing", "none", 16, lambda: iter(())))
    assert (found.num_requests, found.hit_rate, found.span_s) == (0, 0.0, None)
    assert math.isnan(found.input_tokens.percentile(50))


@st.composite
def timed_traces(draw: st.DrawFn) -> Trace:
    """Sessions whose requests interleave, of blocks of one token."""
    prompts = PromptReader(1)
    sessions = []
    for start in sorted(draw(st.lists(st.integers(0, 20), max_size=5))):
        offsets = [0, *sorted(draw(st.lists(st.integers(0, 15), max_size=5)))]
        requests = []
        for offset in offsets:
            ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
            blocks = prompts.blocks(BlockRuns.of_ids(ids), len(ids), Line("drawn", 1, b""), "ids")
            requests.append(Request(float(offset), len(ids), 1, blocks))
        sessions.append(Session(str(len(sessions)), tuple(requests), float(start)))
    return Trace("drawn", "none", 1, lambda: iter(sessions))


@given(timed_traces())
def test_arrivals_are_all_requests_in_order(trace: Trace) -> None:
    found = list(arrivals(trace))
    sessions = list(trace)
    for ordinal, session in enumerate(sessions):
        arrived = [a.request for a in found if a.session == ordinal]
        assert list(map(id, arrived)) == list(map(id, session.requests))
    assert [a.time_s for a in found] == sorted(a.time_s for a in found)
    for a in found:
        session = sessions[a.session]
        assert session.start_s is not None
        assert a.time_s == session.start_s + a.request.offset_s


@given(timed_traces())
def test_the_figures_are_those_of_a_count_block_by_block(trace: Trace) -> None:
    last_use: dict[int, int] = {}
    hits, reuse, distances = 0, [], []
    order = list(arrivals(trace))
    for use, arrival in enumerate(order):
        ids = arrival.request.blocks.ids().tolist()
        for id_ in ids:
            if id_ in last_use:
                hits += 1
                reuse.append(arrival.time_s - order[last_use[id_]].time_s)
                distances.append(sum(last > last_use[id_] for last in last_use.values()))
        last_use |= dict.fromkeys(ids, use)
    found = measure(trace)
    assert found.hit_tokens == hits
    for samples, expected in ((found.reuse_s, reuse), (found.reuse_distance_tokens, distances)):
        counted = np.repeat(samples.values, samples.weights.astype(int))
        assert counted.tolist() == sorted(expected)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 9))))
def test_recency_agrees_with_a_list_of_counts(steps: list[tuple[int, int, int]]) -> None:
    recency, counts = Recency(), []
    for blocks, which, forgotten in steps:
        assert recency.use(blocks) == len(counts)
        counts.append(blocks)
        use = which % len(counts)
        recency.forget(use, taken := min(forgotten, counts[use]))
        counts[use] -= taken
        for i in range(len(counts)):
            assert recency.used_after(i) == sum(counts[i + 1 :])


def test_weighted_samples() -> None:
    collector = Collector()
    for value, weight in ((5.0, 1), (1.0, 2), (3.0, 1)):
        collector.add(value, weight)
    samples = collector.samples()
    assert (samples.total, samples.mean) == (4, 2.5)
    assert [samples.percentile(q) for q in (0, 50, 51, 75, 76, 100)] == [1, 1, 3, 3, 5, 5]
    assert [samples.share_up_to(x) for x in (0.9, 1, 4, 5)] == [0, 0.5, 0.75, 1]
