"""What every benchmark shares: references (memcpy, dd), medians, tables, the JSON line."""

from __future__ import annotations

import json
import mmap
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
_DD_BLOCK = 4 * MIB
_READERS = 4


def timed(job: Callable[[], object]) -> float:
    """Seconds the job took."""
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


@dataclass
class Samples:
    """Seconds by what was measured."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.by_name.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.by_name[name])

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.by_name.items()}

    def paired_ratio(self, name: str, reference: str) -> float:
        """Median of the ratios of samples taken next to each other."""
        pairs = zip(self.by_name[name], self.by_name[reference], strict=True)
        return statistics.median(a / b for a, b in pairs)


class Memcpy:
    """One thread's plain copy of `size_bytes`: the least any restore could cost.

    Source and target are touched and mapped with huge pages where the kernel gives them,
    as the arena and the engine's pages are.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._source = touched(size_bytes)
        self._target = touched(size_bytes)

    def reused(self) -> float:
        """Seconds into memory that is mapped already."""
        return timed(lambda: np.copyto(self._target, self._source))

    def fresh(self) -> float:
        """Seconds into memory that the copy is the first to touch."""
        return timed(lambda: np.copyto(np.empty_like(self._source), self._source))


def touched(size_bytes: int) -> np.ndarray:
    """`[size_bytes] uint8` whose pages are mapped, huge ones if there are any."""
    mapping = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    memory[:] = 1
    return memory


class DirectDisk:
    """One file of `size_bytes` (rounded up to dd's block, 4 MiB), read and written O_DIRECT.

    `read_bandwidth` is dd: one read at a time into a small buffer, whose pages may lie
    anywhere. `limit` is what the device gives at best: reads side by side into huge pages.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "dd.reference"
        self._count = -(-size_bytes // _DD_BLOCK)
        self._memory: np.ndarray | None = None
        # Random bytes: a device that compresses or drops zeros would look too fast.
        self._path.write_bytes(os.urandom(self._count * _DD_BLOCK))
        os.sync()

    def read_bandwidth(self) -> float:
        """Bytes per second of reading the file."""
        return self._run(f"if={self._path}", "of=/dev/null", "iflag=direct")

    def limit(self) -> float:
        """Bytes per second of `_READERS` threads that read the file once, together."""
        if self._memory is None:
            self._memory = touched(self._count * _DD_BLOCK)
        view, blocks = self._memory.data, range(0, len(self._memory), _DD_BLOCK)
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)

        def read(start: int) -> None:
            if os.preadv(fd, [view[start : start + _DD_BLOCK]], start) != _DD_BLOCK:
                raise RuntimeError(f"a short read at {start}")

        try:
            with ThreadPoolExecutor(_READERS) as pool:
                return len(view) / timed(lambda: list(pool.map(read, blocks)))
        finally:
            os.close(fd)

    def write_bandwidth(self) -> float:
        """Bytes per second of writing it again, in place."""
        source = "if=/dev/zero"
        return self._run(source, f"of={self._path}", "oflag=direct", "conv=notrunc")

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    def _run(self, *arguments: str) -> float:
        command = ["dd", f"bs={_DD_BLOCK}", f"count={self._count}", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"}
        )
        told = re.search(r"copied, ([0-9.e-]+) s", done.stderr)
        if told is None:
            raise RuntimeError(f"dd did not tell its time: {done.stderr}")
        return self._count * _DD_BLOCK / float(told.group(1))


def machine_line() -> str:
    """What the figures were taken on."""
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    cpu = names[0].partition(": ")[2] if names else "unknown CPU"
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    return f"{cpu}, {os.cpu_count()} cores, load {load}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell; the first is left-aligned."""
    cells = [[str(x) for x in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def save(name: str, text: str, figures: Mapping[str, Any], details: Mapping[str, Any]) -> Path:
    """Write `results/<name>-<date>.{txt,json}`; returns the text's path."""
    RESULTS.mkdir(exist_ok=True)
    stem = f"{name}-{time.strftime('%Y-%m-%d')}"
    document = {"figures": figures, "machine": machine_line(), "details": details}
    (RESULTS / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    path = RESULTS / f"{stem}.txt"
    path.write_text(text + "\n")
    return path


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Four significant digits."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
