"""Lines of trace files, plain or gzip, checked with errors that name file, line and field."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, TypeVar, cast

import msgspec
from msgspec import Meta

from hetero_connector.errors import TraceError
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.prefix_tree import PrefixTree

Time = Annotated[float, Meta(ge=0, lt=1e15)]
"""In the format's own unit."""
Tokens = Annotated[int, Meta(ge=0, lt=2**48)]
BlockId = Annotated[int, Meta(ge=0, lt=2**62)]
Count = Annotated[int, Meta(ge=1)]

_T = TypeVar("_T")
_GZIP_MAGIC = b"\x1f\x8b"
_SUFFIXES = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz")
_PATH_IN_MESSAGE = re.compile(r" - at `\$\.?(?P<field>.*)`$")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, without its end."""

    source: str
    number: int
    """From 1."""
    text: bytes

    def error(self, problem: str, field: str | None = None) -> TraceError:
        """Return an error that names file and line."""
        return TraceError(self.source, problem, line=self.number, field=field)

    def decoded(self, decoder: msgspec.json.Decoder[_T]) -> _T:
        """Decode the line.

        Raises:
            TraceError: it is not JSON, or a field is missing, of the wrong type or out of range.
        """
        try:
            return decoder.decode(self.text)
        except msgspec.ValidationError as e:
            message = str(e)
            found = _PATH_IN_MESSAGE.search(message)
            problem = message[: found.start()] if found else message
            raise self.error(problem, _field(found, problem)) from e
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise self.error(f"not JSON: {e}") from e


def read_lines(path: Path) -> Iterator[Line]:
    """Yield every line that is not blank; of a directory, those of its JSON and CSV files by name.

    Raises:
        TraceError: a file cannot be read, or its gzip stream is damaged or ends early.
    """
    try:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    except OSError as e:
        raise TraceError(str(path), e.strerror or str(e)) from e
    for file in files:
        yield from _lines_of(file)


def _lines_of(path: Path) -> Iterator[Line]:
    number = 0
    with _open(path) as file:
        try:
            for line in file:
                number += 1
                if stripped := line.strip():
                    yield Line(str(path), number, stripped)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            problem = f"damaged gzip data ({e}): fetch the file again"
            raise TraceError(str(path), problem, line=number + 1) from e
        except OSError as e:
            raise TraceError(str(path), e.strerror or str(e), line=number + 1) from e


def _open(path: Path) -> IO[bytes]:
    """Open a file, decompressed if it starts like a gzip file, whatever its name."""
    try:
        with path.open("rb") as file:
            zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")
    except OSError as e:
        raise TraceError(str(path), e.strerror or str(e)) from e


def _field(found: re.Match[str] | None, problem: str) -> str | None:
    """Return the wrong field. msgspec names a missing one in its text, others by their path."""
    parts = [found["field"]] if found else []
    if missing := re.search(r"missing required field `(.+?)`", problem):
        parts.append(missing[1])
    return ".".join(part for part in parts if part) or None


class PromptReader:
    """Checks the prompts of one id space, and gives their blocks ids that name prefixes.

    Some recordings name blocks by their prefix, some by their content, and some do not say. After
    this all ids are those of a radix tree, as `BlockRuns` promises.
    """

    def __init__(self, block_tokens: int, first_id: int = 0) -> None:
        self._block_tokens = block_tokens
        self._tree = PrefixTree(first_id)

    @property
    def next_id(self) -> int:
        """A number greater than every id so far."""
        return self._tree.next_name

    def blocks(self, recorded: BlockRuns, input_tokens: int, line: Line, field: str) -> BlockRuns:
        """Return the prompt with its new ids.

        Raises:
            TraceError: a prompt of `input_tokens` does not have that many blocks.
        """
        size, have = self._block_tokens, recorded.num_blocks
        if not input_tokens - size < have * size < input_tokens + size:
            problem = f"{have} blocks of {size} tokens do not make a prompt of {input_tokens}"
            raise line.error(problem, field)
        return self._tree.add(recorded).names
