"""A router's log as a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from ownership.scheduling import Step
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.decisions.logs import Log


@pytest.fixture
def log() -> Log:
    return Log()


def sessions_of(log: Log, folder: Path) -> dict[str, Session]:
    trace = open_trace(log.write(folder / "log"))
    assert trace.format == "router-decisions"
    return {session.id: session for session in trace}


def test_sessions_are_put_together_and_ordered(log: Log, tmp_path: Path) -> None:
    """Lines come when requests end: the second turn's before the first one's here."""
    log.decide(Step(300, session_id="b"), 107.0, total_s=1.0)
    log.decide(Step(200, session_id="a"), 103.0, total_s=0.5, events=7)
    log.decide(Step(100, session_id="a"), 100.0, total_s=1.0)
    log.decide(Step(150, session_id="a"), 102.0, total_s=9.0, events=None)
    log.decide(Step(100, session_id="a"), 104.0, failed=True)
    log.decide(Step(90), 108.0)
    found = sessions_of(log, tmp_path)
    assert [(x.start_s, len(x.requests)) for x in found.values()] == [(0, 3), (7, 1), (8, 1)]
    assert [x.is_named for x in found.values()] == [True, True, False]
    turns = found["a"].requests
    assert [x.offset_s for x in turns] == [0.0, 2.0, 3.0]
    assert [x.input_tokens for x in turns] == [100, 150, 200]
    assert [x.output_tokens for x in turns] == [10, 1, 7]  # a stream's events, else as expected
    assert [x.parent for x in turns] == [None, 0, 0]  # the second had not ended
    assert [x.think_s for x in turns] == [None, 1.0, 2.0]


def test_prompts_share_what_the_router_saw_them_share(log: Log, tmp_path: Path) -> None:
    size = {"chunk_tokens": 256}
    log.decide(Step(1024 + 5, session_id="a"), 1.0, chunks=[[0, 4]], process="p", **size)
    log.decide(Step(1024, session_id="b"), 2.0, chunks=[[0, 3], [9, 1]], process="p", **size)
    log.decide(Step(1024, session_id="c"), 3.0, chunks=[[0, 4]], process="q", **size)
    found = sessions_of(log, tmp_path)
    a, b, c = (found[name].requests[0].blocks for name in "abc")
    assert open_trace(tmp_path / "log").block_tokens == 256
    assert a.shared_with(b) == 3
    assert a.shared_with(c) == 0, "another process counts for itself"
    assert a.num_blocks == b.num_blocks == c.num_blocks == 4


def test_prompts_of_unknown_chunks_share_what_their_session_had(log: Log, tmp_path: Path) -> None:
    log.decide(Step(100, session_id="a"), 1.0)
    log.decide(Step(180, session_id="a", boundary_tokens=110), 5.0)
    log.decide(Step(180, session_id="b"), 6.0)
    found = sessions_of(log, tmp_path)
    first, second = (x.blocks for x in found["a"].requests)
    assert first.shared_with(second) == first.num_blocks
    [alone] = found["b"].requests
    assert alone.blocks.shared_with(first) == 0
