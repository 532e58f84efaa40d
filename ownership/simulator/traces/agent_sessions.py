"""Coding-agent sessions: one session a line, block ids as runs, think times.

A line is `{"id", "block_size", "tool_tokens", "system_tokens", "requests": [...]}`; a request has
`t` (seconds since the session's start), `in` and `out` tokens, `runs` (`[[first, count], ...]` of
its full blocks) or `hash_ids` (the same ids one by one), `input_types`, and optionally
`api_time` and `think_time` in seconds. An entry of type `subagent` has `requests` of its own, timed
from its start, with ids of the parent's id space.

Source: https://github.com/callanjfox/kv-cache-tester, `docs/trace_replay_tester.md`; its `traces/`
is a directory with a file of one such line for each session.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hetero_connector.errors import TraceError
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import (
    BlockId,
    Count,
    Line,
    PromptReader,
    Time,
    Tokens,
    read_lines,
)
from ownership.simulator.traces.session import Request, Session, Trace, Trigger, in_time_order

FORMAT = "agent-sessions"


class _Call(msgspec.Struct, tag_field="type", gc=False):
    """A request in the file."""

    t: Time
    input_tokens: Tokens = msgspec.field(name="in")
    output_tokens: Tokens = msgspec.field(name="out")
    runs: list[tuple[BlockId, Count]] | None = None
    hash_ids: list[BlockId] | None = None
    input_types: list[str] = []
    api_time: Time | None = None
    think_time: Time | None = None


class _Streamed(_Call, tag="s"):
    pass


class _Unstreamed(_Call, tag="n"):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Time
    requests: list[_Streamed | _Unstreamed]


class _Session(msgspec.Struct):
    id: str
    block_size: Count
    requests: Annotated[list[_Streamed | _Unstreamed | _Subagent], Meta(min_length=1)]
    tool_tokens: Tokens = 0
    system_tokens: Tokens = 0
    hash_id_scope: Literal["local", "global"] = "local"


def read(path: Path) -> Trace:
    """Read the sessions of a file or of a directory's files; the first line has the block size.

    Raises:
        TraceError: the file cannot be read or its first line is not a session.
    """
    decoder = msgspec.json.Decoder(_Session)
    for line in read_lines(path):
        first = line.decoded(decoder)
        return Trace(
            str(path),
            FORMAT,
            first.block_size,
            partial(_sessions, path, first),
            starts_recorded=False,
            caveats=_caveats(first),
        )
    raise TraceError(str(path), "no session in it")


def _caveats(first: _Session) -> tuple[str, ...]:
    arrivals = "When sessions started is not recorded: arrivals are invented."
    if first.hash_id_scope == "global":
        return (arrivals,)
    return (arrivals, "Block ids are local to a session: what sessions share is not recorded.")


def _sessions(path: Path, first: _Session) -> Iterator[Session]:
    decoder = msgspec.json.Decoder(_Session)
    prompts = PromptReader(first.block_size)
    for line in read_lines(path):
        row = line.decoded(decoder)
        for field in ("block_size", "hash_id_scope"):
            found, before = getattr(row, field), getattr(first, field)
            if found != before:
                raise line.error(f"is {found}, but {before} before", field)
        if row.hash_id_scope == "local":
            prompts = PromptReader(first.block_size, prompts.next_id)
        requests = _SessionReader(line, row, prompts).requests()
        yield Session(row.id, requests, preamble_tokens=row.tool_tokens + row.system_tokens)


class _SessionReader:
    """Makes the requests of one line."""

    def __init__(self, line: Line, session: _Session, prompts: PromptReader) -> None:
        self._line, self._session, self._prompts = line, session, prompts
        self._made: list[Request] = []
        self._service_s: list[float] = []
        """For each of them, the time that the recorded server took to answer; 0: not recorded."""

    def requests(self) -> tuple[Request, ...]:
        """Return them in the order they were sent; a subagent forks from the request before it."""
        last: int | None = None
        for index, entry in enumerate(self._session.requests):
            where = f"requests[{index}]"
            if isinstance(entry, _Subagent):
                parent, think_s = last, None
                for inner, call in enumerate(entry.requests):
                    think_s = call.think_time if inner else None
                    parent = self._add(call, f"{where}.requests[{inner}]", parent, entry.t, think_s)
            else:
                last = self._add(entry, where, last, 0.0, entry.think_time)
        if not self._made:
            raise self._line.error("no request is in it, only subagents without any", "requests")
        return in_time_order(self._made)

    def _add(
        self, call: _Call, where: str, parent: int | None, start_s: float, think_s: float | None
    ) -> int:
        offset_s = start_s + call.t
        if parent is not None:
            before = self._made[parent]
            if offset_s < before.offset_s:
                raise self._line.error("is before the request that it follows", f"{where}.t")
            if think_s is None:  # a subagent's first request, or not recorded
                think_s = max(0.0, offset_s - before.offset_s - self._service_s[parent])
        self._service_s.append(call.api_time or 0.0)
        self._made.append(
            Request(
                offset_s=offset_s,
                input_tokens=call.input_tokens,
                output_tokens=call.output_tokens,
                blocks=self._blocks(call, where),
                parent=parent,
                think_s=think_s,
                trigger=_trigger(call.input_types),
            )
        )
        return len(self._made) - 1

    def _blocks(self, call: _Call, where: str) -> BlockRuns:
        if call.runs is not None:
            recorded, name = BlockRuns.of_runs(call.runs), "runs"
        elif call.hash_ids is not None:
            recorded, name = BlockRuns.of_ids(call.hash_ids), "hash_ids"
        else:
            raise self._line.error("is missing, and so is hash_ids", f"{where}.runs")
        field = f"{where}.{name}"
        return self._prompts.blocks(recorded, call.input_tokens, self._line, field)


def _trigger(input_types: list[str]) -> Trigger:
    """Return the source of the new text; if both a person and a tool wrote, it is the person."""
    if "text" in input_types:
        return Trigger.USER
    return Trigger.TOOL_RESULT if "tool_result" in input_types else Trigger.UNKNOWN
