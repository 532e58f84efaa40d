"""Checks that need another process: one arena in two processes, and compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from heterocache_cuda.mover import Mode

from benchmarks.gpu_check.exactness import moves_of
from benchmarks.gpu_check.setting import Result, Setting, Verdict, verdict

_PAGE = 4096
_PAGES = 8
_TIMEOUT_S = 240.0
_FOUND = 99
"""compute-sanitizer's exit status if it found an error."""
TOOLS = ("memcheck", "racecheck")


def check_two_processes(setting: Setting) -> Result:
    """Save here, load and save again in a second process, and look at what it wrote."""
    pages = setting.random_bytes((_PAGES + 1) * _PAGE, 12).view(_PAGES + 1, _PAGE)
    setting.arena.view[: 2 * _PAGES * _PAGE] = 0
    move_all(setting, Mode.SAVE, pages, first=0)
    handle = setting.arena.handle
    command = [sys.executable, "-m", "benchmarks.gpu_check.second_process"]
    command += [handle.path, str(handle.size_bytes), setting.device.type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Result(Verdict.FAIL, f"the second process failed: {lines[-1] if lines else done}")
    written = setting.host[_PAGES * _PAGE : 2 * _PAGES * _PAGE].view(_PAGES, _PAGE)
    exact = torch.equal(written, pages[1:].flip(0).cpu())
    text = "exact" if exact else "other bytes than the second process loaded"
    return Result(verdict(exact), f"saved, loaded and saved again through one memfd: {text}")


def move_all(setting: Setting, mode: Mode, pages: torch.Tensor, first: int) -> None:
    """Move all pages but page 0, and wait. `first`: byte of the arena where they begin."""
    addresses = setting.arena.address + first + np.arange(_PAGES, dtype=np.int64) * _PAGE
    ids = np.arange(1, _PAGES + 1, dtype=np.int64)[:, None]
    moves, _ = moves_of([pages], ids, addresses)
    mover = setting.mover()
    mover.launch(mode, moves, mover.upload(moves))
    torch.cuda.synchronize()


def turn_pages_around(setting: Setting) -> None:
    """Load the pages of the first process, and save them after its own in reverse order."""
    pages = torch.zeros((_PAGES + 1, _PAGE), dtype=torch.uint8, device=setting.device)
    move_all(setting, Mode.LOAD, pages, first=0)
    pages[1:] = pages[1:].flip(0)
    torch.cuda.synchronize()
    move_all(setting, Mode.SAVE, pages, first=_PAGES * _PAGE)


def check_sanitizer(setting: Setting) -> Result:
    """Run the check of layouts under compute-sanitizer."""
    tool = _sanitizer()
    if tool is None:
        text = "compute-sanitizer is not installed (CUDA toolkit, package cuda-sanitizer)"
        return Result(Verdict.NOT_RUN, text)
    problems = []
    for kind in TOOLS:
        command = [tool, "--tool", kind, "--error-exitcode", str(_FOUND), sys.executable]
        command += ["-m", "benchmarks.gpu_check", "--small", "--no-files"]
        command += ["--only", "layouts"]
        # Each tensor an allocation of its own, or an access beyond one is not noticed.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
            )
        except subprocess.TimeoutExpired:
            problems.append(f"{kind}: no end after {_TIMEOUT_S:.0f} s")
            continue
        if done.returncode:
            said = [x for x in done.stdout.splitlines() if x.startswith("=====")]
            last = said[-1].strip("= ") if said else f"exit status {done.returncode}"
            problems.append(f"{kind}: {last}")
    return Result(verdict(not problems), "; ".join(problems) or f"{' and '.join(TOOLS)}: clean")


def _sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    default = Path("/usr/local/cuda/bin/compute-sanitizer")
    return found or (str(default) if default.is_file() else None)
