"""Azure's LLM inference traces: arrivals and lengths, nothing on prefixes.

A CSV file with the columns `TIMESTAMP` (ISO 8601), `ContextTokens` and `GeneratedTokens`.

Source: https://github.com/Azure/AzurePublicDataset, `AzureLLMInferenceDataset2023.md` and `2024`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.lines import Line, read_lines
from ownership.simulator.traces.session import Request, Session, Trace

FORMAT = "azure"
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BLOCK_TOKENS = 16
_CAVEATS = ("Neither prefixes nor sessions are recorded: prompts are taken to share nothing.",)


def read(path: Path) -> Trace:
    """The arrivals of a file, each as a session of one request whose prompt nobody shares."""
    return Trace(str(path), FORMAT, BLOCK_TOKENS, partial(_sessions, path), caveats=_CAVEATS)


def _sessions(path: Path) -> Iterator[Session]:
    lines = read_lines(path)
    header = next(lines, Line(str(path), 1, b""))
    if header.text.removeprefix(b"\xef\xbb\xbf") != ",".join(COLUMNS).encode():
        raise header.error(f"is not {','.join(COLUMNS)}", "header")
    first: datetime | None = None
    last_s, next_id = 0.0, 0
    for line in lines:
        row = _Row(line)
        sent = row.time()
        first = first or sent
        start_s = (sent - first).total_seconds()
        if start_s < last_s:
            raise line.error("is before the line before: sort the file by it", COLUMNS[0])
        last_s = start_s
        input_tokens, output_tokens = row.tokens(1), row.tokens(2)
        num_blocks = -(-input_tokens // BLOCK_TOKENS)
        blocks = BlockRuns.of_runs([(next_id, num_blocks)])
        next_id += num_blocks + 1
        yield Session(
            str(line.number), (Request(0.0, input_tokens, output_tokens, blocks),), start_s=start_s
        )


class _Row:
    """One line of the file, cut at its commas."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._cells = line.text.decode("ascii", "replace").split(",")
        if len(self._cells) != len(COLUMNS):
            raise line.error(f"has {len(self._cells)} columns instead of {len(COLUMNS)}")

    def time(self) -> datetime:
        """When the request arrived; UTC where the file does not say."""
        try:
            time = datetime.fromisoformat(self._cells[0])
        except ValueError as e:
            raise self._line.error(f"not a time: {self._cells[0]!r}", COLUMNS[0]) from e
        return time if time.tzinfo else time.replace(tzinfo=UTC)

    def tokens(self, column: int) -> int:
        """A length in tokens."""
        if not re.fullmatch("[0-9]{1,15}", self._cells[column]):
            problem = f"not a number of tokens: {self._cells[column]!r}"
            raise self._line.error(problem, COLUMNS[column])
        return int(self._cells[column])
