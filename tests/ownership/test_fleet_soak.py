"""Two hundred random faults of real processes that share a cache."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ChunkRange
from tests.ownership.fleet_of_processes import ProcessFleet, processes, verified
from tests.ownership.worker_process import LEASE_S, SIZES, Turn, WorkerProcess, prompt

ROUNDS = 200
CHAINS = [prompt(f"session {i}", 5) for i in range(6)]
DRAM_CHUNKS = 11
"""Out of 20, so that some chunks are only on the SSD of a worker that dies."""
SLACK_S = 5.0
"""With two processes per core, a process that is ready does not run at once."""


class Soak:
    """Turns at random workers, a fault during them, and the required outcome."""

    def __init__(self, fleet: ProcessFleet, rng: random.Random) -> None:
        self.fleet = fleet
        self.rng = rng
        self.restored = 0
        self.faults: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.session = CHAINS[0]
        """The session of this round's turns."""
        self.adopted = 0.0
        self.alone: list[list[ChunkRange]] = []
        """Sessions of one worker each."""
        self.verified = 0
        self.slowest_s = self.agreed_s = 0.0
        self._adopted_by: dict[str, float] = {}
        self._kinds: dict[str, Callable[[WorkerProcess, WorkerProcess], None]] = {
            "none": self.nothing,
            "owner killed before": self.owner_killed_before,
            "owner dead for long": self.owner_dead_for_long,
            "owner killed during": self.owner_killed_during,
            "owner killed after": self.owner_killed_after,
            "owner stopped": self.owner_stopped,
            "reader killed": self.reader_killed,
            "redis restarted": self.redis_restarted,
            "redis gone": self.redis_gone,
            "redis slow": self.redis_slow,
        }

    def round(self) -> None:
        owner, reader = self.rng.sample(self.fleet.workers, 2)
        kind = self.rng.choice(list(self._kinds))
        self.faults[kind] += 1
        # Of an old session every worker soon has a copy of its own, of a new one only the owner.
        new = prompt(f"new {self.faults.total()}", 5)
        self.session = self.rng.choice([self.rng.choice(CHAINS), new])
        self.turn(owner)
        self._kinds[kind](owner, reader)
        for worker in self.fleet.workers:
            if not worker.alive:
                self.verified += verified(worker)
                worker.launch().ready()

    def agree(self) -> None:
        """All run again: within two leases directory and stores agree.

        What was adopted is counted here: not what a worker killed meanwhile had counted.
        """
        self.agreed_s = max(self.agreed_s, self.fleet.agree([*CHAINS, *self.alone[-4:]]))
        for worker in self.fleet.workers:
            counters = worker.state().counters
            adopted = sum(n for k, n in counters.items() if k.startswith("heterocache_adopted"))
            self.adopted += max(0.0, adopted - self._adopted_by.get(worker.name, 0.0))
            self._adopted_by[worker.name] = adopted

    def turn(self, worker: WorkerProcess) -> None:
        self.count(worker.turn(self.session))

    def ask(self, worker: WorkerProcess) -> None:
        worker.ask("turn", self.session)
        time.sleep(self.rng.random() * 0.03)

    def answered(self, worker: WorkerProcess) -> None:
        turn = worker.answer()
        assert turn.wrong == []
        self.count(turn)

    def count(self, turn: Turn) -> None:
        self.restored += turn.restored
        self.failures.update(turn.failures)
        self.slowest_s = max(self.slowest_s, turn.seconds)

    def nothing(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.turn(reader)

    def owner_killed_before(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        owner.kill()
        self.turn(reader)

    def owner_dead_for_long(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        """Its SSD alone has a session; both other workers adopt it at the same time."""
        session = prompt(f"alone {len(self.alone)}", 4)
        self.alone.append(session)
        self.count(owner.turn(session))
        assert owner.do("flush")
        time.sleep(self.rng.random() * 0.2)
        owner.kill()
        time.sleep(1.2 * LEASE_S)
        for worker in self.fleet.alive:
            worker.ask("turn", session)
        for worker in self.fleet.alive:
            self.answered(worker)

    def owner_killed_during(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.ask(reader)
        owner.kill()
        self.answered(reader)

    def owner_killed_after(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.turn(reader)
        owner.kill()
        self.turn(reader)

    def owner_stopped(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.ask(owner)
        owner.stop()
        self.turn(reader)
        time.sleep(self.rng.choice([0.2, 1.3]) * LEASE_S)
        self.turn(reader)
        owner.resume()
        self.answered(owner)

    def reader_killed(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.ask(reader)
        reader.kill()
        self.turn(owner)

    def redis_restarted(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.ask(reader)
        self.fleet.redis.kill()
        self.fleet.redis.start()
        self.answered(reader)

    def redis_gone(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.fleet.redis.kill()
        self.turn(reader)
        self.turn(owner)
        self.fleet.redis.start()

    def redis_slow(self, owner: WorkerProcess, reader: WorkerProcess) -> None:
        self.ask(reader)
        self.fleet.redis.pause()
        time.sleep(2.0)
        self.fleet.redis.resume()
        self.answered(reader)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_random_faults_bring_no_wrong_byte_and_no_hang_and_all_agree_afterwards(
    tmp_path: Path,
) -> None:
    """A wrong byte or a hang fails inside a turn; a token that shrinks inside `records`."""
    with processes(tmp_path, "ann", "bob", "cay", chunks=DRAM_CHUNKS) as fleet:
        soak = Soak(fleet, random.Random(24))
        started_s = time.monotonic()
        for number in range(ROUNDS):
            soak.round()
            if number % 10 == 9:
                soak.agree()
        for worker in fleet.workers:
            worker.do("close")
            worker.kill()
            soak.verified += verified(worker)
        print(
            f"{ROUNDS} rounds in {time.monotonic() - started_s:.0f} s: {dict(soak.faults)}; "
            f"{soak.restored} chunks restored, {dict(soak.failures)} failed, "
            f"at least {soak.adopted / sum(SIZES.values()):.0f} chunks' bytes adopted, "
            f"{soak.verified} artifacts verified on SSDs of dead workers; "
            f"slowest turn {soak.slowest_s:.2f} s, agreed within {soak.agreed_s:.2f} s"
        )
        assert set(soak.faults) == set(soak._kinds), "a fault was never drawn"
        assert soak.restored > ROUNDS, "hardly anything was restored: the test shows nothing"
        assert soak.failures, "no fault was ever met"
        assert soak.adopted > 10 * sum(SIZES.values())
        assert soak.verified > 0
        assert soak.agreed_s <= 2 * LEASE_S + SLACK_S
