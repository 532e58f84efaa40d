"""The readers on the public traces, against figures known of them: `pytest --traces DIR`.

DIR holds the files of `FILES`, at any depth. The figures of Mooncake and of mini-SWE-agent are of
these very files. Those of the coding-agent sessions are of all 676 that were published, so that
what is read from a part of them is only close.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trigger
from ownership.simulator.traces.statistics import TraceStatistics, measure

FILES = {
    "mooncake": "conversation_trace.jsonl.gz",
    "block-agents": "miniswe.blocks16.jsonl.gz",
    "agent-sessions": "sessions.jsonl.gz",
    "azure": "AzureLLMInferenceTrace_code.csv.gz",
}


@cache
def statistics_of(path: Path) -> TraceStatistics:
    return measure(open_trace(path))


def found(pytestconfig: pytest.Config, format: str) -> TraceStatistics:
    directory = pytestconfig.getoption("--traces")
    assert directory is not None, "say where the traces are: pytest --traces DIR"
    paths = list(Path(directory).rglob(FILES[format]))
    assert len(paths) == 1, f"{directory} has {len(paths)} files {FILES[format]}"
    statistics = statistics_of(paths[0])
    assert statistics.format == format
    return statistics


def test_mooncake_conversations(pytestconfig: pytest.Config) -> None:
    trace = found(pytestconfig, "mooncake")
    assert trace.num_requests == 12_031
    assert f"{trace.hit_rate:.1%}" == "37.4%"
    assert trace.input_tokens.percentile(50) == pytest.approx(6_900, abs=50)
    assert trace.span_s == pytest.approx(3600, rel=0.02), "an hour"


def test_mini_swe_agent(pytestconfig: pytest.Config) -> None:
    trace = found(pytestconfig, "block-agents")
    assert (trace.num_requests, trace.num_sessions) == (402, 20)
    assert f"{trace.hit_rate:.1%}" == "93.4%"
    assert trace.input_tokens.percentile(50) == pytest.approx(3_900, abs=50)


def test_azure_code(pytestconfig: pytest.Config) -> None:
    trace = found(pytestconfig, "azure")
    assert (trace.num_requests, trace.hit_rate) == (8_819, 0)


def test_coding_agent_sessions(pytestconfig: pytest.Config) -> None:
    trace = found(pytestconfig, "agent-sessions")
    assert trace.hit_rate == pytest.approx(0.962, abs=0.002)
    assert trace.input_tokens.percentile(50) == pytest.approx(99_000, rel=0.03)
    assert trace.growth_tokens.percentile(50) == pytest.approx(668, rel=0.03)
    assert trace.growth_tokens.percentile(90) == pytest.approx(3_800, rel=0.08)
    tools = trace.think_s[Trigger.TOOL_RESULT]
    assert tools.percentile(50) == 8
    assert tools.percentile(90) == pytest.approx(69, rel=0.03)
    assert tools.percentile(99) == pytest.approx(607, rel=0.03)
    assert trace.reuse_s.share_up_to(60) == pytest.approx(0.81, abs=0.01)
    assert trace.reuse_s.share_up_to(300) == pytest.approx(0.95, abs=0.01)
    assert 1 - trace.first_input_tokens.share_up_to(40_000) == pytest.approx(0.43, abs=0.03)
