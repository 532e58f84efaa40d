"""Breaks what contestants depend on, and looks at the next answer."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.side_by_side.rows import Outcome, Row
from benchmarks.side_by_side.work import Arena
from examples.serving import Reply, Server, logprob_distance

HANG_S = 60.0
_CORRUPTED_BYTES = 64


def run_fault(name: str, arena: Arena, row: Row) -> Outcome:
    """Break one thing after the rounds; return what the next answer was. It ends the processes."""
    try:
        return FAULTS[name](arena, row)
    except Exception:
        traceback.print_exc()
        return Outcome.ERROR
    finally:
        arena.server.kill()
        arena.kill_services()


def _process_killed(arena: Arena, row: Row) -> Outcome:
    if not arena.services:
        return Outcome.NO_SUCH
    _restart(arena)
    right = arena.server.complete(arena.case.prompt(0), 8)
    arena.server.reset_prefix_cache()
    arena.kill_services()
    return _outcome(arena, row, right)


def _file_corrupted(arena: Arena, row: Row) -> Outcome:
    if not arena.contestant.has_files:
        return Outcome.NO_SUCH
    right = _answer_without_connector(arena, arena.checkpoint)
    arena.serve(arena.checkpoint)
    for path in arena.place.folder.rglob("*"):
        # Small files are indexes and locks.
        if path.is_file() and path.stat().st_size >= 1 << 20:
            _corrupt(path)
    _restart(arena)
    return _outcome(arena, row, right)


def _other_weights(arena: Arena, row: Row) -> Outcome:
    arena.server.kill()
    other = arena.folder / "other" / arena.checkpoint.name
    shutil.copytree(arena.checkpoint, other)
    _change_weights(other)
    right = _answer_without_connector(arena, other)
    arena.serve(other)
    _restart(arena)
    return _outcome(arena, row, right)


FAULTS: dict[str, Callable[[Arena, Row], Outcome]] = {
    "process-killed": _process_killed,
    "other-weights": _other_weights,
    "file-corrupted": _file_corrupted,
}
"""In the order in which they can be run: the last leaves the files broken."""


def _restart(arena: Arena) -> None:
    """Start what does not run."""
    if not arena.services:
        arena.start_services()
    arena.start()


def _answer_without_connector(arena: Arena, checkpoint: Path) -> Reply:
    reference = arena.reference
    with Server(checkpoint, reference.log_path, None, reference.engine_args) as server:
        return server.complete(arena.case.prompt(0), 8)


def _outcome(arena: Arena, row: Row, right: Reply) -> Outcome:
    """Ask for the first prompt; say what comes."""
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(arena.server.complete, arena.case.prompt(0), 8)
    try:
        reply = asked.result(HANG_S)
    except TimeoutError:
        return Outcome.HANG
    except Exception:
        return Outcome.ERROR
    finally:
        pool.shutdown(wait=False)
    if logprob_distance(right, reply) > row.tolerance:
        return Outcome.WRONG
    return Outcome.RESTORED if reply.cached_tokens else Outcome.COMPUTED


def _corrupt(path: Path) -> None:
    """Invert some bytes at four places of a file."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for part in range(4):
            file.seek(size * (2 * part + 1) // 8)
            found = file.read(_CORRUPTED_BYTES)
            file.seek(-len(found), 1)
            file.write(bytes(byte ^ 0xFF for byte in found))


def _change_weights(checkpoint: Path) -> None:
    """Turn the sign of every value projection: other weights of the same shape."""
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    changed = [name for name in tensors if "v_proj" in name] or list(tensors)[:1]
    save_file(
        {name: -t if name in changed else t for name, t in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
