"""Faults of a fleet's real processes: each once, with the required outcome."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ChunkRange
from tests.ownership.fleet_of_processes import ProcessFleet, processes, verified
from tests.ownership.worker_process import LEASE_S, LOAD_DEADLINE_S, SIZES, WorkerProcess, prompt
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

CHUNKS = 6
CHAIN, OTHER = prompt("a", CHUNKS), prompt("b", CHUNKS)


def own(fleet: ProcessFleet, worker: WorkerProcess) -> None:
    """Have it compute CHAIN, own it and write it."""
    assert worker.turn(CHAIN).restored == 0
    fleet.agree([CHAIN])
    assert worker.do("flush")
    until(lambda: all(h.copy.on_ssd for h in fleet.records([CHAIN]).values()), "the fleet knows")
    tokens = worker.state().tokens
    assert len(tokens) == CHUNKS * len(SIZES)
    assert all(tokens.values())


def count(worker: WorkerProcess, name: str, label: str = "") -> float:
    """Return the value of a metric with this label."""
    found = worker.state().counters.items()
    return sum(n for key, n in found if key.startswith(f"heterocache_{name}{{") and label in key)


def asks(worker: WorkerProcess, chain: list[ChunkRange]) -> bool:
    """Return True if its lookup of an unknown prompt is answered."""
    before = count(worker, "directory_lookups", "outcome=nothing")
    worker.turn(chain)
    return count(worker, "directory_lookups", "outcome=nothing") > before


def test_an_owner_killed_after_a_read_leaves_its_replica_an_owner(tmp_path: Path) -> None:
    with processes(tmp_path, "ann", "bob") as fleet:
        ann, bob = fleet.workers
        own(fleet, ann)
        before = fleet.records([CHAIN])
        assert bob.turn(CHAIN).restored == CHUNKS
        until(lambda: len(bob.state().replicas) == CHUNKS * len(SIZES), "it is a replica")
        ann.kill()
        until(lambda: all(bob.state().tokens.get(a) for a in before), "bob owns it")
        fleet.agree([CHAIN])
        after = fleet.records([CHAIN])
        assert all(after[a].token > before[a].token for a in before)
        assert count(bob, "adopted_bytes") == 0, "it had the bytes"
        assert verified(ann) == CHUNKS * len(SIZES)


def test_an_owner_killed_before_a_read_is_computed_then_adopted_from_its_ssd(
    tmp_path: Path,
) -> None:
    with processes(tmp_path, "ann", "bob", lease_s=3 * LEASE_S) as fleet:
        ann, bob = fleet.workers
        own(fleet, ann)
        before = fleet.records([CHAIN])
        ann.kill()
        early = bob.turn(CHAIN[:2])
        assert early.restored == 0, "its lease lasts: nobody takes over"
        until(lambda: not {h.owner for h in before.values()} & epochs(fleet), "its lease has ended")
        assert bob.turn(CHAIN).restored == CHUNKS
        assert count(bob, "adopted_bytes") == (CHUNKS - 2) * sum(SIZES.values())
        fleet.agree([CHAIN])
        after = fleet.records([CHAIN])
        assert set(after) == set(before)
        assert all(after[a].token > before[a].token for a in before)
        assert verified(ann) == CHUNKS * len(SIZES), "its directory was only read"
        ann.launch().ready()
        fleet.agree([CHAIN])
        assert set(ann.state().replicas) == set(before), "what was taken over stays bob's"
        assert ann.turn(CHAIN).restored == CHUNKS


def test_a_killed_worker_finds_its_chunks_after_those_that_another_owns(tmp_path: Path) -> None:
    with processes(tmp_path, "ann", "bob") as fleet:
        ann, bob = fleet.workers
        assert ann.turn(CHAIN[:2]).restored == 0
        fleet.agree([CHAIN])
        assert bob.turn(CHAIN).restored == 2
        fleet.agree([CHAIN])
        assert bob.do("flush")
        assert len(bob.state().tokens) == (CHUNKS - 2) * len(SIZES)
        bob.kill()
        assert verified(bob) == (CHUNKS - 2) * len(SIZES), "no replica was written"
        bob.launch().ready()
        fleet.agree([CHAIN])
        turn = bob.turn(CHAIN)
        assert turn.restored == CHUNKS
        assert turn.wrong == []
        assert count(bob, "read_bytes", "tier=peer") == 2 * sum(SIZES.values())
        assert count(bob, "read_bytes", "tier=ssd") == (CHUNKS - 2) * sum(SIZES.values())


def epochs(fleet: ProcessFleet) -> set[int]:
    """Lookups still name the dead worker as the owner."""
    return {int(record.owner) for record in fleet.records([CHAIN]).values()}


def test_an_owner_stopped_for_longer_than_its_lease_changes_nothing_afterwards(
    tmp_path: Path,
) -> None:
    with processes(tmp_path, "ann", "bob") as fleet:
        ann, bob = fleet.workers
        own(fleet, ann)
        before = fleet.records([CHAIN])
        ann.ask("turn", OTHER)  # under way when it is stopped
        ann.stop()
        until(lambda: not epochs(fleet), "its lease has ended", patience_s=10 * LEASE_S)
        turn = bob.turn(CHAIN)
        assert turn.restored == 0, "it has its SSD's lock: nothing is adopted"
        assert turn.failures["unreachable"] > 0
        fleet.workers.remove(ann)  # who does not answer
        fleet.agree([CHAIN])
        taken = fleet.records([CHAIN])
        ann.resume()
        assert ann.answer().wrong == []
        fleet.workers.append(ann)
        fleet.agree([CHAIN, OTHER])
        after = fleet.records([CHAIN])
        assert {a: (h.owner, h.token) for a, h in after.items()} == {
            a: (h.owner, h.token) for a, h in taken.items()
        }
        assert all(taken[a].token > before[a].token for a in before)
        assert ann.state().replicas >= set(before)
        assert ann.turn(CHAIN).restored == CHUNKS


def test_a_reader_killed_during_a_read_disturbs_no_other_worker(tmp_path: Path) -> None:
    with processes(tmp_path, "ann", "bob", "cay") as fleet:
        ann, bob, cay = fleet.workers
        own(fleet, ann)
        bob.ask("read_without_end", CHAIN)
        assert bob.answer() == CHUNKS * len(SIZES)
        bob.kill()
        assert cay.turn(CHAIN).restored == CHUNKS
        assert ann.turn(CHAIN).restored == CHUNKS
        bob.launch().ready()
        fleet.agree([CHAIN])
        assert len(ann.state().tokens) == CHUNKS * len(SIZES)
        assert bob.turn(CHAIN).restored == CHUNKS


@pytest.mark.parametrize("fault", ["restarted empty", "slow"])
def test_a_failing_redis_costs_a_deadline_and_the_fleet_recovers(
    tmp_path: Path, fault: str
) -> None:
    with processes(tmp_path, "ann", "bob") as fleet:
        ann, bob = fleet.workers
        own(fleet, ann)
        if fault == "slow":
            fleet.redis.pause()
        else:
            fleet.redis.kill()
        turn = bob.turn(OTHER)
        assert turn.restored == 0
        assert turn.seconds < LOAD_DEADLINE_S, "a request waits for the directory once"
        assert ann.turn(CHAIN).restored == CHUNKS, "its own cache needs nobody"
        if fault == "slow":
            time.sleep(2.0)
            fleet.redis.resume()
        else:
            fleet.redis.start()
        fleet.agree([CHAIN, OTHER])
        fresh = (prompt(f"new {i}", 1, shared=0) for i in itertools.count())
        until(lambda: asks(bob, next(fresh)), "bob is answered")
        assert count(bob, "read_bytes", "tier=peer") == 0
        assert bob.turn(CHAIN).restored == CHUNKS
        assert count(bob, "read_bytes", "tier=peer") > 0
