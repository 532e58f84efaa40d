"""Qwen-Bailian usage traces: a request a line, each naming the chat it continues.

A line is `{"chat_id", "parent_chat_id": -1 for none, "timestamp": s, "input_length",
"output_length": tokens, "type": "text" | ..., "turn", "hash_ids": [...]}`. Each 16-token block is
hashed by itself, so that its id names the block and not the prefix.

Source: https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import BlockId, Time, Tokens, read_lines
from ownership.simulator.traces.prompts import PromptReader
from ownership.simulator.traces.session import Request, Session, Trace, Trigger

FORMAT = "bailian"
BLOCK_TOKENS = 16
_NO_PARENT = -1
_CAVEATS = (
    "Think times are not recorded, only when requests were sent.",
    "A chat whose parent was sent before the recording began is a session's first request.",
)


class _Row(msgspec.Struct, gc=False):
    chat_id: int
    timestamp: Time
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]
    type: str
    turn: Annotated[int, Meta(ge=1)]
    parent_chat_id: Annotated[int, Meta(ge=_NO_PARENT)] = _NO_PARENT


class _Chats:
    """The sessions read so far: chats that continue each other."""

    def __init__(self) -> None:
        self.sessions: list[tuple[str, float, list[Request]]] = []
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, row: _Row, blocks: BlockRuns) -> str | None:
        """Put a chat behind its parent; what is wrong with its `chat_id`, if anything."""
        if row.chat_id in self._places:
            return f"{row.chat_id} was in the file before"
        session, parent = self._places.get(row.parent_chat_id, (len(self.sessions), None))
        if parent is None:
            self.sessions.append((str(row.chat_id), row.timestamp, []))
        _, start_s, requests = self.sessions[session]
        self._places[row.chat_id] = (session, len(requests))
        requests.append(
            Request(
                row.timestamp - start_s,
                row.input_length,
                row.output_length,
                blocks,
                parent=parent,
                trigger=Trigger.USER,
            )
        )
        return None


def read(path: Path) -> Trace:
    """The sessions of a file. Their lines interleave, so that it is read as a whole."""
    return Trace(str(path), FORMAT, BLOCK_TOKENS, partial(_sessions, path), caveats=_CAVEATS)


def _sessions(path: Path) -> Iterator[Session]:
    decoder = msgspec.json.Decoder(_Row)
    prompts, chats = PromptReader(BLOCK_TOKENS), _Chats()
    last_s = 0.0
    for line in read_lines(path):
        row = line.decoded(decoder)
        if row.timestamp < last_s:
            raise line.error("is before the line before: sort the file by it", "timestamp")
        last_s = row.timestamp
        recorded = BlockRuns.of_ids(row.hash_ids)
        blocks = prompts.blocks(recorded, row.input_length, line, "hash_ids")
        if repeated := chats.add(row, blocks):
            raise line.error(repeated, "chat_id")
    for name, start_s, requests in chats.sessions:
        yield Session(name, tuple(requests), start_s=start_s)
