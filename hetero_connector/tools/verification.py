"""`heterocache verify`: reads every artifact on the SSD and checks it against its journal row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hetero_connector.errors import StoreError, StoreInUseError, TransferError
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.ssd.directory_lock import DirectoryLock, holder, is_locked
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.slab_reader import SlabReader
from hetero_connector.store.ssd.space import JOURNAL_NAME, LEARNED_NAME, LOCK_NAME
from hetero_connector.tools.side_files import read_side_files
from hetero_connector.transfer.checksum import checksum
from hetero_connector.units import size_text

Progress = Callable[[list[JournalRow]], Iterable[JournalRow]]
"""Passes the rows through and shows the progress."""


@dataclass(frozen=True)
class BadArtifact:
    """An artifact that would not be served."""

    id: str
    """The chunk key in hex."""
    state_type: str
    reason: str


@dataclass
class VerifyReport:
    """The artifacts read, and the bad ones among them."""

    path: str
    artifacts: int = 0
    bytes: int = 0
    bad: list[BadArtifact] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """The problems of the other files."""
    repaired: bool = False

    @property
    def is_intact(self) -> bool:
        """Return whether nothing is wrong."""
        return not (self.bad or self.problems)


def verify_model(path: Path, repair: bool = False, progress: Progress = iter) -> VerifyReport:
    """Check every artifact of one model's directory.

    Changes nothing unless `repair`, which deletes the journal rows of bad artifacts, and learned
    costs that cannot be used. Which salts were cleared cannot be repaired. Raises StoreInUseError
    while an engine uses the directory, StoreError if it cannot be read.
    """
    with _not_in_use(path, exclusive=repair):
        journal_path = path / JOURNAL_NAME
        journal = Journal.open_existing(journal_path) if repair else Journal.open_copy(journal_path)
        try:
            report = VerifyReport(str(path))
            keys = []
            for chunk, name in journal.malformed():
                keys.append((chunk, name))
                report.bad.append(_bad(chunk, name, "its journal row is malformed"))
            geometry = journal.meta.geometry
            rows = sorted(journal.load(), key=lambda r: geometry.offset(r.state_type, r.slot))
            with SlabReader(path, max(geometry.stride_bytes.values())) as slab:
                for row in progress(rows):
                    report.artifacts += 1
                    report.bytes += row.size_bytes
                    reason = _problem(slab, geometry, row)
                    if reason:
                        keys.append((bytes(row.chunk.key), row.state_type.value))
                        report.bad.append(_bad(row.chunk.key, row.state_type.value, reason))
            files = read_side_files(path, journal.meta.description)
            report.problems = files.problems
            if repair and keys:
                journal.forget_keys(keys)
            if repair and files.costs_problem is not None:
                (path / LEARNED_NAME).unlink()
            report.repaired = repair and not report.is_intact
            return report
        finally:
            journal.close()


def _bad(chunk: object, state_type: object, reason: str) -> BadArtifact:
    name = str(state_type).encode(errors="backslashreplace").decode()
    return BadArtifact(chunk.hex() if isinstance(chunk, bytes) else repr(chunk), name, reason)


def _problem(slab: SlabReader, geometry: SlotGeometry, row: JournalRow) -> str | None:
    """Return the problem with an artifact; None if it is intact."""
    try:
        data = slab.read(geometry.offset(row.state_type, row.slot), row.size_bytes)
    except TransferError as e:
        return str(e)
    if checksum(data, row.id.seed) != row.checksum:
        return "its bytes do not match its checksum"
    return None


@contextmanager
def _not_in_use(path: Path, exclusive: bool) -> Iterator[None]:
    """Refuse a directory that an engine uses; `exclusive` keeps engines out meanwhile."""
    path_lock = path / LOCK_NAME
    if exclusive:
        try:
            lock = DirectoryLock.acquire(path_lock)
        except OSError as e:
            raise StoreError(f"{path} cannot be written, so nothing can be repaired: {e}") from e
        try:
            yield
        finally:
            lock.release()
        return
    advice = f"{path} is in use by {holder(path_lock)}; stop that engine to verify its directory"
    if is_locked(path_lock):
        raise StoreInUseError(advice)
    yield
    if is_locked(path_lock):  # an engine that started meanwhile may have overwritten artifacts
        raise StoreInUseError(advice)


def as_text(report: VerifyReport) -> str:
    """Return the report for people: a line for the directory, and one for each bad artifact."""
    artifacts, size = f"{report.artifacts:,} artifacts", size_text(report.bytes)
    lines = [f"{report.path}: {artifacts}, {size} read"]
    lines += [f"  BAD {bad.state_type} {bad.id}: {bad.reason}" for bad in report.bad]
    lines += [f"  BAD {problem}" for problem in report.problems]
    if report.repaired and report.bad:
        lines.append(f"  removed {len(report.bad)} bad artifacts; they will be computed again")
    elif report.bad:
        lines.append("  remove them with `--repair`; an engine treats each as a miss")
    elif report.is_intact:
        lines[0] += ", all intact"
    return "\n".join(lines)
