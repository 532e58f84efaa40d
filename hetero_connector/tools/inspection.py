"""`heterocache inspect`: lists the contents of an SSD directory, read from its small files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_connector.artifacts.generation import Generation
from hetero_connector.errors import StoreError
from hetero_connector.store.ssd.directory_lock import is_locked
from hetero_connector.store.ssd.generation_file import GENERATION_NAME, read_generation
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalMeta, JournalRow
from hetero_connector.store.ssd.space import (
    JOURNAL_NAME,
    LOCK_NAME,
    is_model_directory,
    model_directories,
)
from hetero_connector.tools.side_files import SideFiles, read_side_files
from hetero_connector.units import size_text


def generation_of(folder: Path) -> Generation:
    """Return the generation of a model's directory. Raises StoreError if it cannot be read."""
    try:
        return read_generation(folder / GENERATION_NAME)
    except OSError as e:
        raise StoreError(f"{folder} cannot be read: {e}") from e


@dataclass(frozen=True)
class TypeReport:
    """Artifacts of one state type."""

    state_type: str
    artifacts: int
    bytes: int
    """Useful bytes, without padding."""
    slots: int
    """Slots that the type would have if it had all space that is not others' own."""
    slot_bytes: int


@dataclass(frozen=True)
class ModelReport:
    """The contents of one model's directory."""

    path: str
    fingerprint: str
    description: dict[str, Any]
    created: float
    """Unix time, seconds; so are `oldest` and `newest`."""
    in_use: bool
    artifacts: int
    bytes: int
    taken_bytes: int
    """Bytes of their slots, with padding."""
    capacity_bytes: int
    """Bytes of all space for slots."""
    chains: int
    """Number of chunks that no other stored chunk continues."""
    tokens: int
    """Tokens of distinct stored chunks."""
    oldest: float | None
    """The least recent access."""
    newest: float | None
    """The most recent access."""
    state_types: tuple[TypeReport, ...]
    side_files: SideFiles

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_models(path: Path) -> list[Path]:
    """Find the model directories at `path`, an ssd_dir or one model's directory.

    Raises StoreError if it is neither.
    """
    try:
        if is_model_directory(path):
            return [path]
        if not path.is_dir():
            raise StoreError(f"{path} is not a directory; name an ssd_dir or a directory in it")
        roots = [path, *path.glob("dp[0-9]*")]  # data-parallel engines have one each
        found = sorted(
            d.path for root in roots for d in model_directories(root) if is_model_directory(d.path)
        )
    except OSError as e:
        raise StoreError(f"{path} cannot be read: {e}") from e
    if not found:
        raise StoreError(
            f"{path} contains no HeteroCache state (no <fingerprint>/{JOURNAL_NAME}); name the "
            "ssd_dir of an engine that has run"
        )
    return found


def inspect_model(path: Path) -> ModelReport:
    """Read one model's journal; an engine may be using it. Raises StoreError."""
    journal = Journal.open_copy(path / JOURNAL_NAME)
    try:
        rows = list(journal.load())
    finally:
        journal.close()
    return _report(path, journal.meta, rows, is_locked(path / LOCK_NAME))


def _report(path: Path, meta: JournalMeta, rows: Sequence[JournalRow], in_use: bool) -> ModelReport:
    chunks = {row.chunk.key: row.chunk for row in rows}
    parents = {chunk.parent for chunk in chunks.values()}
    types = []
    for kind, slot_bytes in meta.geometry.stride_bytes.items():
        own = [row for row in rows if row.state_type is kind]
        size, slots = sum(row.size_bytes for row in own), meta.geometry.num_slots(kind)
        types.append(TypeReport(kind.value, len(own), size, slots, slot_bytes))
    used = [row.last_access for row in rows]
    return ModelReport(
        path=str(path),
        fingerprint=meta.fingerprint.hex(),
        description=dict(meta.description),
        created=meta.created,
        in_use=in_use,
        artifacts=len(rows),
        bytes=sum(row.size_bytes for row in rows),
        taken_bytes=sum(x.artifacts * x.slot_bytes for x in types),
        capacity_bytes=meta.geometry.size_bytes,
        chains=sum(key not in parents for key in chunks),
        tokens=sum(chunk.end - chunk.start for chunk in chunks.values()),
        oldest=min(used, default=None),
        newest=max(used, default=None),
        state_types=tuple(types),
        side_files=read_side_files(path, meta.description),
    )


_MAX_LINE = 120
"""Longest entry of a description that is printed. `--json` has the others, such as all layers."""


def as_text(report: ModelReport) -> str:
    """Return the report for people: of the description only what fits on a line each."""
    shown = {
        key: value
        for key, value in sorted(report.description.items())
        if value is not None and key != "fingerprint" and len(key) + len(str(value)) <= _MAX_LINE
    }
    lines = [
        f"{report.path}{'  (in use)' if report.in_use else ''}",
        f"  fingerprint {report.fingerprint}, created {_when(report.created)}",
        *(f"  {_visible(key)}: {_visible(value)}" for key, value in shown.items()),
        f"  {report.artifacts} artifacts, {size_text(report.bytes)}, {report.chains} chains, "
        f"{report.tokens} tokens",
        f"  {size_text(report.taken_bytes)} of {size_text(report.capacity_bytes)} taken",
        f"  last used between {_when(report.oldest)} and {_when(report.newest)}",
        *(f"  {line}" for line in _side_lines(report.side_files)),
        f"  {'state type':<22}{'artifacts':>10}{'bytes':>12}{'most artifacts':>16}",
        *(
            f"  {t.state_type:<22}{t.artifacts:>10}{size_text(t.bytes):>12}{t.slots:>16}"
            for t in report.state_types
        ),
    ]
    return "\n".join(lines)


def _side_lines(files: SideFiles) -> Iterator[str]:
    if files.costs is not None:
        yield f"costs {files.costs}"
    if files.cleared_salts:
        yield f"{files.cleared_salts} salts or models were cleared"
    for problem in files.problems:
        yield f"BAD {problem}"


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a damaged row
        return f"{seconds:g} s after 1970"


def _visible(value: object) -> str:
    """Return the text without what a terminal would obey: an import takes over a description."""
    return "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in str(value))
