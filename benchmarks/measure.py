"""Common parts of the benchmarks: references (memcpy, dd), medians, tables, result files."""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.tables import table as table
from hetero_connector.transfer.checksum import checksum
from hetero_connector.units import MIB

RESULTS = Path(__file__).parent / "results"
WRITES_NOTHING = "BENCHMARKS_WRITE_NOTHING"
"""An environment variable: `publish` writes nothing where it is set."""
_DD_BLOCK = 4 * MIB
_READERS = 4
_NVIDIA = Path("/proc/driver/nvidia")


def timed(job: Callable[[], object]) -> float:
    """Return the seconds that the job took."""
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


@dataclass
class Samples:
    """Samples in seconds, by name."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.by_name.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.by_name[name])

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.by_name.items()}

    def paired_ratio(self, name: str, reference: str) -> float:
        """Return the median of the ratios of samples that were taken together."""
        pairs = zip(self.by_name[name], self.by_name[reference], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def paired_differences(self, name: str, reference: str) -> list[float]:
        """Return the differences of samples that were taken together; none without samples."""
        if name not in self.by_name:
            return []
        pairs = zip(self.by_name[name], self.by_name[reference], strict=True)
        return [a - b for a, b in pairs]


def error_of_median(values: Iterable[float]) -> float | None:
    """Return half of the 95 % confidence interval of the values' median; None for a few values.

    By ranks, so it supposes nothing of the noise: the median lies between two of the values.
    """
    ordered = sorted(values)
    first = math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2)
    return (ordered[-first] - ordered[first - 1]) / 2 if first >= 1 else None


class Memcpy:
    """A plain copy of `size_bytes` on one thread: the lower limit of a restore's cost.

    Source and target are touched, and on huge pages if the kernel has any, as the arena and the
    engine's pages are.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._source = touched(size_bytes)
        self._target = touched(size_bytes)

    def reused(self) -> float:
        """Return the seconds of a copy to memory that is already mapped."""
        return timed(lambda: np.copyto(self._target, self._source))

    def fresh(self) -> float:
        """Return the seconds of a copy to memory that was never touched."""
        return timed(lambda: np.copyto(np.empty_like(self._source), self._source))


def touched(size_bytes: int) -> np.ndarray:
    """Return `[size_bytes] uint8` on mapped pages, huge ones if the kernel has any."""
    mapping = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    memory[:] = 1
    return memory


class DirectDisk:
    """One file of `size_bytes` (rounded up to dd's block, 4 MiB), read and written O_DIRECT.

    `read_bandwidth` is that of dd: one read at a time into a small buffer. `limit` is the upper
    limit of the device: parallel reads into huge pages. `verified_limit` is that of a restore,
    which reads into memory that has been idle, and must look at every byte: a virtual machine's
    host takes idle memory back, and each first access to it waits.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "dd.reference"
        self._count = -(-size_bytes // _DD_BLOCK)
        self._memory: np.ndarray | None = None
        # Random bytes, because a device that compresses would look too fast.
        self._path.write_bytes(os.urandom(self._count * _DD_BLOCK))
        os.sync()

    def read_bandwidth(self) -> float:
        """Read the file; return bytes per second."""
        return self._run(f"if={self._path}", "of=/dev/null", "iflag=direct")

    def limit(self) -> float:
        """Read the file once by `_READERS` threads together; return bytes per second."""
        if self._memory is None:
            self._memory = self.memory()
        return self._read_into(self._memory, lambda _block: None)

    def memory(self) -> np.ndarray:
        """Return touched memory for the file, `[bytes] uint8`."""
        return touched(self._count * _DD_BLOCK)

    def verified_limit(self, memory: np.ndarray) -> float:
        """Read the file into `memory`, and make a checksum of each block that has come."""
        return self._read_into(memory, lambda block: checksum(block, seed=0))

    def _read_into(self, memory: np.ndarray, use: Callable[[np.ndarray], object]) -> float:
        """Read the file by threads, which `use` each block; return bytes per second."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)

        def read(start: int) -> None:
            block = memory[start : start + _DD_BLOCK]
            if os.preadv(fd, [block.data], start) != _DD_BLOCK:
                raise RuntimeError(f"a short read at {start}")
            use(block)

        blocks = range(0, len(memory), _DD_BLOCK)
        try:
            with ThreadPoolExecutor(_READERS) as pool:
                return len(memory) / timed(lambda: list(pool.map(read, blocks)))
        finally:
            os.close(fd)

    def write_bandwidth(self) -> float:
        """Write the file again in place; return bytes per second."""
        source = os.memfd_create("dd.source")
        try:
            with open(source, "wb", closefd=False) as memory:
                memory.write(self._path.read_bytes())
            arguments = (f"of={self._path}", "oflag=direct", "conv=notrunc")
            return self._run(f"if=/proc/self/fd/{source}", *arguments, pass_fds=(source,))
        finally:
            os.close(source)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    def _run(self, *arguments: str, pass_fds: Sequence[int] = ()) -> float:
        command = ["dd", f"bs={_DD_BLOCK}", f"count={self._count}", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"LC_ALL": "C"},
            pass_fds=pass_fds,
        )
        seconds = re.search(r"copied, ([0-9.e-]+) s", done.stderr)
        if seconds is None:
            raise RuntimeError(f"dd did not print its time: {done.stderr}")
        return self._count * _DD_BLOCK / float(seconds.group(1))


def machine_line() -> str:
    """Return the GPU if engines run on one, the processor, its cores and the present load."""
    cpu = cpu_name(Path("/proc/cpuinfo").read_text())
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    gpu = gpu_name(_NVIDIA)
    return f"{gpu + ' with ' if gpu else ''}{cpu}, {os.cpu_count()} cores, load {load}"


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's name, and that it lacks AVX-512 if it is an x86 one without it."""
    told: dict[str, str] = dict(re.findall(r"^(model name|flags)\s*: (.*)$", cpuinfo, re.MULTILINE))
    lacks = "flags" in told and "avx512f" not in told["flags"].split()
    return told.get("model name", "unknown CPU") + (" without AVX-512" if lacks else "")


def gpu_name(driver: Path) -> str:
    """Return the name of the first GPU that the driver lists; empty if torch uses none."""
    found = [x.read_text() for x in sorted(driver.glob("gpus/*/information"))]
    if not found:
        return ""
    import torch  # only here: most machines have no such driver, and it takes seconds

    model = re.search(r"^Model:\s*(.+?)\s*$", found[0], re.MULTILINE)
    return model[1] if model and torch.cuda.is_available() else ""


def publish(
    name: str,
    text: str,
    figures: Mapping[str, Any],
    details: Mapping[str, Any],
    *,
    as_json: bool,
    write: bool = True,
    machine: str = "",
) -> None:
    """Print the text, write it to `results/`, and print the figures as JSON.

    `as_json`: print them, as the last line. `write`: write files, unless `WRITES_NOTHING` is set.
    `machine`: the one that the figures are of, if it is another one than this.
    """
    print(text)
    if write and WRITES_NOTHING not in os.environ:
        print(f"\nwritten: {save(name, text, figures, details, machine)}")
    if as_json:
        print(json.dumps(figures))


def is_default(
    parser: argparse.ArgumentParser, given: argparse.Namespace, free: Collection[str]
) -> bool:
    """True if every option has its default, except for those that are free."""
    chosen = {name: value for name, value in vars(given).items() if name not in free}
    return all(value == parser.get_default(name) for name, value in chosen.items())


def options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options as JSON values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(given).items()
    }


def save(
    name: str,
    text: str,
    figures: Mapping[str, Any],
    details: Mapping[str, Any],
    machine: str = "",
) -> Path:
    """Write `results/<name>-<date>.{txt,json}`; return the path of the text."""
    RESULTS.mkdir(exist_ok=True)
    stem = f"{name}-{time.strftime('%Y-%m-%d')}"
    document = {"figures": figures, "machine": machine or machine_line(), "details": details}
    (RESULTS / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    path = RESULTS / f"{stem}.txt"
    path.write_text(text + "\n")
    return path


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that this share of them do not exceed; 0 if there are none."""
    at = max(1, math.ceil(share * len(samples))) - 1
    return sorted(samples)[at] if samples else 0.0


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures with four significant digits."""
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
