"""Agent logs with 16-token blocks: a request a line, named by its session.

A line is `{"session", "timestamp": ms, "input_length", "output_length": tokens, "hash_ids": [...]}`
with ids of full blocks that all sessions share.

Source: https://github.com/LMCache/lmcache-agent-trace.
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

FORMAT = "block-agents"
BLOCK_TOKENS = 16
_CAVEATS = ("Think times are not recorded, only when requests were sent.",)


class _Row(msgspec.Struct, gc=False):
    session: str
    timestamp: Time
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]


def read(path: Path) -> Trace:
    """The sessions of a file. Their lines may interleave, so that it is read as a whole."""
    return Trace(str(path), FORMAT, BLOCK_TOKENS, partial(_sessions, path), caveats=_CAVEATS)


def _sessions(path: Path) -> Iterator[Session]:
    decoder = msgspec.json.Decoder(_Row)
    prompts = PromptReader(BLOCK_TOKENS)
    starts_s: dict[str, float] = {}
    requests: dict[str, list[Request]] = {}
    for line in read_lines(path):
        row = line.decoded(decoder)
        sent = requests.setdefault(row.session, [])
        offset_s = row.timestamp / 1000 - starts_s.setdefault(row.session, row.timestamp / 1000)
        if offset_s < (sent[-1].offset_s if sent else 0.0):
            raise line.error(
                "is before the session's line before: sort the file by it", "timestamp"
            )
        recorded = BlockRuns.of_ids(row.hash_ids)
        sent.append(
            Request(
                offset_s,
                row.input_length,
                row.output_length,
                prompts.blocks(recorded, row.input_length, line, "hash_ids"),
                parent=len(sent) - 1 if sent else None,
            )
        )
    for name in sorted(requests, key=starts_s.__getitem__):
        yield Session(name, tuple(requests[name]), start_s=starts_s[name])
