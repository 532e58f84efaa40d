"""The readers of recorded traces, and which of them a file is for.

- Mooncake (https://github.com/kvcache-ai/Mooncake, `FAST25-release/traces`): a request a line,
  `{"timestamp": ms, "input_length", "output_length": tokens, "hash_ids": [...]}`, 512-token blocks
  that all requests share, no sessions. The last block may be partial.
- Qwen-Bailian (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon): a request a line that
  names the chat it continues, `{"chat_id", "parent_chat_id": -1 for none, "timestamp": s,
  "input_length", "output_length", "type": "text" | ..., "turn", "hash_ids"}`. Each 16-token block
  is hashed by itself, so its id names the block and not the prefix.
- Block agents (https://github.com/LMCache/lmcache-agent-trace): a request a line, `{"session",
  "timestamp": ms, "input_length", "output_length", "hash_ids"}`, ids of full 16-token blocks that
  all sessions share.
- Azure (https://github.com/Azure/AzurePublicDataset, `AzureLLMInferenceDataset2023.md` and `2024`):
  a CSV file with `TIMESTAMP` (ISO 8601), `ContextTokens` and `GeneratedTokens`, no prefixes.
- Coding-agent sessions: see `agent_sessions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from hetero_connector.errors import TraceError
from ownership.simulator.traces import agent_sessions, router_decisions
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import (
    BlockId,
    Line,
    PromptReader,
    Time,
    Tokens,
    read_lines,
)
from ownership.simulator.traces.session import Request, Session, Trace, Trigger

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NO_THINK_TIMES = "Think times are not recorded, only when requests were sent."
_UNSORTED = "is before the line before: sort the file by it"
_BOM = b"\xef\xbb\xbf"


class _Row(msgspec.Struct, gc=False):
    timestamp: Time
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]


class _BailianRow(_Row, gc=False, kw_only=True):
    chat_id: int
    type: str
    turn: Annotated[int, Meta(ge=1)]
    parent_chat_id: Annotated[int, Meta(ge=-1)] = -1


class _SessionRow(_Row, gc=False, kw_only=True):
    session: str


_R = TypeVar("_R", bound=_Row)


def _rows(path: Path, kind: type[_R], block_tokens: int) -> Iterator[tuple[Line, _R, BlockRuns]]:
    """Yield every line with its row and the blocks of its prompt."""
    decoder = msgspec.json.Decoder(kind)
    prompts = PromptReader(block_tokens)
    for line in read_lines(path):
        row = line.decoded(decoder)
        recorded = BlockRuns.of_ids(row.hash_ids)
        yield line, row, prompts.blocks(recorded, row.input_length, line, "hash_ids")


def read_mooncake(path: Path) -> Trace:
    """Read a Mooncake trace; each request is a session of its own."""
    caveats = ("Sessions are not recorded: every request is a session of its own.",)
    return Trace(str(path), "mooncake", 512, partial(_mooncake, path), caveats=caveats)


def _mooncake(path: Path) -> Iterator[Session]:
    first_ms: float | None = None
    last_ms = 0.0
    for line, row, blocks in _rows(path, _Row, 512):
        if row.timestamp < last_ms:
            raise line.error(_UNSORTED, "timestamp")
        last_ms = row.timestamp
        first_ms = last_ms if first_ms is None else first_ms
        request = Request(0.0, row.input_length, row.output_length, blocks)
        start_s = (last_ms - first_ms) / 1000
        yield Session(str(line.number), (request,), start_s, is_named=False)


def read_bailian(path: Path) -> Trace:
    """Read a Qwen-Bailian trace, as a whole because the lines of sessions interleave."""
    caveats = (
        _NO_THINK_TIMES,
        "A chat whose parent was sent before the recording began is a session's first request.",
    )
    return Trace(str(path), "bailian", 16, partial(_bailian, path), caveats=caveats)


def _bailian(path: Path) -> Iterator[Session]:
    sessions: list[tuple[str, float, list[Request]]] = []
    places: dict[int, tuple[int, int]] = {}
    last_s = 0.0
    for line, row, blocks in _rows(path, _BailianRow, 16):
        if row.timestamp < last_s:
            raise line.error(_UNSORTED, "timestamp")
        last_s = row.timestamp
        if row.chat_id in places:
            raise line.error(f"{row.chat_id} was in the file before", "chat_id")
        session, parent = places.get(row.parent_chat_id, (len(sessions), None))
        if parent is None:
            sessions.append((str(row.chat_id), row.timestamp, []))
        _, start_s, requests = sessions[session]
        places[row.chat_id] = (session, len(requests))
        offset_s, lengths = row.timestamp - start_s, (row.input_length, row.output_length)
        requests.append(Request(offset_s, *lengths, blocks, parent, trigger=Trigger.USER))
    first_s = sessions[0][1] if sessions else 0.0
    for name, start_s, requests in sessions:
        yield Session(name, tuple(requests), start_s=start_s - first_s)


def read_block_agents(path: Path) -> Trace:
    """Read a block-agents trace, as a whole because the lines of sessions may interleave."""
    sessions = partial(_block_agents, path)
    return Trace(str(path), "block-agents", 16, sessions, caveats=(_NO_THINK_TIMES,))


def _block_agents(path: Path) -> Iterator[Session]:
    starts_s: dict[str, float] = {}
    requests: dict[str, list[Request]] = {}
    for line, row, blocks in _rows(path, _SessionRow, 16):
        sent = requests.setdefault(row.session, [])
        offset_s = row.timestamp / 1000 - starts_s.setdefault(row.session, row.timestamp / 1000)
        if offset_s < (sent[-1].offset_s if sent else 0.0):
            problem = "is before the session's line before: sort the file by it"
            raise line.error(problem, "timestamp")
        parent = len(sent) - 1 if sent else None
        sent.append(Request(offset_s, row.input_length, row.output_length, blocks, parent))
    first_s = min(starts_s.values(), default=0.0)
    for name in sorted(requests, key=starts_s.__getitem__):
        yield Session(name, tuple(requests[name]), start_s=starts_s[name] - first_s)


def read_azure(path: Path) -> Trace:
    """Read an Azure trace; each request is a session whose prompt no other shares."""
    caveats = ("Neither prefixes nor sessions are recorded: prompts are taken to share nothing.",)
    return Trace(str(path), "azure", 16, partial(_azure, path), caveats=caveats)


def _azure(path: Path) -> Iterator[Session]:
    lines = read_lines(path)
    header = next(lines, Line(str(path), 1, b""))
    if header.text.removeprefix(_BOM) != ",".join(AZURE_COLUMNS).encode():
        raise header.error(f"is not {','.join(AZURE_COLUMNS)}", "header")
    first: datetime | None = None
    last_s, next_id = 0.0, 0
    for line in lines:
        cells = line.text.decode("ascii", "replace").split(",")
        if len(cells) != len(AZURE_COLUMNS):
            raise line.error(f"has {len(cells)} columns instead of {len(AZURE_COLUMNS)}")
        sent = _azure_time(line, cells[0])
        first = first or sent
        start_s = (sent - first).total_seconds()
        if start_s < last_s:
            raise line.error(_UNSORTED, AZURE_COLUMNS[0])
        last_s = start_s
        input_tokens, output_tokens = (_azure_tokens(line, cells, column) for column in (1, 2))
        num_blocks = -(-input_tokens // 16)
        blocks = BlockRuns.of_runs([(next_id, num_blocks)])
        next_id += num_blocks + 1
        request = Request(0.0, input_tokens, output_tokens, blocks)
        yield Session(str(line.number), (request,), start_s, is_named=False)


def _azure_time(line: Line, text: str) -> datetime:
    """Read a time; UTC if the file does not say."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as e:
        raise line.error(f"not a time: {text!r}", AZURE_COLUMNS[0]) from e
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _azure_tokens(line: Line, cells: list[str], column: int) -> int:
    if not re.fullmatch("[0-9]{1,15}", cells[column]):
        raise line.error(f"not a number of tokens: {cells[column]!r}", AZURE_COLUMNS[column])
    return int(cells[column])


READERS: Mapping[str, Callable[[Path], Trace]] = {
    agent_sessions.FORMAT: agent_sessions.read,
    "mooncake": read_mooncake,
    "block-agents": read_block_agents,
    "bailian": read_bailian,
    "azure": read_azure,
    router_decisions.FORMAT: router_decisions.read,
}
_RECOGNISED_BY = (
    ("predicted_ttft_s", router_decisions.FORMAT),
    ("token_bytes", router_decisions.FORMAT),
    ("requests", agent_sessions.FORMAT),
    ("chat_id", "bailian"),
    ("session", "block-agents"),
    ("hash_ids", "mooncake"),
)
"""Fields of a JSON line that only this format and those before it have."""


def open_trace(path: Path, format: str | None = None) -> Trace:
    """Open the trace in a file or in a directory's files, plain or gzip.

    `format`: None: recognised by the first line.

    Raises:
        TraceError: the file cannot be read, is empty or has no known format.
    """
    name = format or _format_of(path)
    if name not in READERS:
        raise TraceError(str(path), f"no format {name!r}; there are {', '.join(READERS)}")
    return READERS[name](path)


def _format_of(path: Path) -> str:
    for line in read_lines(path):
        if line.text.removeprefix(_BOM).startswith(AZURE_COLUMNS[0].encode()):
            return "azure"
        if line.text.startswith(b"version https://git-lfs"):
            raise line.error("a Git LFS pointer, not the trace: fetch it with `git lfs pull`")
        try:
            first = msgspec.json.decode(line.text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise line.error(
                f"neither JSON lines nor CSV ({e}); there are the formats {', '.join(READERS)}"
            ) from e
        fields = first if isinstance(first, dict) else {}
        for field, format in _RECOGNISED_BY:
            if field in fields:
                return format
        raise line.error(f"no known format (there are {', '.join(READERS)})")
    raise TraceError(str(path), "no request in it")
