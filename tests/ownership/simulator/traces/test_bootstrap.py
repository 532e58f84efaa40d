from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hetero_connector.errors import TraceError
from ownership.simulator.traces.agent_sessions import read
from ownership.simulator.traces.bootstrap import bootstrap
from ownership.simulator.traces.distributions import Constant
from ownership.simulator.traces.prefix_tree import PrefixTree
from ownership.simulator.traces.session import Trace
from ownership.simulator.traces.starts import PoissonStarts, RenewalStarts
from ownership.simulator.traces.statistics import measure

from .trace_files import agent_session, call, write_lines

EVERY_TEN_S = RenewalStarts(Constant(10))


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
    return bootstrap(
        recorded,
        num_sessions=sessions,
        starts=EVERY_TEN_S,
        shared_fraction=fraction,
        seed=seed,
    )


def test_sessions_are_as_recorded_but_for_start_and_ids(recorded: Trace) -> None:
    by_id = {session.id: session for session in recorded}
    trace = drawn(recorded, 0.5)
    sessions = list(trace)
    assert sessions == list(trace)
    assert [s.start_s for s in sessions] == [10.0 * n for n in range(1, 13)]
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
    with pytest.raises(TraceError, match=r"shared_fraction: 1\.1 is not between 0 and 1"):
        drawn(recorded, 1.1)
    with pytest.raises(TraceError, match="num_sessions: 0 is not greater than 0"):
        drawn(recorded, 0.5, sessions=0)
    empty = Trace("empty", "none", 64, lambda: iter(()))
    with pytest.raises(TraceError, match="empty: no session to draw from"):
        bootstrap(empty, num_sessions=1, starts=PoissonStarts(1), shared_fraction=0, seed=0)
