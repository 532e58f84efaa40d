"""Formats of a request a line, each by a file whose content was worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hetero_connector.errors import TraceError
from ownership.simulator.traces.readers import READERS, open_trace
from ownership.simulator.traces.session import Session, Trigger
from tests.ownership.simulator.traces.trace_files import agent_session, call, write_lines


def row(timestamp: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    lengths = {"input_length": tokens, "output_length": 7}
    return {"timestamp": timestamp, **lengths, "hash_ids": ids, **more}


def chat(chat_id: int, timestamp: float, ids: list[int], **more: Any) -> dict[str, Any]:
    named = {"chat_id": chat_id, "parent_chat_id": -1, "type": "text", "turn": 1, **more}
    return row(timestamp, 16 * len(ids), ids, **named)


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE = [row(0, 1100, [0, 1, 2]), row(3000, 1300, [0, 1, 3])]
BLOCK_AGENTS = [
    row(500.0, 33, [1, 2], session="a"),
    row(1500.0, 35, [1, 9], session="b"),
    row(2500.0, 66, [1, 2, 3, 4], session="a"),
]
BAILIAN = [
    chat(10, 1.0, [5, 6]),
    chat(11, 2.5, [5, 6, 6], parent_chat_id=10, turn=2),
    chat(12, 4.0, [7], parent_chat_id=99, turn=3),
    chat(13, 4.5, [5, 6, 8], parent_chat_id=10, turn=2),
]
AZURE = [
    AZURE_HEADER,
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:05.4799600,20,8",
]
DECISION = {
    "kind": "decision",
    "format": 2,
    "time": 1.7e9,
    "path": "chat",
    "session": "s",
    "policy": "ownerserve",
    "class": "incremental_turn",
    "prompt_tokens": 600,
    "worker": "a",
    "action": "colocated_prefill",
    "predicted": {"queue_s": 0.0},
    "predicted_ttft_s": 0.5,
    "chunks": [[0, 2]],
    "chunk_tokens": 256,
    "events": 7,
}
EXAMPLES: dict[str, list[Any]] = {
    "agent-sessions": [agent_session("s", [call(0.0, 64, [[1, 1]])])],
    "mooncake": MOONCAKE,
    "block-agents": BLOCK_AGENTS,
    "bailian": BAILIAN,
    "azure": AZURE,
    "router-decisions": [DECISION],
}


def read(tmp_path: Path, rows: list[Any], format: str | None = None) -> list[Session]:
    return list(open_trace(write_lines(tmp_path / "trace", rows), format))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("format", READERS)
def test_a_format_is_recognised_by_the_first_line(
    tmp_path: Path, format: str, zipped: bool
) -> None:
    path = write_lines(tmp_path / "t", ["", *EXAMPLES[format]], zipped=zipped)
    trace = open_trace(path)
    assert trace.format == format
    assert list(trace) == list(open_trace(path, format))


def test_mooncake(tmp_path: Path) -> None:
    first, second = read(tmp_path, MOONCAKE)
    assert (first.start_s, second.start_s) == (0.0, 3.0)
    assert not first.is_named
    (request,), (other,) = first.requests, second.requests
    assert (request.input_tokens, request.output_tokens, request.parent) == (1100, 7, None)
    assert request.blocks.shared_with(other.blocks) == 2
    assert request.covered_tokens(3, 512) == 1100, "its last block is partial"


def test_block_agents(tmp_path: Path) -> None:
    a, b = read(tmp_path, BLOCK_AGENTS)
    assert a.is_named
    assert (a.id, a.start_s, b.id, b.start_s) == ("a", 0.0, "b", 1.0)
    assert [(r.offset_s, r.parent, r.think_s) for r in a.requests] == [
        (0.0, None, None),
        (2.0, 0, None),
    ]
    assert a.requests[0].blocks.shared_with(a.requests[1].blocks) == 2
    assert a.requests[0].blocks.shared_with(b.requests[0].blocks) == 1


def test_bailian(tmp_path: Path) -> None:
    chats, cut = read(tmp_path, BAILIAN)
    assert (chats.id, chats.start_s, cut.id, cut.start_s) == ("10", 0.0, "12", 3.0)
    assert [(r.offset_s, r.parent) for r in chats.requests] == [(0.0, None), (1.5, 0), (3.5, 0)]
    assert {r.trigger for r in chats.requests} == {Trigger.USER}
    _, second, third = (r.blocks.ids().tolist() for r in chats.requests)
    assert second[:2] == third[:2]
    assert len({*second, *third}) == 4, "6 after 6 and 8 after 6 are other prefixes than 6"


def test_azure(tmp_path: Path) -> None:
    first, second = read(tmp_path, AZURE)
    assert (first.start_s, second.start_s) == (0.0, 1.5)
    assert not first.is_named
    assert (first.requests[0].input_tokens, first.requests[0].output_tokens) == (4808, 10)
    assert first.requests[0].blocks.num_blocks == 301
    assert second.requests[0].blocks.num_blocks == 2
    assert not {*first.requests[0].blocks.ids()} & {*second.requests[0].blocks.ids()}


def test_azure_times_with_a_zone(tmp_path: Path) -> None:
    rows = [AZURE_HEADER, "2024-05-10 00:00:00.5+00:00,1,1", "2024-05-10 00:00:02.75+00:00,1,1"]
    assert [s.start_s for s in read(tmp_path, rows)] == [0.0, 2.25]


@pytest.mark.parametrize("format", ["mooncake", "block-agents", "bailian"])
def test_starts_are_counted_from_the_first_request(tmp_path: Path, format: str) -> None:
    """Some recordings have times of day, in milliseconds or seconds."""
    rows = EXAMPLES[format]
    late = [x | {"timestamp": x["timestamp"] + 1_764_444_000_000} for x in rows]
    found = read(tmp_path, late, format)
    assert found == read(tmp_path, rows, format)
    assert found[0].start_s == 0.0


def test_a_directory_is_its_files_by_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.json", [agent_session("b", [call(0.0, 64, [[1, 1]])])])
    write_lines(tmp_path / "a.json.gz", EXAMPLES["agent-sessions"], zipped=True)
    (tmp_path / "LICENSE").write_text("not a trace")
    trace = open_trace(tmp_path)
    assert (trace.format, [session.id for session in trace]) == ("agent-sessions", ["s", "b"])
    write_lines(tmp_path / "c.json", MOONCAKE)
    with pytest.raises(TraceError, match=rf"{tmp_path / 'c.json'}:1: id: .*missing"):
        list(trace)


AZURE_LINE = AZURE[1]
BAD: dict[str, tuple[str, list[Any], int, str | None, str]] = {
    "mooncake: missing": ("mooncake", [*MOONCAKE, {"timestamp": 1}], 3, "input_length", "missing"),
    "mooncake: type": ("mooncake", [row(0, 1, ["x"])], 1, "hash_ids[0]", "got `str`"),
    "mooncake: negative": ("mooncake", [row(-1, 1, [1])], 1, "timestamp", ">= 0"),
    "mooncake: a fraction of a token": ("mooncake", [row(0, 1.5, [1])], 1, "input_length", "int"),
    "mooncake: id too large": ("mooncake", [row(0, 1, [1 << 70])], 1, "hash_ids[0]", ""),
    "mooncake: endless": ("mooncake", [row(0, 1 << 70, [1])], 1, "input_length", "<= "),
    "mooncake: never": ("mooncake", ['{"timestamp": 1e999}'], 1, "timestamp", "out of range"),
    "mooncake: deep": ("mooncake", ['{"x":' + "[" * 100_000], 1, None, "not JSON"),
    "mooncake: unsorted": ("mooncake", MOONCAKE[::-1], 2, "timestamp", "sort the file"),
    "mooncake: no json": ("mooncake", [*MOONCAKE, "{"], 3, None, "not JSON"),
    "mooncake: no utf-8": ("mooncake", ['{"timestamp": NaN}'], 1, None, "not JSON"),
    "16-token blocks read as mooncake": ("mooncake", BLOCK_AGENTS, 1, "hash_ids", "of 512 tokens"),
    "mooncake read as 16-token blocks": (
        "block-agents",
        [r | {"session": "s"} for r in MOONCAKE],
        1,
        "hash_ids",
        "of 16 tokens",
    ),
    "a chat among agents": ("block-agents", [*BLOCK_AGENTS, BAILIAN[0]], 4, "session", "missing"),
    "agents among chats": ("bailian", [*BAILIAN, BLOCK_AGENTS[0]], 5, "chat_id", "missing"),
    "a session among requests": (
        "mooncake",
        [*MOONCAKE, *EXAMPLES["agent-sessions"]],
        3,
        "timestamp",
        "missing",
    ),
    "csv among json": ("mooncake", [*MOONCAKE, AZURE_LINE], 3, None, "Expected `object`"),
    "block-agents: unsorted": (
        "block-agents",
        [BLOCK_AGENTS[2], BLOCK_AGENTS[0]],
        2,
        "timestamp",
        "sort the file",
    ),
    "bailian: unsorted": ("bailian", BAILIAN[::-1], 2, "timestamp", "sort the file"),
    "bailian: twice": ("bailian", [BAILIAN[0], BAILIAN[0]], 2, "chat_id", "10 was in the file"),
    "bailian: turn 0": ("bailian", [chat(1, 0.0, [1], turn=0)], 1, "turn", ">= 1"),
    "azure: header": ("azure", [AZURE_LINE], 1, "header", "TIMESTAMP"),
    "azure: columns": ("azure", [AZURE_HEADER, "1,2"], 2, None, "2 columns instead of 3"),
    "azure: time": ("azure", [AZURE_HEADER, "noon,1,1"], 2, "TIMESTAMP", "'noon'"),
    "azure: negative": ("azure", [AZURE_HEADER, AZURE_LINE[:-2] + "-1"], 2, "GeneratedTokens", ""),
    "azure: endless": ("azure", [AZURE_HEADER, AZURE_LINE + "0" * 5000], 2, "GeneratedTokens", ""),
    "azure: unsorted": ("azure", [AZURE_HEADER, *AZURE[:0:-1]], 3, "TIMESTAMP", "sort the file"),
    "azure: json": ("azure", [AZURE_HEADER, '{"a": 1}'], 2, None, "1 columns"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, case: str) -> None:
    format, rows, line, field, problem = BAD[case]
    with pytest.raises(TraceError) as caught:
        read(tmp_path, rows, format)
    error = caught.value
    assert (error.source, error.line) == (str(tmp_path / "trace"), line)
    assert error.field == field
    assert problem in error.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no request in it"),
        ("hello", "neither JSON lines nor CSV"),
        ('{"a": 1}', "no known format"),
        ("[1]", "no known format"),
        ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    ],
)
def test_other_files_are_errors(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read(tmp_path, [text])


def test_an_unknown_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no format 'csv'; there are agent-sessions, mooncake"):
        read(tmp_path, MOONCAKE, "csv")


@pytest.mark.parametrize("format", READERS)
def test_a_broken_download_is_named_whatever_the_format(tmp_path: Path, format: str) -> None:
    rows = EXAMPLES[format]
    whole = write_lines(tmp_path / "whole", rows, zipped=True).read_bytes()
    (broken := tmp_path / "broken").write_bytes(whole[:-9])
    with pytest.raises(TraceError, match=rf"{broken}:\d+: damaged gzip data"):
        list(open_trace(broken, format))


ids_of_a_prompt = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(
    st.lists(ids_of_a_prompt, min_size=1, max_size=8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.sampled_from(["mooncake", "block-agents", "bailian"]),
)
def test_every_written_session_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    sessions: list[int],
    format: str,
) -> None:
    size = {"mooncake": 512}.get(format, 16)
    rows = [row(1000.0 * n, size * len(ids), ids) for n, ids in enumerate(prompts)]
    for n, line in enumerate(rows):
        if format == "block-agents":
            line["session"] = str(sessions[n])
        elif format == "bailian":
            parent = max(-1, n - sessions[n])
            line |= {"chat_id": n, "parent_chat_id": parent, "type": "text", "turn": 1}
    found = list(open_trace(write_lines(tmp_path_factory.mktemp("t") / "t", rows), format))
    unit_s = 1.0 if format == "bailian" else 1e-3
    requests = sorted(
        (((s.start_s or 0.0) + r.offset_s, r) for s in found for r in s.requests),
        key=lambda pair: pair[0],
    )
    assert [time_s for time_s, _ in requests] == [1000.0 * unit_s * n for n in range(len(rows))]
    names = [request.blocks.ids().tolist() for _, request in requests]
    by_prefix = {
        tuple(ids[:depth]): name
        for ids, named in zip(prompts, names, strict=True)
        for depth, name in enumerate(named, 1)
    }
    assert len(set(by_prefix.values())) == len(by_prefix)
    for (_, request), ids, named in zip(requests, prompts, names, strict=True):
        assert (request.input_tokens, request.output_tokens) == (size * len(ids), 7)
        assert named == [by_prefix[tuple(ids[:depth])] for depth in range(1, len(ids) + 1)]


@given(format=st.sampled_from(list(READERS)), data=st.data())
def test_damaged_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, format: str, data: st.DataObject
) -> None:
    path = write_lines(tmp_path_factory.mktemp("t") / "t", EXAMPLES[format])
    text = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=4))
        text += b"\n"
    path.write_bytes(text)
    found: list[Session] | TraceError
    try:
        found = list(open_trace(path))
    except TraceError as e:
        found = e
    if isinstance(found, TraceError):
        assert str(found).startswith(str(path))
    else:
        assert all(session.requests for session in found)
