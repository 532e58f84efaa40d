"""The journal's values: rows, the meta table, and how both are read back with suspicion."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, SlotRef
from hetero_connector.errors import FormatError, StoreError
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.slot_geometry import SlotGeometry

FORMAT_VERSION = 2
WINDOW_REPLAY = "window_replay"
"""Key of a description: `REPLAY_EXACT` where the engine rebuilds windows by a replay, else why it
does not."""
REPLAY_EXACT = "exact"


class CorruptJournalError(StoreError):
    """The journal is not a readable SQLite file, or not a journal."""

    def __init__(self, path: Path, problem: object) -> None:
        super().__init__(
            f"journal {path} is damaged ({problem}); the next start of its engine moves it aside "
            "and starts empty"
        )


class UnreadableJournalError(StoreError):
    """The disk does not read or write a file of the journal: it, or this file, is broken."""


_MAX_BYTES = 1 << 60
_DIGEST = "digest"
_DIGESTED = ("format_version", "fingerprint", "slabs", "description", "created")


@dataclass(frozen=True, slots=True)
class JournalRow:
    """An artifact that is on SSD."""

    chunk: ChunkRange
    state_type: StateType
    slot: int
    generation: int
    size_bytes: int
    """Useful bytes, from the slot's first byte on."""
    checksum: bytes
    last_access: float
    """Unix time, seconds."""
    reuse_count: int = 0

    @property
    def id(self) -> ArtifactId:
        """The artifact's name."""
        return ArtifactId(self.chunk.key, self.state_type)

    @classmethod
    def of(cls, artifact: Artifact, ref: SlotRef, now: float) -> JournalRow:
        """An artifact whose bytes lie in that slot of the slab; `now`: Unix time, seconds."""
        assert artifact.checksum is not None
        return cls(
            artifact.node.chunk,
            artifact.state_type,
            ref.slot,
            ref.generation,
            artifact.size_bytes,
            artifact.checksum,
            now,
            artifact.uses,
        )


@dataclass(frozen=True)
class JournalMeta:
    """The model whose state the directory holds, and the layout."""

    fingerprint: bytes
    geometry: SlotGeometry
    description: Mapping[str, Any] = field(default_factory=dict)
    """For people and the tools: model name, dtype, chunk size, geometry. JSON values."""
    created: float = 0.0
    """Unix time, seconds."""

    def as_table(self) -> dict[str, str]:
        """The rows of the meta table."""
        cut = self.geometry
        slabs = {
            "count": cut.count,
            "slot_bytes": {t.value: n for t, n in cut.stride_bytes.items()},
            "zone_bytes": cut.zone_bytes,
            "zones_bytes": cut.zones_bytes,
        }
        table = {
            "format_version": str(FORMAT_VERSION),
            "fingerprint": self.fingerprint.hex(),
            "slabs": json.dumps(slabs),
            "description": json.dumps(dict(self.description), sort_keys=True, default=str),
            "created": str(self.created),
        }
        return table | {_DIGEST: meta_digest(table)}

    @classmethod
    def from_table(cls, table: Mapping[str, str]) -> JournalMeta:
        """Inverse of `as_table`. Raises the errors in `_UNREADABLE` if it is not one."""
        slabs = json.loads(table["slabs"])
        strides = {StateType(name): int(size) for name, size in slabs["slot_bytes"].items()}
        zones = int(slabs["zone_bytes"]), int(slabs["zones_bytes"])
        geometry = SlotGeometry(int(slabs["count"]), strides, *zones)
        if not (geometry.is_possible and geometry.size_bytes <= _MAX_BYTES):
            raise ValueError(f"impossible slots: {table['slabs']}")
        description = json.loads(table["description"])
        if not isinstance(description, dict):
            raise ValueError(f"a description that is no JSON object: {description!r:.80}")
        fingerprint = bytes.fromhex(table["fingerprint"])
        return cls(fingerprint, geometry, description, float(table["created"]))


_UNREADABLE = (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)


def meta_digest(table: Mapping[str, str]) -> str:
    """Return the digest that tells a damaged meta table from one of another model or version.

    Every format version has it over these rows, so that it can be checked before the version.
    """
    rows = json.dumps([table.get(key) for key in _DIGESTED], default=repr).encode()
    return hashlib.blake2b(rows, digest_size=16).hexdigest()


def parse_meta(path: Path, table: Mapping[str, str]) -> JournalMeta:
    """Read the meta table.

    Raises FormatError for another version, CorruptJournalError for anything unreadable.
    """
    version = table.get("format_version")
    if version is None:
        raise CorruptJournalError(path, "it names no format version")
    if table.get(_DIGEST) != meta_digest(table):
        raise CorruptJournalError(path, "its meta table does not match its digest")
    if version != str(FORMAT_VERSION):
        raise FormatError(
            f"{path} has format version {version}, this release writes {FORMAT_VERSION}; "
            "use another ssd_dir, or delete this directory"
        )
    try:
        return JournalMeta.from_table(table)
    except _UNREADABLE as e:
        raise CorruptJournalError(path, f"its meta table cannot be read: {e!r}") from e


RowValues = tuple[bytes, bytes, int, int, StateType, int, int, int, bytes, float, int]
"""A `JournalRow`'s values in the order of its columns: a million of them are read at start."""


def row_check(meta: JournalMeta) -> Callable[[tuple[Any, ...]], RowValues | None]:
    """Return the function that returns a row's values, or None if it makes no sense in `meta`."""
    cut = meta.geometry
    shapes = {t.value: (t, cut.num_slots(t), size) for t, size in cut.stride_bytes.items()}

    def check(values: tuple[Any, ...]) -> RowValues | None:
        chunk, parent, start, end, name, slot, generation, size, digest, when, reuse = values
        shape = shapes.get(name)
        if shape is None:
            return None
        kind, slots, slot_bytes = shape
        if (
            type(chunk) is type(parent) is type(digest) is bytes
            and len(chunk) == len(parent) == len(digest) == 16
            and type(start) is type(end) is type(slot) is int
            and type(generation) is type(size) is type(reuse) is int
            and 0 <= slot < slots
            and 0 < size <= slot_bytes
            and 0 <= start < end
            and generation >= 0
            and reuse >= 0
            and type(when) in (float, int)
            and isfinite(when)
        ):
            return chunk, parent, start, end, kind, slot, generation, size, digest, when, reuse
        return None

    return check


def parse_row(values: tuple[Any, ...], meta: JournalMeta) -> JournalRow | None:
    """The row, or None if it makes no sense in this layout."""
    checked = row_check(meta)(values)
    return None if checked is None else as_row(checked)


def as_row(values: RowValues) -> JournalRow:
    """The row of a row's values."""
    chunk, parent, start, end, kind, slot, generation, size, digest, when, reuse = values
    where = ChunkRange(ChunkKey(chunk), ChunkKey(parent), start, end)
    return JournalRow(where, kind, slot, generation, size, digest, float(when), reuse)


def layout_of(meta: JournalMeta) -> str:
    """For error messages."""
    return ", ".join(f"{t.value} of {n} bytes" for t, n in meta.geometry.stride_bytes.items())
