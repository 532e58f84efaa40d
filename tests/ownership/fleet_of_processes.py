"""Workers in processes of their own with one Redis, and a check that all agree."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.errors import DirectoryError
from hetero_connector.tools.verification import verify_model
from ownership.directory import ArtifactRecord, EpochStatus
from ownership.directory.redis import RedisDirectory
from tests.ownership.worker_process import LEASE_S, SIZES, WorkerProcess
from tests.waiting import until

WAIT_S = 60.0
KINDS = tuple(SIZES)


class ProcessFleet:
    """Processes that run at the same time. All are killed at the end."""

    def __init__(self, redis: EmbeddedRedis, workers: list[WorkerProcess]) -> None:
        self.redis = redis
        self.workers = workers
        self._tokens: dict[ArtifactId, int] = {}
        """The greatest token ever seen of each artifact."""

    @property
    def alive(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.alive]

    def records(self, chains: list[list[ChunkRange]]) -> dict[ArtifactId, ArtifactRecord]:
        """Return the records of owners that have not ended. Checks that tokens never shrink."""
        directory, found = RedisDirectory(self.redis.url, deadline_s=10.0), {}
        for chain in chains:
            view = directory.lookup([chunk.key for chunk in chain])
            for index, chunk in enumerate(chain):
                for kind, record in view.chunks[index].items():
                    artifact = ArtifactId(chunk.key, kind)
                    assert record.token >= self._tokens.get(artifact, 0), "a token went back"
                    self._tokens[artifact] = record.token
                    if view.status(record.owner) is not EpochStatus.ENDED:
                        found[artifact] = record
        directory.close()
        return found

    def disagreement(self, chains: list[list[ChunkRange]]) -> str:
        """Return how directory and stores differ on these chains; "" if they agree."""
        states = {worker.name: worker.state() for worker in self.alive}
        try:
            known = self.records(chains)
        except DirectoryError as error:
            return str(error)
        by_epoch = {state.epoch: name for name, state in states.items() if state.epoch}
        if len(by_epoch) < len(states):
            return "somebody is not registered"
        wanted = {ArtifactId(c.key, kind) for chain in chains for c in chain for kind in KINDS}
        for artifact in wanted:
            record = known.get(artifact)
            owner = by_epoch.get(record.owner, "") if record is not None else ""
            if record is not None and record.owner and not owner:
                return f"{artifact} is owned under the epoch {record.owner} of nobody"
            if owner and states[owner].tokens.get(artifact) != record.token:  # type: ignore[union-attr]
                return f"{artifact} should be {owner}'s"
            for name, state in states.items():
                if artifact in state.tokens and name != owner:
                    return f"{artifact} is not {name}'s"
                if artifact in state.replicas and not owner:
                    return f"{artifact} at {name} is a replica of nobody's"
        return ""

    def agree(self, chains: list[list[ChunkRange]]) -> float:
        """Wait until all agree; return the seconds that took."""
        started_s = time.monotonic()
        while complaint := self.disagreement(chains):
            assert time.monotonic() - started_s < WAIT_S, complaint
            time.sleep(0.05)
        return time.monotonic() - started_s


def verified(worker: WorkerProcess) -> int:
    """Return the number of artifacts on a dead worker's SSD; all must be intact."""
    report = verify_model(worker.ssd)
    assert not report.bad
    return report.artifacts


@contextmanager
def processes(
    folder: Path, *names: str, chunks: int = 24, lease_s: float = LEASE_S
) -> Iterator[ProcessFleet]:
    """Yield a fleet whose workers have joined."""
    with EmbeddedRedis() as redis:
        workers = [WorkerProcess(redis.url, name, folder, chunks, lease_s) for name in names]
        fleet = ProcessFleet(redis, workers)
        try:
            for worker in workers:
                worker.launch()
            for worker in workers:
                worker.ready()
                until(lambda w=worker: w.state().epoch > 0, "joined")  # type: ignore[misc]
            yield fleet
        finally:
            for worker in workers:
                with suppress(ProcessLookupError):
                    worker.kill()
