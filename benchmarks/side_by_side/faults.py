"""Breaks what contestants depend on, and looks at the next answers.

A fault of stored state has a control: without the fault the first prompt must be restored. If it is
not, there was nothing that the fault could break, and the outcome says so.
A full disk needs a file system of its own, so that fault is run by root only.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.side_by_side.contestants import DISK_GIB
from benchmarks.side_by_side.environments import EnvironmentFailedError, run_command
from benchmarks.side_by_side.rows import Outcome, Row
from benchmarks.side_by_side.work import SETTLE_S, Arena, Reference
from examples.serving import Reply, Server, logprob_distance

HANG_S = 120.0
_CORRUPTED_BYTES = 64
_CORRUPTED_EVERY = 64 << 10


def run_fault(name: str, arena: Arena, reference: Reference, row: Row) -> Outcome:
    """Break one thing after the rounds; return what the next answer was. It ends the processes."""
    try:
        return FAULTS[name](arena, reference, row)
    except EnvironmentFailedError:
        traceback.print_exc()
        return Outcome.NOT_RUN
    except Exception:
        traceback.print_exc()
        return Outcome.ERROR
    finally:
        _end(arena)


def _process_killed(arena: Arena, reference: Reference, row: Row) -> Outcome:
    if not arena.contestant.services(arena.place):
        return Outcome.NO_SUCH
    _start(arena)
    control = _control(arena, row, reference.answer(0), arena.server.reset_prefix_cache)
    if control is not Outcome.RESTORED:
        return control
    arena.server.reset_prefix_cache()
    arena.kill_services()
    return _outcome(arena, row, reference.answer(0))


def _file_corrupted(arena: Arena, reference: Reference, row: Row) -> Outcome:
    if not arena.contestant.has_files:
        return Outcome.NO_SUCH

    def stop() -> None:
        """Stop the services, too: only the files are left."""
        arena.stop()
        arena.stop_services()

    control = _control(arena, row, reference.answer(0), stop)
    if control is not Outcome.RESTORED:
        return control
    stop()
    for path in arena.place.folder.rglob("*"):
        # Small files are indexes and locks.
        if path.is_file() and path.stat().st_size >= 1 << 20:
            _corrupt(path)
    _start(arena)
    return _outcome(arena, row, reference.answer(0))


def _other_weights(arena: Arena, reference: Reference, row: Row) -> Outcome:
    """Change the weights where they are: many caches know a model by its path."""
    control = _control(arena, row, reference.answer(0), arena.stop)
    if control is not Outcome.RESTORED:
        return control
    arena.stop()
    _change_weights(arena.checkpoint)
    log = arena.folder / "other-weights.log"
    try:
        with Server(arena.checkpoint, log, None, arena.engine_args) as other:
            right = other.complete(arena.case.prompt(0), 8)
        _start(arena)
        return _outcome(arena, row, right)
    finally:
        _end(arena)
        _change_weights(arena.checkpoint)


def _disk_full(arena: Arena, reference: Reference, row: Row) -> Outcome:
    """Start with an empty disk, fill it, ask for a prompt, and for the same again."""
    if not arena.contestant.has_files:
        return Outcome.NO_SUCH
    _end(arena)
    files, image = arena.place.folder, arena.folder / "disk.image"
    with image.open("wb") as file:
        file.truncate(2 * DISK_GIB << 30)
    run_command("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    run_command("mount", "-o", "loop", str(image), str(files))
    try:
        _start(arena)
        space = os.statvfs(files)
        with (files / "ballast").open("wb") as file:
            # The file system needs some blocks for the file's own list of blocks.
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (1 << 20))
        first = _outcome(arena, row, reference.answer(0))
        if first is not Outcome.COMPUTED:
            return first
        time.sleep(SETTLE_S)
        arena.server.reset_prefix_cache()
        return _outcome(arena, row, reference.answer(0))
    finally:
        _end(arena)
        subprocess.run(["umount", "-l", str(files)], check=False)
        image.unlink()


FAULTS: dict[str, Callable[[Arena, Reference, Row], Outcome]] = {
    "process-killed": _process_killed,
    "other-weights": _other_weights,
    "disk-full": _disk_full,
    "file-corrupted": _file_corrupted,
}
"""In the order in which they can be run: the last leaves the files broken."""


def _start(arena: Arena) -> None:
    """Start what does not run."""
    if not arena.services:
        arena.start_services()
    arena.start()


def _end(arena: Arena) -> None:
    arena.server.kill()
    arena.kill_services()


def _control(arena: Arena, row: Row, right: Reply, forget: Callable[[], object]) -> Outcome:
    """Ask for the first prompt after `forget`, which leaves no more than the fault will.

    If it is computed, it has been stored now: it is asked for once more. Return RESTORED, or how
    that failed.
    """
    for _ in range(2):
        forget()
        _start(arena)
        outcome = _outcome(arena, row, right)
        if outcome is not Outcome.COMPUTED:
            return outcome
        time.sleep(SETTLE_S)
    return Outcome.NOTHING_KEPT


def _outcome(arena: Arena, row: Row, right: Reply) -> Outcome:
    """Ask for the first prompt; say what comes."""
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(arena.server.complete, arena.case.prompt(0), 8)
    try:
        reply = asked.result(HANG_S)
    except TimeoutError:
        return Outcome.HANG
    except Exception:
        traceback.print_exc()
        return Outcome.ERROR
    finally:
        pool.shutdown(wait=False)
    if logprob_distance(right, reply) > row.tolerance:
        return Outcome.WRONG
    return Outcome.RESTORED if reply.cached_tokens else Outcome.COMPUTED


def _corrupt(path: Path) -> None:
    """Invert some bytes in the middle of every 64 KiB that a file has; its holes stay holes."""
    with path.open("r+b") as file:
        for start, end in _written_ranges(file.fileno()):
            for at in range(start, end, _CORRUPTED_EVERY):
                middle = (at + min(at + _CORRUPTED_EVERY, end)) // 2
                found = os.pread(file.fileno(), _CORRUPTED_BYTES, middle)
                os.pwrite(file.fileno(), bytes(byte ^ 0xFF for byte in found), middle)


def _written_ranges(fd: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of what is no hole; preallocated space is one until it is written."""
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data from there on
                raise
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _change_weights(checkpoint: Path) -> None:
    """Turn the sign of every value projection: other weights of the same shape. Twice: none."""
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    changed = [name for name in tensors if "v_proj" in name] or list(tensors)[:1]
    save_file(
        {name: -t if name in changed else t for name, t in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
