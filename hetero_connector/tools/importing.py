"""`heterocache import`: adds what was exported to an SSD directory, which no engine uses meanwhile.

Every artifact is held against its checksum before it is written, to a slot that is free: nothing
that is stored is evicted or changed. A batch is listed in the journal once its bytes are on the
disk, so an import that is cut short leaves whole artifacts, and can be run again.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetero_connector.artifacts.record import ChunkKey, SlotRef, Tier
from hetero_connector.config import ssd_gib_of
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.learned import MAX_LEARNED_BYTES
from hetero_connector.errors import (
    ConfigError,
    FormatError,
    StoreError,
    StoreInUseError,
    TransferError,
)
from hetero_connector.planner.profile import CostProfile
from hetero_connector.spec.state_types import Family
from hetero_connector.store.catalog.index import PrefixIndex
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.catalog.slots import SlotPool
from hetero_connector.store.ssd.directory import SsdDirectory, UnfinishedDirectoryError
from hetero_connector.store.ssd.directory_lock import shared
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.private_files import read_private, replace_private
from hetero_connector.store.ssd.space import (
    LEARNED_NAME,
    LOCK_NAME,
    is_model_directory,
    model_directory,
)
from hetero_connector.tools.export_format import (
    INDEX_NAME,
    ExportedArtifact,
    ExportHeader,
    ExportIndex,
    SegmentReader,
    unreadable,
)
from hetero_connector.tools.verification import BadArtifact
from hetero_connector.units import GIB, size_text

Progress = Callable[[Sequence[ExportedArtifact]], Iterable[ExportedArtifact]]
"""Passes the artifacts through and shows the progress."""
_BATCH_BYTES = 64 << 20
_MODEL = re.compile(r"[0-9a-f]{16}")
_RANK = re.compile(r"dp\d+")


@dataclass
class ImportReport:
    """The outcome of importing one model."""

    source: str
    path: str = ""
    """The model's directory that it is in now."""
    artifacts: int = 0
    """The number imported."""
    bytes: int = 0
    present: int = 0
    """Artifacts that were stored there already."""
    no_room: int = 0
    """Artifacts for which the directory had no room, the least recently used."""
    bad: list[BadArtifact] = field(default_factory=list)
    """Damaged artifacts, and those that contradict what is stored; they are left out."""
    stopped: str = ""
    """Why it ended early; "": it did not."""

    @property
    def is_complete(self) -> bool:
        """Return whether all that was exported is stored now."""
        return not (self.bad or self.no_room or self.stopped)


def find_exports(source: Path) -> list[tuple[Path, str]]:
    """Find the exported models at `source`: each one's folder, and the part of an ssd_dir it is of.

    That part is "" but for data-parallel engines, which have one each. Raises StoreError if there
    is none, or if one may not be read.
    """
    try:
        if (source / INDEX_NAME).exists():
            return [(source, "")]
        ranks = [x for x in source.iterdir() if _RANK.fullmatch(x.name) and x.is_dir()]
        found = [
            (folder, part)
            for part, parent in (("", source), *((x.name, x) for x in ranks))
            for folder in parent.iterdir()
            if _is_export(folder)
        ]
    except OSError as e:
        raise unreadable(source, e) from e
    if not found:
        raise StoreError(f"{source} contains no export (no <fingerprint>/{INDEX_NAME})")
    return sorted(found)


def _is_export(folder: Path) -> bool:
    """Return whether a model was exported to a folder. PermissionError if that cannot be seen.

    `Path.glob` leaves out what it may not read.
    """
    try:
        return (folder / INDEX_NAME).exists()
    except PermissionError:
        if _MODEL.fullmatch(folder.name):
            raise
        return False  # such as `lost+found`


def import_model(
    source: Path, root: Path, ssd_gib: float | None = None, progress: Progress = iter
) -> ImportReport:
    """Add the exported model in the folder `source` to the ssd_dir `root`.

    `ssd_gib`: the size of a new directory, that of the engine which will use it; None: its default.
    Raises StoreInUseError; FormatError for a store of another model, layout or generation;
    StoreError. Nothing was changed then.
    """
    report = ImportReport(str(source))
    with _no_export_to(source):
        index = ExportIndex.read(source)
        try:
            directory = _open(index.header, root, ssd_gib)
        except ConfigError as e:  # names a key of an engine
            raise StoreError(str(e).partition(": ")[2]) from e
        except OSError as e:
            raise StoreError(f"cannot import to {root}: {e}") from e
        try:
            report.path = str(directory.path)
            # First: what was cleared there must not be found here, whenever this ends.
            Clearings.in_folder(directory.path).raise_to(index.header.cleared_salts)
            _import_learned(source, directory.path)
            _Import(directory, index, report).run(source, progress)
        except (StoreError, OSError) as e:
            report.stopped = str(e)
        finally:
            directory.close()
    return report


class _Import:
    """An import under way, into an open directory."""

    def __init__(self, directory: SsdDirectory, index: ExportIndex, report: ImportReport) -> None:
        self._directory, self._report = directory, report
        self._artifacts = _by_recency(index.artifacts)
        self._pool = SlotPool(Tier.SSD, directory.geometry)
        chunk_tokens = directory.journal.meta.description.get("chunk_tokens")
        known = chunk_tokens if isinstance(chunk_tokens, int) and chunk_tokens > 0 else 0
        self._index = PrefixIndex(known or index.header.chunk_tokens, offer=lambda artifact: None)
        self._left_out: set[bytes] = set()
        """Chunks whose prefix-proportional state found no room: nothing after them is of use."""
        self._fd = directory.files[0].fd
        self._batch: list[JournalRow] = []
        self._batch_bytes = 0
        largest = max(directory.geometry.stride_bytes.values())
        # Page-aligned for O_DIRECT, and whole blocks.
        self._buffer = np.frombuffer(mmap.mmap(-1, largest), np.uint8)

    def run(self, source: Path, progress: Progress) -> None:
        self._adopt_stored()
        with SegmentReader(source) as reader:
            for artifact in progress(self._artifacts):
                self._add(artifact, reader)
                if self._batch_bytes >= _BATCH_BYTES:
                    self._commit()
        self._commit()

    def _adopt_stored(self) -> None:
        """Learn what the directory has, as an engine does that starts."""
        refused = []
        for row in self._directory.journal.load():
            ref = SlotRef(Tier.SSD, row.state_type, row.slot, row.generation)
            chunk = row.chunk
            if self._pool.adopt(ref):
                place = chunk.key, chunk.parent, chunk.start, chunk.end, row.size_bytes, ref
                if self._index.adopt(*place) is not None:
                    continue
                self._pool.release(ref)
            refused.append(row.id)
        if refused:  # they contradict others, and their slots may be taken now
            self._directory.journal.forget(refused)

    def _add(self, artifact: ExportedArtifact, reader: SegmentReader) -> None:
        report, kind = self._report, artifact.state_type
        node = self._index.nodes.get(ChunkKey(artifact.chunk))
        if node is not None and kind in node.artifacts:
            report.present += 1
            return
        if {artifact.parent, artifact.chunk} & self._left_out:
            self._leave_out(artifact)
            return
        data = self._buffer[: artifact.size_bytes]
        reason = self._misfit(artifact) or _read_problem(reader, artifact, data)
        if reason:
            report.bad.append(BadArtifact(artifact.chunk.hex(), kind.value, reason))
            return
        before = self._index.nodes.get(ChunkKey(artifact.parent))
        continued = before.artifacts.get(kind) if before is not None else None
        ref = self._pool.take(kind, None if continued is None else continued.ssd)
        if ref is None:
            self._leave_out(artifact)
            return
        chunk = artifact.range
        place = chunk.key, chunk.parent, chunk.start, chunk.end, artifact.size_bytes, ref
        if self._index.adopt(*place) is None:
            self._pool.release(ref)
            reason = "it contradicts what is stored of its chain"
            report.bad.append(BadArtifact(artifact.chunk.hex(), kind.value, reason))
            return
        self._write(ref, artifact.size_bytes)
        when, uses = artifact.last_access, artifact.reuse_count
        self._batch.append(
            JournalRow(
                chunk, kind, ref.slot, ref.generation, len(data), artifact.checksum, when, uses
            )
        )
        self._batch_bytes += len(data)

    def _misfit(self, artifact: ExportedArtifact) -> str | None:
        """Return why no store could have such an artifact."""
        largest = self._directory.geometry.stride_bytes.get(artifact.state_type, 0)
        if artifact.start >= artifact.end or artifact.size_bytes > largest:
            return "its line of the index is malformed"
        return None

    def _leave_out(self, artifact: ExportedArtifact) -> None:
        self._report.no_room += 1
        if artifact.state_type.family is Family.PREFIX:
            self._left_out.add(artifact.chunk)

    def _write(self, ref: SlotRef, size_bytes: int) -> None:
        """Write the buffer to a slot. Raises OSError."""
        done, size = 0, padded(size_bytes)
        self._buffer[size_bytes:size] = 0
        offset = self._directory.geometry.offset(ref.state_type, ref.slot)
        while done < size:
            done += os.pwrite(self._fd, self._buffer.data[done:size], offset + done)

    def _commit(self) -> None:
        """List what was written in the journal, once it is on the disk."""
        if not self._batch:
            return
        try:
            self._directory.sync()
        except TransferError as e:
            raise StoreError(str(e)) from e
        self._directory.journal.record(self._batch)
        self._report.artifacts += len(self._batch)
        self._report.bytes += self._batch_bytes
        self._batch, self._batch_bytes = [], 0


def _open(header: ExportHeader, root: Path, ssd_gib: float | None) -> SsdDirectory:
    """Open the model's directory, or make it; nothing of another model is deleted for it."""
    if is_model_directory(root):
        raise StoreError(f"{root} is one model's directory; name the ssd_dir that it is in")
    path = model_directory(root, header.fingerprint)
    if is_model_directory(path):
        try:
            directory = SsdDirectory.open_existing(path)
        except UnfinishedDirectoryError:
            directory = _make(header, root, ssd_gib)
    else:
        directory = _make(header, root, ssd_gib)
    try:
        _require_same(directory, header)
        if directory.is_outdated:  # all that it lists is from before a reset
            directory.journal.clear(directory.generations.latest.tag)
    except BaseException:
        directory.close()
        raise
    return directory


def _require_same(directory: SsdDirectory, header: ExportHeader) -> None:
    meta, path = directory.journal.meta, directory.path
    if meta.fingerprint != header.fingerprint:
        raise FormatError(f"{path} holds state of another model")
    if dict(meta.geometry.stride_bytes) != header.slot_bytes:
        raise FormatError(f"{path} has slots of other sizes: {header.slot_bytes} were exported")
    if directory.generations.latest.tag != header.store_generation.tag:
        raise FormatError(
            f"{path} and the exported store were not reset together, so their weights may differ: "
            "import into another ssd_dir, or delete that directory if its state is not needed"
        )


def _make(header: ExportHeader, root: Path, ssd_gib: float | None) -> SsdDirectory:
    """Make a model's directory of the exported store's generation, or go on with making it."""
    return SsdDirectory.open(
        root,
        header.fingerprint,
        header.slot_bytes,
        int(ssd_gib_of(ssd_gib, root) * GIB),
        header.description,
        keep_unused=True,
        generation=header.store_generation,
    )


@contextmanager
def _no_export_to(source: Path) -> Iterator[None]:
    """Keep an export to the same folder from beginning.

    StoreInUseError while one runs, StoreError if that cannot be seen.
    """
    lock = source / LOCK_NAME
    with ExitStack() as held:
        try:
            is_there = not lock.is_symlink() and lock.is_file()  # a copy may lack it
            is_shared = held.enter_context(shared(lock)) if is_there else True
        except OSError as e:
            raise unreadable(lock, e) from e
        if not is_shared:
            raise StoreInUseError(f"{source} is being written by an export; wait for its end")
        yield


def _by_recency(artifacts: Sequence[ExportedArtifact]) -> list[ExportedArtifact]:
    """Sort chains by their last use, the latest first, and each from its beginning.

    A chunk's prefix-proportional state comes before its checkpoint, which is of no use alone.
    """
    used: dict[bytes, float] = {}
    for x in sorted(artifacts, key=lambda x: x.start, reverse=True):
        when = used[x.chunk] = max(used.get(x.chunk, 0.0), x.last_access)
        used[x.parent] = max(used.get(x.parent, 0.0), when)
    return sorted(
        artifacts, key=lambda x: (-used[x.chunk], x.start, x.state_type.family is not Family.PREFIX)
    )


def _read_problem(
    reader: SegmentReader,
    artifact: ExportedArtifact,
    into: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> str | None:
    try:
        return reader.read(artifact, into)
    except TransferError as e:
        return str(e)


def _import_learned(source: Path, path: Path) -> None:
    """Take over what was learned, where nothing was; an engine checks if it is for its machine."""
    if (path / LEARNED_NAME).exists():
        return
    try:
        content = read_private(source / LEARNED_NAME, MAX_LEARNED_BYTES)
        CostProfile.from_json(content)
    except (OSError, ValueError):  # none, or damaged: it is learned anew
        return
    replace_private(path / LEARNED_NAME, content)


def as_text(report: ImportReport) -> str:
    """Return the report for people."""
    lines = [
        f"{report.source} -> {report.path}: {report.artifacts:,} artifacts imported, "
        f"{size_text(report.bytes)}; {report.present:,} were there already"
    ]
    if report.no_room:
        lines.append(f"  no room for {report.no_room:,}, the least recently used")
    lines += [f"  BAD {bad.state_type} {bad.id}: {bad.reason}" for bad in report.bad]
    if report.bad:
        lines.append("  left out; copy or export them again")
    if report.stopped:
        lines.append(f"  stopped: {report.stopped}. What was imported stays; run it again to go on")
    return "\n".join(lines)
