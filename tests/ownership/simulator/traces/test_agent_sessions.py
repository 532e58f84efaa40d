from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetero_connector.errors import TraceError
from ownership.simulator.traces import agent_sessions
from ownership.simulator.traces.session import Session, Trigger
from tests.ownership.simulator.traces.trace_files import agent_session, call, write_lines


def sessions(path: Path) -> list[Session]:
    return list(agent_sessions.read(path))


TWO_TURNS = agent_session(
    "s1",
    [
        # Keys that nobody reads, such as `model`, are skipped.
        call(0.0, 200, [[1, 3]], api_time=2.5, think_time=0.0, input_types=["text"], model="m"),
        call(10.0, 330, [[1, 2], [9, 3]], think_time=7.0, input_types=["tool_result"]),
    ],
    tool_tokens=70,
    system_tokens=30,
)


@pytest.mark.parametrize("zipped", [False, True])
def test_two_turns(tmp_path: Path, zipped: bool) -> None:
    path = write_lines(tmp_path / "trace", [TWO_TURNS, TWO_TURNS | {"id": "s2"}], zipped=zipped)
    trace = agent_sessions.read(path)
    assert (trace.block_tokens, trace.source) == (64, str(path))
    first, second = list(trace)
    assert (first.id, first.start_s, first.preamble_tokens) == ("s1", None, 100)
    opening, answer = first.requests
    assert opening.parent is None
    assert (opening.input_tokens, opening.output_tokens) == (200, 10)
    assert opening.trigger is Trigger.USER
    assert (answer.parent, answer.think_s, answer.trigger) == (0, 7.0, Trigger.TOOL_RESULT)
    assert opening.blocks.shared_with(answer.blocks) == 2
    assert not {*first.requests[1].blocks.ids()} & {*second.requests[1].blocks.ids()}
    assert list(trace) == [first, second], "a second reading yields the same"


def test_an_unrecorded_think_time_is_the_gap_minus_the_answer(tmp_path: Path) -> None:
    requests = [call(0.0, 64, [[1, 1]], api_time=2.5), call(10.0, 64, [[1, 1]])]
    (session,) = sessions(write_lines(tmp_path / "t", [agent_session("s", requests)]))
    assert session.requests[1].think_s == 7.5


def test_a_subagent_forks_from_the_request_before_it(
    tmp_path: Path,
) -> None:
    inner = [call(0.0, 64, [[50, 1]]), call(20.0, 128, [[50, 2]], think_time=15.0)]
    requests = [
        call(0.0, 64, [[1, 1]], api_time=4.0),
        {"t": 5.0, "type": "subagent", "requests": inner},
        call(12.0, 128, [[1, 2]], think_time=8.0),
    ]
    (session,) = sessions(write_lines(tmp_path / "t", [agent_session("s", requests)]))
    assert [r.offset_s for r in session.requests] == [0.0, 5.0, 12.0, 25.0]
    assert [r.parent for r in session.requests] == [None, 0, 0, 1]
    assert [r.think_s for r in session.requests[1:]] == [1.0, 8.0, 15.0]


def test_ids_may_be_listed_one_by_one(tmp_path: Path) -> None:
    request = {"t": 0, "type": "s", "in": 250, "out": 1, "hash_ids": [4, 5, 9]}
    (session,) = sessions(write_lines(tmp_path / "t", [agent_session("s", [request])]))
    assert session.requests[0].blocks.num_blocks == 3


@pytest.mark.parametrize(("scope", "shared"), [("local", 0), ("global", 2)])
def test_sessions_share_what_the_scope_of_their_ids_says(
    tmp_path: Path, scope: str, shared: int
) -> None:
    rows = [agent_session(n, [call(0, 128, [[3, 2]])], hash_id_scope=scope) for n in "ab"]
    trace = agent_sessions.read(write_lines(tmp_path / "t", rows))
    first, second = (s.requests[0].blocks for s in trace)
    assert first.shared_with(second) == shared
    assert any("local" in caveat for caveat in trace.caveats) is (shared == 0)


prompts = st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=6)


@given(prompts)
def test_ids_name_prefixes_whatever_the_file_names(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    rows = [
        {"t": float(i), "type": "n", "in": 64 * len(ids) + 5, "out": 1, "hash_ids": ids}
        for i, ids in enumerate(prompts)
    ]
    path = tmp_path_factory.mktemp("t") / "t"
    (session,) = sessions(write_lines(path, [agent_session("s", rows)]))
    read = [request.blocks.ids().tolist() for request in session.requests]
    assert [len(ids) for ids in read] == [len(ids) for ids in prompts]
    by_prefix = {
        tuple(ids[:depth]): name
        for ids, names in zip(prompts, read, strict=True)
        for depth, name in enumerate(names, 1)
    }
    for ids, names in zip(prompts, read, strict=True):
        assert names == [by_prefix[tuple(ids[:depth])] for depth in range(1, len(ids) + 1)]
    assert len(set(by_prefix.values())) == len(by_prefix), "other prefixes have other names"


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != key}


GOOD = call(0.0, 64, [[1, 1]])


def with_field(name: str, value: Any) -> dict[str, Any]:
    return agent_session("s", [GOOD | {name: value}])


BAD_LINES = {
    "not json": ('{"id": "s"', None, "not JSON"),
    "another format": ({"timestamp": 1, "hash_ids": []}, "id", "missing required field `id`"),
    "a list": ([1], None, "Expected `object`"),
    "no requests": (agent_session("s", []), "requests", "length >= 1"),
    "no block size": (without(agent_session("s", [GOOD]), "block_size"), "block_size", "missing"),
    "block size 0": (agent_session("s", [GOOD], block_size=0), "block_size", ">= 1"),
    "other block size": (agent_session("s", [GOOD], block_size=16), "block_size", "but 64 before"),
    "other scope": (
        agent_session("s", [GOOD], hash_id_scope="global"),
        "hash_id_scope",
        "but local before",
    ),
    "no tokens": (agent_session("s", [without(GOOD, "in")]), "requests[0].in", "missing"),
    "text for a number": (with_field("in", "9"), "requests[0].in", "got `str`"),
    "negative tokens": (with_field("out", -1), "requests[0].out", ">= 0"),
    "negative time": (with_field("t", -0.5), "requests[0].t", ">= 0"),
    "unknown type": (with_field("type", "x"), "requests[0].type", "'x'"),
    "a run of none": (
        with_field("runs", [[1, 0]]),
        "requests[0].runs[0][1]",
        "1",
    ),
    "a run of three": (
        with_field("runs", [[1, 1, 1]]),
        "requests[0].runs[0]",
        "",
    ),
    "no ids": (agent_session("s", [without(GOOD, "runs")]), "requests[0].runs", "missing"),
    "no request": (
        agent_session("s", [{"type": "subagent", "t": 0, "requests": []}]),
        "requests",
        "no request is in it",
    ),
    "too many ids": (agent_session("s", [call(0, 63, [[1, 2]])]), "requests[0].runs", "of 63"),
    "too few ids": (agent_session("s", [call(0, 192, [[1, 2]])]), "requests[0].runs", "of 192"),
    "back in time": (
        agent_session("s", [call(5.0, 64, [[1, 1]]), call(4.0, 64, [[1, 1]])]),
        "requests[1].t",
        "before",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, case: str) -> None:
    row, field, problem = BAD_LINES[case]
    path = write_lines(tmp_path / "t", [TWO_TURNS, row])
    with pytest.raises(TraceError) as caught:
        sessions(path)
    error = caught.value
    assert (error.source, error.line, error.field) == (str(path), 2, field)
    assert problem in error.problem
    assert str(error).startswith(f"{path}:2: " + (f"{field}: " if field else ""))


def test_an_interrupted_download_is_an_error(tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole", [TWO_TURNS] * 400, zipped=True).read_bytes()
    (broken := tmp_path / "broken").write_bytes(whole[: len(whole) - 20])
    with pytest.raises(TraceError, match=rf"{broken}:\d+: damaged gzip data .*fetch"):
        sessions(broken)


def test_a_file_that_ends_within_a_line_is_an_error(tmp_path: Path) -> None:
    text = json.dumps(TWO_TURNS)
    (path := tmp_path / "t").write_text(f"{text}\n{text[:-9]}")
    with pytest.raises(TraceError, match=f"{path}:2: not JSON"):
        sessions(path)


def test_no_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="missing: No such file"):
        sessions(tmp_path / "missing")
    (empty := tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TraceError, match="empty: no session in it"):
        sessions(empty)
