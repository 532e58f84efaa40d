"""`heterocache export`: writes what an SSD directory has to files that can be copied anywhere.

An engine may be using the directory: what is read is held against its checksum, so that bytes
which the engine replaced meanwhile are left out, not taken for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetero_connector.artifacts.generation import FIRST, Generation
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.learned import MAX_LEARNED_BYTES
from hetero_connector.errors import StoreError, StoreInUseError, TransferError
from hetero_connector.planner.profile import CostProfile
from hetero_connector.store.ssd.directory_lock import DirectoryLock, is_locked
from hetero_connector.store.ssd.generation_file import GENERATION_NAME
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalMeta, JournalRow
from hetero_connector.store.ssd.private_files import (
    PRIVATE_DIRECTORY_MODE,
    read_private,
    replace_private,
)
from hetero_connector.store.ssd.slab_reader import SlabReader
from hetero_connector.store.ssd.space import (
    JOURNAL_NAME,
    LEARNED_NAME,
    LOCK_NAME,
    is_model_directory,
)
from hetero_connector.tools.export_format import (
    INDEX_NAME,
    MAX_TIME_S,
    MAX_TOKENS,
    ExportedArtifact,
    ExportHeader,
    ExportIndex,
    SegmentReader,
    SegmentWriter,
    remove_segments,
    segments,
)
from hetero_connector.tools.inspection import generation_of
from hetero_connector.tools.verification import BadArtifact, Progress
from hetero_connector.units import size_text

_MIN_USED_SHARE = 0.5
"""Segments of which less is still stored are written anew."""


@dataclass
class ExportReport:
    """The content of an export."""

    path: str
    target: str
    artifacts: int = 0
    bytes: int = 0
    new_artifacts: int = 0
    """The number that an earlier export to the same target did not have."""
    new_bytes: int = 0
    replaced: int = 0
    """Artifacts that a running engine evicted or forgot meanwhile; they are not in it."""
    bad: list[BadArtifact] = field(default_factory=list)
    """Damaged artifacts; they are not in it."""


def export_model(path: Path, target: Path, progress: Progress = iter) -> ExportReport:
    """Export one model's directory to the folder `target`, which may hold an earlier export of it.

    An interrupted export leaves the earlier one as it was. Raises StoreInUseError, StoreError.
    """
    if is_model_directory(target):
        raise StoreError(f"{target} is an SSD directory; export to another one")
    generation = generation_of(path)
    if generation_of(path) != generation:  # a new one each time
        raise StoreError(f"{path / GENERATION_NAME} is damaged: nothing stored there can be used")
    if generation.private and is_locked(path / LOCK_NAME):
        raise StoreInUseError(
            f"{path} is in use by an engine that was reset: its weights may have changed since. "
            "Stop it to export what it stored"
        )
    try:
        target.mkdir(PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
        lock = DirectoryLock.acquire(target / LOCK_NAME)
        try:
            return _Export(path, target, generation).run(progress)
        finally:
            lock.release()
    except OSError as e:
        raise StoreError(
            f"cannot export to {target}: {e}. What an earlier export left is as it was"
        ) from e


class _Export:
    """An export under way."""

    def __init__(self, path: Path, target: Path, generation: Generation) -> None:
        self._path, self._target = path, target
        self._generation = generation
        self._report = ExportReport(str(path), str(target))
        self._mismatches: list[JournalRow] = []

    def run(self, progress: Progress) -> ExportReport:
        meta, rows = self._rows()
        kept = self._intact(self._former(self._header(meta)), rows)
        offset = meta.geometry.offset
        rows.sort(key=lambda row: offset(row.state_type, row.slot))
        artifacts = []
        first = max(segments(self._target), default=0) + 1
        largest = max(meta.geometry.stride_bytes.values())
        with SegmentWriter(self._target, first) as writer, SlabReader(self._path, largest) as slab:
            for row in progress(rows):
                place = kept.get(row.id) or self._copy(meta, row, slab, writer)
                if place is not None:
                    artifacts.append(_exported(row, *place))
            writer.finish()
        artifacts = self._still_stored(artifacts)
        if generation_of(self._path) != self._generation:
            raise StoreError(f"{self._path} was reset while it was exported: export it again")
        # Late: a salt that was cleared meanwhile is not found in the copy either.
        ExportIndex(self._header(meta), sorted(artifacts, key=lambda x: x.start)).write(
            self._target
        )
        remove_segments(self._target, {x.segment for x in artifacts})
        self._copy_learned()
        self._report.artifacts = len(artifacts)
        self._report.bytes = sum(x.size_bytes for x in artifacts)
        return self._report

    def _rows(self) -> tuple[JournalMeta, list[JournalRow]]:
        journal = Journal.open_copy(self._path / JOURNAL_NAME)
        try:
            noted = journal.generation()
            if (FIRST.tag if noted is None else noted) != self._generation.tag:
                return journal.meta, []  # all of it is from before a reset
            return journal.meta, list(journal.load())
        finally:
            journal.close()

    def _header(self, meta: JournalMeta) -> ExportHeader:
        try:
            return ExportHeader.of(
                meta.fingerprint,
                meta.geometry.stride_bytes,
                meta.description,
                self._generation,
                Clearings.in_folder(self._path).counts,
            )
        except (KeyError, TypeError, ValueError) as e:
            raise StoreError(
                f"{self._path} does not describe its engine: an earlier version wrote it. Start an "
                "engine of this version on it once"
            ) from e

    def _former(self, header: ExportHeader) -> list[ExportedArtifact]:
        """Return what an earlier export to this target has of this store.

        Nothing if its index is damaged: then all is written anew.
        """
        if not (self._target / INDEX_NAME).exists():
            remove_segments(self._target, ())  # of first exports that were interrupted
            return []
        try:
            former = ExportIndex.read(self._target)
        except StoreError:
            return []
        if former.header.fingerprint != header.fingerprint:
            raise StoreError(f"{self._target} has an export of another model")
        # Of an export that was interrupted; what the index names is kept until there is another.
        remove_segments(self._target, {x.segment for x in former.artifacts})
        is_same = former.header.generation == header.generation
        return former.artifacts if is_same else []

    def _intact(
        self, former: Sequence[ExportedArtifact], rows: Sequence[JournalRow]
    ) -> dict[ArtifactId, tuple[int, int]]:
        """Return the places of what need not be written again."""
        wanted = {row.id: row.checksum for row in rows}
        same = [x for x in former if wanted.get(x.id) == x.checksum]
        used, sizes = Counter[int](), Counter[int]()
        for x in same:
            used[x.segment] += x.size_bytes
        for x in former:
            sizes[x.segment] += x.size_bytes
        full = {n for n, size in used.items() if size >= _MIN_USED_SHARE * sizes[n]}
        intact = {}
        with SegmentReader(self._target) as reader:
            for x in sorted(same, key=lambda x: (x.segment, x.offset)):
                if x.segment in full and _is_intact(reader, x):
                    intact[x.id] = x.segment, x.offset
        return intact

    def _copy(
        self, meta: JournalMeta, row: JournalRow, slab: SlabReader, writer: SegmentWriter
    ) -> tuple[int, int] | None:
        """Copy an artifact; None if it is not what its row says."""
        if row.chunk.end > MAX_TOKENS:
            self._report.bad.append(_bad(row, "its journal row is malformed"))
            return None
        try:
            data = slab.read(meta.geometry.offset(row.state_type, row.slot), row.size_bytes)
        except TransferError as e:
            self._report.bad.append(_bad(row, str(e)))
            return None
        if _exported(row, 0, 0).problem(data):
            self._mismatches.append(row)
            return None
        self._report.new_artifacts += 1
        self._report.new_bytes += row.size_bytes
        return writer.add(data)

    def _still_stored(self, artifacts: Sequence[ExportedArtifact]) -> list[ExportedArtifact]:
        """Leave out what an engine has evicted meanwhile, or cleared: its row is gone.

        That also tells what was damaged from what was replaced.
        """
        journal = Journal.open_copy(self._path / JOURNAL_NAME, check=False)
        try:
            for row in self._mismatches:
                now = journal.find(row.id)
                if now is None or (now.slot, now.generation) != (row.slot, row.generation):
                    self._report.replaced += 1
                else:
                    self._report.bad.append(_bad(row, "its bytes do not match its checksum"))
            kept = [x for x in artifacts if journal.find(x.id) is not None]
        finally:
            journal.close()
        self._report.replaced += len(artifacts) - len(kept)
        return kept

    def _copy_learned(self) -> None:
        """Copy what was learned, if it can be read; `inspect` says why if not."""
        try:
            content = read_private(self._path / LEARNED_NAME, MAX_LEARNED_BYTES)
            CostProfile.from_json(content)
        except (OSError, ValueError):
            (self._target / LEARNED_NAME).unlink(missing_ok=True)
        else:
            replace_private(self._target / LEARNED_NAME, content)


def _is_intact(reader: SegmentReader, artifact: ExportedArtifact) -> bool:
    try:
        return reader.read(artifact, np.empty(artifact.size_bytes, np.uint8)) is None
    except TransferError:
        return False


def _exported(row: JournalRow, segment: int, offset: int) -> ExportedArtifact:
    chunk = row.chunk
    return ExportedArtifact(
        bytes(chunk.key), bytes(chunk.parent), chunk.start, chunk.end, row.state_type,
        row.size_bytes, row.checksum, min(max(row.last_access, 0.0), MAX_TIME_S),
        min(row.reuse_count, MAX_TOKENS), segment, offset,
    )  # fmt: skip


def _bad(row: JournalRow, reason: str) -> BadArtifact:
    return BadArtifact(bytes(row.chunk.key).hex(), row.state_type.value, reason)


def as_text(report: ExportReport) -> str:
    """Return the report for people."""
    lines = [
        f"{report.path} -> {report.target}: {report.artifacts:,} artifacts, "
        f"{size_text(report.bytes)}; new are {report.new_artifacts:,}, "
        f"{size_text(report.new_bytes)}"
    ]
    if report.replaced:
        lines.append(f"  left out {report.replaced:,} that the running engine forgot meanwhile")
    lines += [f"  BAD {bad.state_type} {bad.id}: {bad.reason}" for bad in report.bad]
    if report.bad:
        lines.append("  left out; `heterocache verify --repair` removes them from the store, too")
    return "\n".join(lines)
