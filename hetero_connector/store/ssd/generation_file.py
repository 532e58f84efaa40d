"""The generation of a store, kept so that a reset outlives a kill.

The file is allocated when it is made and rewritten in place, so a full disk cannot refuse a
reset, except where the file system copies on write (btrfs, zfs). It has two blocks that are
written in turn: one that was cut short, or is damaged, leaves the other.

    block (4 KiB): magic, version, sequence, fleet, knows_fleet, private, digest of these

Where no block can be read it is not known what was reset: the store then gets a private generation
of its own, under which no earlier state is found.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
from pathlib import Path

from hetero_connector.artifacts.generation import FIRST, PRIVATE_BYTES, Generation

logger = logging.getLogger("vllm.heterocache")

GENERATION_NAME = "generation"
_RECORD = struct.Struct(f"<4sBQQ?{PRIVATE_BYTES}s")
_MAGIC, _VERSION = b"HCGN", 1
_DIGEST_BYTES = 16
_BLOCK_BYTES = 4096
_NOBODY = bytes(PRIVATE_BYTES)


class GenerationFile:
    """The two blocks. Made by `open`; used by one thread at a time. Raises OSError."""

    def __init__(self, path: Path, fd: int, sequence: int, found: Generation) -> None:
        self.path = path
        self.found = found
        """The generation it held when it was opened."""
        self._fd = fd
        self._sequence = sequence

    @classmethod
    def open(cls, path: Path, *, is_new: bool) -> GenerationFile:
        """Open the file, or make it. `is_new`: nothing is stored in its directory yet."""
        if not path.exists():
            _make(path, FIRST if is_new else FIRST.after_own_reset())
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            sequence, found = _latest(fd)
            if found is None:
                logger.warning("%s is damaged: nothing that was stored before is used", path)
                opened = cls(path, fd, sequence, FIRST.after_own_reset())
                opened.write(opened.found)
                return opened
            return cls(path, fd, sequence, found)
        except BaseException:
            os.close(fd)
            raise

    def write(self, generation: Generation) -> None:
        """Keep `generation` in place of the last one; it survives a power cut from now.

        After an error the block of the last one is intact, also if this is called again.
        """
        sequence = self._sequence + 1
        block = _encode(sequence, generation)
        written = os.pwrite(self._fd, block, _BLOCK_BYTES * (sequence % 2))
        if written != len(block):
            raise OSError(f"{written} of {len(block)} bytes were written")
        os.fdatasync(self._fd)
        self._sequence = sequence

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_generation(path: Path) -> Generation:
    """Return the generation that the file holds, for tools. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _latest(fd)[1] or FIRST.after_own_reset()
    finally:
        os.close(fd)


class GenerationKeeper:
    """Holds the latest generation and has its file written. Thread-safe.

    A thread writes the file while there is something to write: a disk that hangs blocks no other
    thread, and a write that ends late is followed by what was wanted since, never the reverse.
    """

    def __init__(self, file: GenerationFile | None = None) -> None:
        """`file`: None for a store without an SSD, which ends with its process."""
        self._file = file
        self._changed = threading.Condition()
        self._latest = self._kept = FIRST if file is None else file.found
        self._problem: OSError | None = None
        self._is_writing = False
        self._is_closed = False

    @property
    def latest(self) -> Generation:
        """The generation to store and to restore under."""
        return self._latest

    @property
    def kept(self) -> Generation:
        """The generation that the next process would find."""
        return self._kept

    def start_own_reset(self) -> Generation:
        """Return the generation after the engine's own reset, at once; see `wait_kept`."""
        with self._changed:
            parted = self._latest.after_own_reset()
            self._want(parted)
            return parted

    def note_fleet(self, fleet: int, asked_in: Generation) -> None:
        """Note that the fleet's number was `fleet` when it was asked, in `asked_in`.

        An answer to a question from before a reset says nothing about after it: it is dropped.
        """
        with self._changed:
            if asked_in is self._latest:
                self._want(asked_in.with_fleet(fleet))

    def wait_known(self, timeout_s: float) -> bool:
        """Wait until the fleet's number at the last reset is known; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._latest.knows_fleet, timeout_s)

    def wait_kept(self, timeout_s: float) -> bool:
        """Wait until the latest is kept. False, saying why in the log, if it is not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing, timeout_s)
            if self._kept is self._latest:
                return True
            problem = self._problem or f"a write has not ended after {timeout_s:g} s"
        assert self._file is not None
        logger.error(
            "a reset will not outlive this process: %s cannot be written (%s). This process uses "
            "nothing from before it; reset again, or delete that directory before the next start",
            self._file.path,
            problem,
        )
        return False

    def close(self) -> None:
        """Close the file, at once or when its last write has ended. Idempotent."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            if self._file is not None and not self._is_writing and not was_closed:
                self._file.close()

    def _want(self, generation: Generation) -> None:
        """Keep it; try again where it was wanted before and could not be kept."""
        if generation != self._latest:
            self._latest = generation
            self._changed.notify_all()
        if self._file is None:
            self._kept = self._latest
        elif not (self._kept is self._latest or self._is_writing or self._is_closed):
            self._is_writing = True
            threading.Thread(target=self._write, name="generation", daemon=True).start()

    def _write(self) -> None:
        assert self._file is not None
        while True:
            wanted, problem = self._latest, None
            try:
                self._file.write(wanted)
            except OSError as error:
                problem = error
            with self._changed:
                self._problem = problem
                if problem is None:
                    self._kept = wanted
                if self._latest is wanted or self._is_closed:
                    self._is_writing = False
                    if self._is_closed:
                        self._file.close()
                    self._changed.notify_all()
                    return


def _make(path: Path, generation: Generation) -> None:
    """Make the file whole or not at all: a kill leaves none that holds nothing."""
    made = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        made.unlink()
    fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, 2 * _BLOCK_BYTES)
        GenerationFile(path, fd, 0, generation).write(generation)
        os.fsync(fd)
    finally:
        os.close(fd)
    made.rename(path)


def _encode(sequence: int, generation: Generation) -> bytes:
    private = generation.private or _NOBODY
    fields = (sequence, generation.fleet, generation.knows_fleet, private)
    record = _RECORD.pack(_MAGIC, _VERSION, *fields)
    return (record + _digest(record)).ljust(_BLOCK_BYTES, b"\0")


def _latest(fd: int) -> tuple[int, Generation | None]:
    """Sequence and content of the block that was written last; (0, None) if there is none."""
    found = [_decode(os.pread(fd, _BLOCK_BYTES, at * _BLOCK_BYTES)) for at in range(2)]
    known = [x for x in found if x is not None]
    return max(known, key=lambda x: x[0], default=(0, None))


def _decode(block: bytes) -> tuple[int, Generation] | None:
    record, rest = block[: _RECORD.size], block[_RECORD.size :]
    if len(record) < _RECORD.size or rest[:_DIGEST_BYTES] != _digest(record):
        return None
    magic, version, sequence, fleet, knows_fleet, private = _RECORD.unpack(record)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return sequence, Generation(fleet, b"" if private == _NOBODY else private, knows_fleet)


def _digest(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=_DIGEST_BYTES).digest()
