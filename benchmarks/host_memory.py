"""`python -m benchmarks.host_memory [--json] [--threads N]`: host memory by several threads.

`reserve_4k`, `reserve_huge`: the time in which threads reserve a memfd, with pages of 4 KiB and
with huge pages, over one thread's.
`checksum_4_mib`, `checksum_16_mib`: the time of the checksums of a batch of artifacts that is
divided between threads, over one thread's.
`checksum_over_memcpy`: the time of one thread's checksums over that of a plain copy.
Every time is the best of many: another process on a core would decide the ratio otherwise.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

from benchmarks.measure import (
    Memcpy,
    Samples,
    is_default,
    machine_line,
    publish,
    rounded,
    table,
    timed,
    touched,
)
from hetero_connector.transfer.checksum import checksum
from hetero_connector.transfer.shared_memory import (
    make_memfd,
    map_aligned,
    populate,
    take_huge_pages,
)
from hetero_connector.units import GIB, MIB

SIZE_BYTES = GIB // 4
PIECES = 8
"""Memory is reserved in so many pieces."""
ARTIFACT_BYTES = MIB
BATCHES = (4 * MIB, 16 * MIB)
"""The store checks 4 MiB at a time."""


class Threads:
    """The calling thread, and others that wait for work."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(max(1, count - 1))

    def run(self, job: Callable[[range], object], number: int) -> None:
        """Divide the numbers below `number`, and wait until all are done."""
        shares = [range(i, number, self._count) for i in range(self._count)]
        others = [self._pool.submit(job, share) for share in shares[1:]]
        job(shares[0])
        for other in others:
            other.result()

    def close(self) -> None:
        self._pool.shutdown()


@contextmanager
def threads(count: int) -> Iterator[Threads]:
    some = Threads(count)
    yield some
    some.close()


def reserve(workers: Threads, size_bytes: int, *, huge: bool) -> float:
    """Return the seconds to reserve shared memory."""
    fd = make_memfd("benchmark", size_bytes)
    memory = np.frombuffer(map_aligned(fd, size_bytes), np.uint8)
    piece = size_bytes // PIECES

    def job(numbers: range) -> None:
        for number in numbers:
            address = memory.ctypes.data + number * piece
            if huge:
                take_huge_pages(address, piece)
            populate(address, piece)

    seconds = timed(lambda: workers.run(job, PIECES))
    os.close(fd)
    return seconds


def sums(workers: Threads, memory: np.ndarray, batch_bytes: int) -> float:
    """Return the seconds for the checksums of all batches, one batch after the other."""

    def all_batches() -> None:
        for start in range(0, len(memory), batch_bytes):
            workers.run(partial(job, start), batch_bytes // ARTIFACT_BYTES)

    def job(start: int, numbers: range) -> None:
        for number in numbers:
            at = start + number * ARTIFACT_BYTES
            checksum(memory[at : at + ARTIFACT_BYTES], number)

    return timed(all_batches)


def measure(count: int, size_bytes: int, repeats: int) -> tuple[dict[str, float], str]:
    """Return the figures and a table."""
    samples, memory, copy = Samples(), touched(size_bytes), Memcpy(size_bytes)
    with threads(1) as one, threads(count) as several:
        for _ in range(repeats):
            for name, workers in (("one", one), ("several", several)):
                samples.add(f"reserve_4k/{name}", reserve(workers, size_bytes, huge=False))
                samples.add(f"reserve_huge/{name}", reserve(workers, size_bytes, huge=True))
                for size in BATCHES:
                    key = f"checksum_{size // MIB}_mib/{name}"
                    samples.add(key, sums(workers, memory, size))
            samples.add("memcpy", copy.reused())
    names = ["reserve_4k", "reserve_huge", *(f"checksum_{s // MIB}_mib" for s in BATCHES)]
    per_gib = {name: min(s) * GIB / size_bytes for name, s in samples.by_name.items()}
    figures = {n: per_gib[f"{n}/several"] / per_gib[f"{n}/one"] for n in names}
    figures["checksum_over_memcpy"] = per_gib["checksum_16_mib/one"] / per_gib["memcpy"]
    rows = [
        [n, f"{per_gib[f'{n}/one']:.3f}", f"{per_gib[f'{n}/several']:.3f}", f"{figures[n]:.2f}"]
        for n in names
    ]
    rows.append(["memcpy", f"{per_gib['memcpy']:.3f}", "", ""])
    return rounded(figures), table(["s/GiB", "1 thread", f"{count} threads", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as the last line")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    options = parser.parse_args()
    figures, text = measure(options.threads, SIZE_BYTES, repeats=8)
    text = f"Host memory by several threads. {machine_line()}\n\n{text}"
    details = {"threads": options.threads, "size_bytes": SIZE_BYTES}
    write = is_default(parser, options, free=("json",))
    publish("host_memory", text, figures, details, as_json=options.json, write=write)


if __name__ == "__main__":
    main()
