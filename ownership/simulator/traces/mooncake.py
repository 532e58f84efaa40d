"""Mooncake's traces: a request a line, 512-token blocks shared by all, no sessions.

A line is `{"timestamp": ms, "input_length", "output_length": tokens, "hash_ids": [...]}`, the last
block may be partial.

Source: https://github.com/kvcache-ai/Mooncake, `FAST25-release/traces`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import BlockId, Time, Tokens, read_lines
from ownership.simulator.traces.prompts import PromptReader
from ownership.simulator.traces.session import Request, Session, Trace

FORMAT = "mooncake"
BLOCK_TOKENS = 512
_CAVEATS = ("Sessions are not recorded: every request is a session of its own.",)


class _Row(msgspec.Struct, gc=False):
    timestamp: Time
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]


def read(path: Path) -> Trace:
    """The requests of a file, each as a session of one request."""
    return Trace(str(path), FORMAT, BLOCK_TOKENS, partial(_sessions, path), caveats=_CAVEATS)


def _sessions(path: Path) -> Iterator[Session]:
    decoder = msgspec.json.Decoder(_Row)
    prompts = PromptReader(BLOCK_TOKENS)
    last_ms = 0.0
    for line in read_lines(path):
        row = line.decoded(decoder)
        if row.timestamp < last_ms:
            raise line.error("is before the line before: sort the file by it", "timestamp")
        last_ms = row.timestamp
        recorded = BlockRuns.of_ids(row.hash_ids)
        blocks = prompts.blocks(recorded, row.input_length, line, "hash_ids")
        request = Request(0.0, row.input_length, row.output_length, blocks)
        yield Session(str(line.number), (request,), start_s=last_ms / 1000)
