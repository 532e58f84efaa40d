"""A fleet on separate hosts: real workers, and Redis on a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from ownership.directory import ArtifactRecord
from ownership.directory.redis import RedisDirectory
from ownership.member.held_lease import lease_clock
from tests.network import Network
from tests.ownership.fleet_of_processes import ProcessFleet
from tests.ownership.history import Ended, faults
from tests.ownership.worker_process import Timed, WorkerProcess
from tests.waiting import until

REDIS = "redis"
ROOT = Path(__file__).parents[2]
_SERVE = """
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from tests.ownership.worker_process import serve
pipe, url, name, root, chunks, lease_s = sys.argv[1:]
serve(Connection(int(pipe)), url, name, Path(root), int(chunks), float(lease_s))
"""


class WorkerApart(WorkerProcess):
    """A worker on a host of its own."""

    def __init__(self, network: Network, url: str, name: str, folder: Path) -> None:
        super().__init__(url, name, folder)
        self._network = network

    def _start(self, theirs: Connection, arguments: tuple[str, str, Path, int, float]) -> Any:
        return subprocess.Popen(
            [
                *self._network.command(self.name),
                *(sys.executable, "-c", _SERVE, str(theirs.fileno())),
                *map(str, arguments),
            ],
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "UCX_TLS": "tcp",  # on one machine it would read the other's memory
                "UCX_NET_DEVICES": self._network.devices[self.name],
            },
        )

    def _wait(self, process: Any) -> None:
        process.wait()


class FleetApart(ProcessFleet):
    """A fleet over a network. The test asks Redis on its own host, so no fault disturbs it."""

    def __init__(self, network: Network, redis: EmbeddedRedis, workers: list[WorkerProcess]):
        super().__init__(redis, workers)
        self.network = network
        self._live: set[int] = set()
        self._ends: list[Timed] = []

    def records(self, chains: list[list[ChunkRange]]) -> dict[ArtifactId, ArtifactRecord]:
        with self.network.inside(REDIS):
            return super().records(chains)

    def note_ends(self) -> None:
        """Record the epochs that have ended since the last call."""
        with self.network.inside(REDIS):
            directory = RedisDirectory(self.redis.url, deadline_s=10.0)
            live = {int(epoch) for epoch in directory.workers()}
            directory.close()
        now_s = lease_clock()
        self._ends += [(now_s, Ended(epoch, now_s)) for epoch in self._live - live]
        self._live |= live

    def watch(self, seconds: float) -> None:
        """Let time pass, and record the epochs that end."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.note_ends()
            time.sleep(0.05)

    def what_must_not_have_happened(self) -> list[str]:
        """Check everything that the workers were granted and have used."""
        self.note_ends()
        events = [*self._ends, *(x for worker in self.workers for x in worker.do("history"))]
        return list(faults(event for _, event in sorted(events, key=lambda timed: timed[0])))


@contextmanager
def fleet_apart(folder: Path, *names: str) -> Iterator[FleetApart]:
    """Yield workers that have joined, each on the host of its name."""
    with ExitStack() as undo:
        network = undo.enter_context(Network(*names, REDIS).up())
        address = network.addresses[REDIS]
        redis = EmbeddedRedis([f"bind 127.0.0.1 {address}"])
        with network.inside(REDIS):
            redis.start()
        undo.callback(redis.stop)
        url = redis.url.replace("127.0.0.1", address)
        workers: list[WorkerProcess] = [WorkerApart(network, url, name, folder) for name in names]
        for worker in workers:
            undo.callback(_kill, worker)
            worker.launch()
        fleet = FleetApart(network, redis, workers)
        for worker in workers:
            worker.ready()
            until(lambda w=worker: w.state().epoch > 0, "joined")  # type: ignore[misc]
        fleet.note_ends()
        yield fleet


def _kill(worker: WorkerProcess) -> None:
    with suppress(ProcessLookupError):
        worker.kill()
