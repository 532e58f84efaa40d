"""Which format a file is of, by what is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from hetero_connector.errors import TraceError
from ownership.simulator.traces import (
    agent_sessions,
    azure_arrivals,
    bailian,
    block_agents,
    mooncake,
)
from ownership.simulator.traces.lines import read_lines
from ownership.simulator.traces.session import Trace

READERS: Mapping[str, Callable[[Path], Trace]] = {
    agent_sessions.FORMAT: agent_sessions.read,
    mooncake.FORMAT: mooncake.read,
    block_agents.FORMAT: block_agents.read,
    bailian.FORMAT: bailian.read,
    azure_arrivals.FORMAT: azure_arrivals.read,
}
_TOLD_BY = (
    ("requests", agent_sessions.FORMAT),
    ("chat_id", bailian.FORMAT),
    ("session", block_agents.FORMAT),
    ("hash_ids", mooncake.FORMAT),
)
"""Fields of a JSON line that only this format and those before it have."""


def open_trace(path: Path, format: str | None = None) -> Trace:
    """The trace in a file or in a directory's files, plain or gzip.

    Of `format`, or else of the one its first line shows.

    Raises:
        TraceError: the file cannot be read, is empty or of no known format.
    """
    name = format or _format_of(path)
    if name not in READERS:
        raise TraceError(str(path), f"no format {name!r}; there are {', '.join(READERS)}")
    return READERS[name](path)


def _format_of(path: Path) -> str:
    for line in read_lines(path):
        if line.text.removeprefix(b"\xef\xbb\xbf").startswith(azure_arrivals.COLUMNS[0].encode()):
            return azure_arrivals.FORMAT
        if line.text.startswith(b"version https://git-lfs"):
            raise line.error("a Git LFS pointer, not the trace: fetch it with `git lfs pull`")
        try:
            first = msgspec.json.decode(line.text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise line.error(f"neither JSON lines nor CSV: {e}") from e
        fields = first if isinstance(first, dict) else {}
        for field, format in _TOLD_BY:
            if field in fields:
                return format
        raise line.error(f"no known format (there are {', '.join(READERS)})")
    raise TraceError(str(path), "no request in it")
