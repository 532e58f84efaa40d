"""Engines' processes that export memory to peers, and ways to end them.

Each has a peer process, which is what peers meet: stopping that is stopping the owner, to them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tests.waiting import until

SIZES = (32 << 20, 8 << 10)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["hetero_connector.transfer.nixl_peers", "numpy"])


def contents(region: int, size: int) -> np.ndarray:
    return np.random.default_rng(region).integers(0, 256, size, dtype=np.uint8)


def serve(pipe: Connection) -> None:
    """Runs in the owner's process."""
    from hetero_connector.transfer.nixl_peers import NixlPeers
    from hetero_connector.transfer.shared_memory import create_shared

    memory = [create_shared("owner", size) for size in SIZES]
    for i, region in enumerate(memory):
        region.view[:] = contents(i, len(region.view))
    peers = NixlPeers(memory)
    pipe.send((peers.metadata, peers.process_id))
    pipe.recv()
    pipe.send(peers.close())


class Owner:
    """One process; `metadata` is what it exports."""

    def __init__(self) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        self._told: tuple[bytes, int] | None = None

    @property
    def pid(self) -> int:
        """The number of the process that peers reach."""
        return self._hear()[1]

    @property
    def metadata(self) -> bytes:
        return self._hear()[0]

    def _hear(self) -> tuple[bytes, int]:
        """Waits until the process has started."""
        if self._told is None:
            self._told = self._pipe.recv()
        return self._told

    def close(self) -> bool:
        """Its `close`'s answer."""
        self._pipe.send("close")
        return bool(self._pipe.recv())

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def owners(count: int) -> Iterator[list[Owner]]:
    """`count` processes, started side by side."""
    started = [Owner() for _ in range(count)]
    try:
        yield started
    finally:
        for owner in started:
            owner.kill()
