"""Processes that export memory to peers, and ways to end them.

They are forked from a server that has imported NIXL, which takes two seconds, but has no agent
yet: an agent does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

SIZES = (32 << 20, 8 << 10)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["hetero_connector.transfer.nixl_peers", "nixl"])


def contents(region: int, size: int) -> np.ndarray:
    return np.random.default_rng(region).integers(0, 256, size, dtype=np.uint8)


def serve(pipe: Connection, shared: bool) -> None:
    """Runs in the owner's process."""
    from hetero_connector.store.arena import Arena
    from hetero_connector.transfer.nixl_peers import NixlPeers

    arenas = [Arena.create(size, shared=shared) for size in SIZES]
    for i, arena in enumerate(arenas):
        arena.view[:] = contents(i, len(arena.view))
    peers = NixlPeers([arena.view for arena in arenas])
    pipe.send(peers.metadata)
    pipe.recv()
    pipe.send(peers.close())


class Owner:
    """One process; `metadata` is what it exports."""

    def __init__(self, *, shared: bool = False) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, shared), daemon=True)
        self._process.start()
        self._metadata: bytes | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def metadata(self) -> bytes:
        """Waits until the process has started."""
        if self._metadata is None:
            self._metadata = self._pipe.recv()
        return self._metadata

    def close(self) -> bool:
        """Its `close`'s answer."""
        self._pipe.send("close")
        return bool(self._pipe.recv())

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def owners(count: int, *, shared: bool = False) -> Iterator[list[Owner]]:
    """`count` processes, started side by side."""
    started = [Owner(shared=shared) for _ in range(count)]
    try:
        yield started
    finally:
        for owner in started:
            owner.kill()
