from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hetero_connector.errors import TraceError
from ownership.simulator.traces.agent_sessions import read
from ownership.simulator.traces.prefix_tree import PrefixTree
from ownership.simulator.traces.session import Trace
from ownership.simulator.traces.statistics import measure
from ownership.simulator.workload import PoissonStarts, draw_sessions
from tests.ownership.simulator.traces.trace_files import agent_session, call, write_lines


@pytest.fixture
def recorded(tmp_path: Path) -> Trace:
    """Two sessions with preambles of 5 and of 2 blocks; each has a turn and a subagent."""
    rows = [
        agent_session(
            name,
            [
                call(0.0, 640, [[1, 10]]),
                {"t": 1.0, "type": "subagent", "requests": [call(0.0, 64, [[90, 1]])]},
                call(5.0, 768, [[1, 4], [30, 8]]),
            ],
            tool_tokens=tokens - 40,
            system_tokens=40,
        )
        for name, tokens in (("long", 5 * 64), ("short", 2 * 64 + 63))
    ]
    return read(write_lines(tmp_path / "recorded", rows))


def drawn(recorded: Trace, fraction: float, seed: int = 0, sessions: int = 12) -> Trace:
    return draw_sessions(recorded, sessions, PoissonStarts(0.1), fraction, seed)


def test_sessions_are_as_recorded_but_for_start_and_ids(recorded: Trace) -> None:
    by_id = {session.id: session for session in recorded}
    trace = drawn(recorded, 0.5)
    sessions = list(trace)
    assert sessions == list(trace)
    starts_s = [s.start_s or 0.0 for s in sessions]
    assert starts_s == sorted(starts_s)
    assert len({s.id for s in sessions}) == 12
    for session in sessions:
        original = by_id[session.id.split("#")[0]]
        assert session.preamble_tokens == original.preamble_tokens
        for request, source in zip(session.requests, original.requests, strict=True):
            assert replace(request, blocks=source.blocks) == source
            assert request.blocks.num_blocks == source.blocks.num_blocks
    assert {s.id.split("#")[0] for s in sessions} == {"long", "short"}
    assert list(drawn(recorded, 0.5, seed=1)) != sessions


@pytest.mark.parametrize(
    ("fraction", "long_long", "long_short"), [(0.0, 0, 0), (0.5, 2, 1), (1.0, 5, 2)]
)
def test_sessions_share_the_fraction_of_their_preambles(
    recorded: Trace, fraction: float, long_long: int, long_short: int
) -> None:
    trace = drawn(recorded, fraction)
    sessions = list(trace)
    prompts = [(s.id.split("#")[0], s.requests[0].blocks) for s in sessions]
    for number, (name, blocks) in enumerate(prompts):
        for other, others in prompts[:number]:
            expected = long_long if {name, other} == {"long"} else long_short
            assert blocks.shared_with(others) == expected
    assert f"{fraction:.0%} of each preamble is common" in trace.caveats[1]
    for session in sessions:
        opening, subagent, turn = (r.blocks for r in session.requests)
        assert opening.shared_with(turn) == 4
        assert opening.shared_with(subagent) == 0


@settings(max_examples=40)
@given(
    fraction=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
    prompts=st.lists(
        st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    preambles=st.lists(st.integers(0, 500), min_size=3, max_size=3),
)
def test_ids_still_name_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    fraction: float,
    seed: int,
    prompts: list[list[list[int]]],
    preambles: list[int],
) -> None:
    rows = [
        agent_session(
            str(number),
            [
                {"t": t, "type": "n", "in": 64 * len(ids), "out": 1, "hash_ids": ids}
                for t, ids in enumerate(session)
            ],
            tool_tokens=preambles[number],
        )
        for number, session in enumerate(prompts)
    ]
    path = write_lines(tmp_path_factory.mktemp("t") / "t", rows)
    tree, names_of = PrefixTree(), dict[int, int]()
    for session in drawn(read(path), fraction, seed, sessions=6):
        for request in session.requests:
            names = tree.add(request.blocks).names.ids().tolist()
            for id_, name in zip(request.blocks.ids().tolist(), names, strict=True):
                assert names_of.setdefault(id_, name) == name
    assert len(set(names_of.values())) == len(names_of)


def test_sharing_adds_hits_and_nothing_else_does(recorded: Trace) -> None:
    rates = [measure(drawn(recorded, f)).hit_tokens for f in (0.0, 0.5, 1.0)]
    alone = {s.id: 0 for s in recorded}
    for session in recorded:
        tree = PrefixTree()
        alone[session.id] = 64 * sum(tree.add(r.blocks).known_blocks for r in session.requests)
    ids = [s.id.split("#")[0] for s in drawn(recorded, 0.0)]
    assert rates[0] == sum(alone[name] for name in ids)
    shared = {"long": 2, "short": 1}
    assert rates[1] - rates[0] <= 64 * sum(shared[name] for name in ids)
    assert rates[0] < rates[1] < rates[2]


def test_bad_parameters_are_named(recorded: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"sharing: 1\.1 is not between 0 and 1"):
        drawn(recorded, 1.1)
    empty = Trace("empty", "none", 64, lambda: iter(()))
    with pytest.raises(TraceError, match="empty: no session to draw from"):
        drawn(empty, 0.0, sessions=1)


def test_poisson_starts_never_fall_and_come_at_the_rate() -> None:
    found = list(islice(PoissonStarts(2.0).starts_s(np.random.default_rng(0)), 4_000))
    assert found == sorted(found)
    assert len(found) / found[-1] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_a_number_greater_than_0(rate: float) -> None:
    with pytest.raises(TraceError, match=r"rate_per_s: .* is not a number greater than 0"):
        PoissonStarts(rate)
