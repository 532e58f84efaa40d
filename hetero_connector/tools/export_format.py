"""The files of an exported store, and reading them with suspicion.

    TARGET/<fingerprint, 16 hex>/segment-000001   bytes of artifacts, one after the other
                                /segment-000002
                                /learned.json     what the store's engines learned
                                /index            where each artifact lies; written last
                                /lock             held by an export, shared by imports

A segment is never changed once the index names it, so that copies of a later export move only new
segments. The index is JSON lines: a header, a line for each artifact, and a digest of all before
it. Nothing in it names a file: a segment is a number.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from hetero_connector.artifacts.generation import PRIVATE_BYTES, Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange
from hetero_connector.errors import FormatError, StoreError, TransferError
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SLOT_ALIGNMENT
from hetero_connector.store.ssd.private_files import (
    PRIVATE_FLAGS,
    PRIVATE_MODE,
    replace_private,
    sync_folder,
)
from hetero_connector.transfer.checksum import checksum

INDEX_NAME = "index"
EXPORT_FORMAT = 1
"""Version of the files' meaning."""
_SEGMENT = re.compile(r"segment-(\d{6,9})")
_SEGMENT_BYTES = 256 << 20
_MAX_HEADER_BYTES = 32 << 20
_MAX_LINE_BYTES = 1024
_SALT = re.compile(r"[0-9a-f]{32}")
"""The digest that stands for a salt."""

_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
MAX_TOKENS, MAX_TIME_S = 1 << 53, 1e11
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 40)]
_Time = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TIME_S)]


class ExportedArtifact(msgspec.Struct, frozen=True, array_like=True):
    """An artifact's line of the index."""

    chunk: _Key
    parent: _Key
    start: _Count
    end: _Count
    state_type: StateType
    size_bytes: _Size
    checksum: _Key
    last_access: _Time
    """Unix time, seconds."""
    reuse_count: _Count
    segment: _Count
    offset: _Count

    @property
    def id(self) -> ArtifactId:
        """The artifact's name."""
        return ArtifactId(ChunkKey(self.chunk), self.state_type)

    @property
    def range(self) -> ChunkRange:
        """The artifact's chunk."""
        return ChunkRange(ChunkKey(self.chunk), ChunkKey(self.parent), self.start, self.end)

    def problem(self, data: npt.NDArray[np.uint8]) -> str | None:
        """Return what is wrong with its bytes; None if they are intact."""
        if checksum(data, self.id.seed) != self.checksum:
            return "its bytes do not match its checksum"
        return None


class _Generation(msgspec.Struct, frozen=True):
    fleet: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    private: Annotated[bytes, msgspec.Meta(max_length=PRIVATE_BYTES)]
    knows_fleet: bool


class _Version(msgspec.Struct):
    """The part of the header that every version has."""

    format: int


class ExportHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the index."""

    format: int = EXPORT_FORMAT
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
    chunk_tokens: _Size
    slot_bytes: dict[StateType, _Size]
    description: dict[str, Any]
    """The journal's: for people, and for `heterocache explain`."""
    generation: _Generation
    cleared_salts: dict[str, _Count]

    @classmethod
    def of(
        cls,
        fingerprint: bytes,
        slot_bytes: Mapping[StateType, int],
        description: Mapping[str, Any],
        generation: Generation,
        cleared_salts: Mapping[str, int],
    ) -> ExportHeader:
        """Describe a store. Raises KeyError or ValueError if its chunk size is unknown."""
        return cls(
            fingerprint=fingerprint,
            chunk_tokens=int(description["chunk_tokens"]),
            slot_bytes=dict(slot_bytes),
            description=dict(description),
            generation=_Generation(generation.fleet, generation.private, generation.knows_fleet),
            cleared_salts=dict(cleared_salts),
        )

    @property
    def store_generation(self) -> Generation:
        """The generation of every artifact."""
        x = self.generation
        return Generation(x.fleet, x.private, x.knows_fleet)


class _End(msgspec.Struct):
    artifacts: int
    xxh3: str
    """The digest of all lines before, in hex."""


@dataclass(frozen=True)
class ExportIndex:
    """The content of the index."""

    header: ExportHeader
    artifacts: list[ExportedArtifact]

    def write(self, folder: Path) -> None:
        """Write the file whole or not at all. Raises OSError."""
        lines = [msgspec.json.encode(x) for x in (self.header, *self.artifacts)]
        content = b"\n".join([*lines, b""])
        end = _End(len(self.artifacts), xxhash.xxh3_128_hexdigest(content))
        replace_private(folder / INDEX_NAME, content + msgspec.json.encode(end) + b"\n")
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> ExportIndex:
        """Read it. Raises FormatError for another version, StoreError for anything unreadable."""
        path = folder / INDEX_NAME
        try:
            with _open(path) as file:
                return cls._read(path, file)
        except FileNotFoundError as e:
            raise StoreError(
                f"{folder} has no {INDEX_NAME}: the export, or its copy, has not ended"
            ) from e
        except OSError as e:
            raise unreadable(path, e) from e
        except (ValueError, RecursionError) as e:
            raise StoreError(f"{path} is damaged ({e}): copy the export again") from e

    @classmethod
    def _read(cls, path: Path, file: BinaryIO) -> ExportIndex:
        digest = xxhash.xxh3_128()
        first = file.readline(_MAX_HEADER_BYTES)
        version = msgspec.json.decode(first, type=_Version).format
        if version != EXPORT_FORMAT:
            raise FormatError(
                f"{path} has format {version}, this release reads {EXPORT_FORMAT}: export it "
                "again with this release"
            )
        header = msgspec.json.decode(first, type=ExportHeader)
        _check(header)
        digest.update(first)
        decoder = msgspec.json.Decoder(ExportedArtifact)
        artifacts: list[ExportedArtifact] = []
        while (line := file.readline(_MAX_LINE_BYTES)).startswith(b"["):
            artifacts.append(decoder.decode(line))
            digest.update(line)
        end = msgspec.json.decode(line, type=_End)
        if (end.artifacts, end.xxh3) != (len(artifacts), digest.hexdigest()) or file.read(1):
            raise ValueError("it does not match its digest")
        return cls(header, artifacts)


def _check(header: ExportHeader) -> None:
    sizes = header.slot_bytes
    if not sizes or any(n % SLOT_ALIGNMENT for n in sizes.values()):
        raise ValueError(f"impossible slots: {sizes}")
    if len(header.generation.private) not in (0, PRIVATE_BYTES):
        raise ValueError("a generation of the wrong length")
    if not all(_SALT.fullmatch(name) and n for name, n in header.cleared_salts.items()):
        raise ValueError("impossible salts")  # an engine would not start with them


class SegmentReader:
    """Reads artifacts of an exported store. Use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = -1
        self._file: BinaryIO | None = None

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, artifact: ExportedArtifact, into: npt.NDArray[np.uint8]) -> str | None:
        """Read an artifact into `[size_bytes] uint8`; return what is wrong with it, None if intact.

        Raises TransferError if it cannot be read.
        """
        try:
            file = self._segment(artifact.segment)
            file.seek(artifact.offset)
            got = file.readinto(into.data)  # type: ignore[attr-defined]
        except FileNotFoundError as e:
            raise TransferError(f"{segment_name(artifact.segment)} is missing") from e
        except OSError as e:
            problem = f"{segment_name(artifact.segment)} cannot be read: {e.strerror}"
            raise TransferError(e.errno, problem) from e
        if got != len(into):
            raise TransferError(f"{segment_name(artifact.segment)} is too short")
        return artifact.problem(into)

    def _segment(self, number: int) -> BinaryIO:
        if self._file is None or self._number != number:
            file = _open(self._folder / segment_name(number))
            if self._file is not None:
                self._file.close()
            self._number, self._file = number, file
        return self._file


class SegmentWriter:
    """Writes new segments, numbered from `first` on. Use it in a `with` block. Raises OSError."""

    def __init__(self, folder: Path, first: int) -> None:
        self._folder = folder
        self._next = first
        self._file: BinaryIO | None = None
        self._written = 0

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, data: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """Append an artifact's bytes; return its segment and offset."""
        if self._file is None or self._written + len(data) > _SEGMENT_BYTES:
            self.finish()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PRIVATE_FLAGS
            path = self._folder / segment_name(self._next)
            self._file = open(os.open(path, flags, PRIVATE_MODE), "wb")  # noqa: SIM115
            self._written, self._next = 0, self._next + 1
        place = self._next - 1, self._written
        self._file.write(data.data)
        self._written += len(data)
        return place

    def finish(self) -> None:
        """Have what was written survive a power cut."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error for a part of an export that cannot be read."""
    text = f"{path} cannot be read: {error}"
    if isinstance(error, PermissionError):
        text += "; its files belong to another user: change their owner to the user that runs "
        text += "this, as with `rsync --chown`"
    return StoreError(text)


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{number:06}"


def segments(folder: Path) -> Iterator[int]:
    """Yield the numbers of the segments that lie in a folder. Raises OSError."""
    for name in os.listdir(folder):
        if found := _SEGMENT.fullmatch(name):
            yield int(found[1])


def remove_segments(folder: Path, keep: Iterable[int]) -> None:
    """Delete all other segments. Raises OSError."""
    for number in set(segments(folder)) - set(keep):
        (folder / segment_name(number)).unlink(missing_ok=True)


def _open(path: Path) -> BinaryIO:
    """Open a regular file to read it; no link, no pipe. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | PRIVATE_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file")
    return open(fd, "rb")
