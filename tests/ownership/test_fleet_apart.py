"""The network fails between a fleet's hosts, or to its Redis, in one way or both, and heals.

Namespaces need root (`tests/network.py`). Where the test is not, it is skipped;
`test_fleet_processes.py` on one host and `test_lossy_fleet.py` in steps remain.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from tests.network import Network, why_not_apart
from tests.ownership.fleet_apart import REDIS, FleetApart, fleet_apart
from tests.ownership.worker_process import (
    LEASE_S,
    LOAD_DEADLINE_S,
    SIZES,
    Turn,
    WorkerProcess,
    prompt,
)

WHY_NOT = why_not_apart()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

CHUNKS = 4
CHAIN, OTHER, LATER = (prompt(name, CHUNKS) for name in ("a", "b", "c"))
SLACK_S = 15.0
"""With two processes per core, a process that is ready does not run at once."""
ROUNDS = 12
TRIES = 20
"""A lost packet is sent again after growing pauses."""
OWNER, READER = "ann", "bob"
AT_RANDOM = "cut at random again and again"


def part_peers(network: Network) -> None:
    network.part(OWNER, READER)


def part_redis(network: Network) -> None:
    network.part(OWNER, REDIS)
    network.part(READER, REDIS)


def part_owner(network: Network) -> None:
    """Its peers reach it, so they must know without it that it is no longer the owner."""
    network.part(OWNER, REDIS)


def part_reader(network: Network) -> None:
    network.part(READER, REDIS)


def deafen_owner(network: Network) -> None:
    """Its calls succeed, but it gets no answers."""
    network.cut((REDIS, OWNER), (READER, OWNER))


def silence_owner(network: Network) -> None:
    network.cut((OWNER, REDIS), (OWNER, READER))


def deafen_reader(network: Network) -> None:
    network.cut((REDIS, READER), (OWNER, READER))


def silence_reader(network: Network) -> None:
    network.cut((READER, REDIS), (READER, OWNER))


def slow(network: Network) -> None:
    network.disturb(delay_s=0.03)


def lossy(network: Network) -> None:
    network.disturb(delay_s=0.002, loss=0.03)


FAULTS = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        *(part_peers, part_redis, part_owner, part_reader),
        *(deafen_owner, silence_owner, deafen_reader, silence_reader),
        *(slow, lossy),
    )
}


def ask(worker: WorkerProcess, *chains: list[ChunkRange]) -> list[Turn]:
    """One turn each; none takes longer than a load's deadline."""
    turns = [worker.turn(chain) for chain in chains]
    for turn in turns:
        assert turn.seconds < LOAD_DEADLINE_S, f"a turn of {worker.name} waits too long"
    return turns


def from_peers(worker: WorkerProcess) -> float:
    found = worker.state().counters.items()
    return sum(n for key, n in found if key.startswith("heterocache_read_bytes{") and "peer" in key)


def artifacts(chain: list[ChunkRange]) -> set[ArtifactId]:
    return {ArtifactId(chunk.key, kind) for chunk in chain for kind in SIZES}


@pytest.mark.parametrize("situation", [*FAULTS, AT_RANDOM])
def test_network_faults_bring_no_wrong_byte_and_all_agree_after_they_end(
    tmp_path: Path, situation: str
) -> None:
    if situation == AT_RANDOM:
        cut_at_random(tmp_path)
        return
    with fleet_apart(tmp_path, OWNER, READER) as fleet:
        owner, reader = fleet.workers
        ask(owner, CHAIN)
        fleet.agree([CHAIN])
        before = fleet.records([CHAIN])
        FAULTS[situation](fleet.network)
        (early,) = ask(reader, CHAIN[: CHUNKS // 2])
        if situation not in ("slow", "lossy", "part owner"):
            assert early.restored == 0, "the fault is none: the test shows nothing"
        assert ask(owner, CHAIN)[0].restored == CHUNKS, "its own cache needs nobody"
        fleet.watch(1.5 * LEASE_S)
        ask(reader, CHAIN, OTHER)
        ask(owner, OTHER, LATER)
        fleet.watch(0.5 * LEASE_S)
        ask(reader, LATER)

        fleet.network.heal()
        took_s = fleet.agree([CHAIN, OTHER, LATER])
        print(f"{situation}: agreed after {took_s:.2f} s")
        assert took_s <= 2 * LEASE_S + SLACK_S
        after = fleet.records([CHAIN, OTHER, LATER])
        assert set(after) == artifacts(CHAIN) | artifacts(OTHER) | artifacts(LATER)
        if situation == "part peers":
            assert all(after[a].owner == before[a].owner for a in before), "its lease went on"
        check_peers_are_read_again(fleet)
        assert fleet.what_must_not_have_happened() == []


def cut_at_random(tmp_path: Path) -> None:
    """States of the network, one after another, while all three workers have turns."""
    rng = random.Random(25)
    chains = [prompt(f"random {number}", CHUNKS) for number in range(4)]
    with fleet_apart(tmp_path, OWNER, READER, "cay") as fleet:
        wires = list(itertools.permutations(fleet.network.spaces, 2))
        for _ in range(ROUNDS):
            fleet.network.disturb(delay_s=rng.choice([0.0, 0.01]), loss=rng.choice([0.0, 0.02]))
            fleet.network.cut(*rng.sample(wires, rng.randint(1, len(wires) - 1)))
            for worker in fleet.workers:
                worker.ask("turn", rng.choice(chains))
            fleet.watch(rng.choice([0.1, 0.5, 1.3]) * LEASE_S)
            if rng.random() < 0.3:
                fleet.network.heal()
                fleet.watch(0.3 * LEASE_S)
            for worker in fleet.workers:
                turn = worker.answer()
                assert turn.wrong == []
                assert turn.seconds < LOAD_DEADLINE_S
        fleet.network.heal()
        took_s = fleet.agree(chains)
        print(f"agreed after {took_s:.2f} s")
        assert took_s <= 2 * LEASE_S + SLACK_S
        check_peers_are_read_again(fleet)
        assert fleet.what_must_not_have_happened() == []


def check_peers_are_read_again(fleet: FleetApart) -> None:
    for writer, reader in itertools.permutations(fleet.workers, 2):
        before = from_peers(reader)
        for number in range(TRIES):
            fresh = prompt(f"healed {writer.name} {number}", CHUNKS, shared=0)
            ask(writer, fresh)
            fleet.agree([fresh])
            ask(reader, fresh)
            if from_peers(reader) > before:
                break
        else:
            raise AssertionError(f"{reader.name} reads nothing from {writer.name} any more")
