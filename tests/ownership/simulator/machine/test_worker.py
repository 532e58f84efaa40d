"""Reads between workers, and the state at both ends during a read."""

from __future__ import annotations

import pytest

from ownership.scheduling.fleet import Role
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.small_fleets import CHUNK_BYTES, GIB, costs, fleet, prompt

LONG, OTHER = BlockRuns(((0, 60),)), BlockRuns(((500, 50),))
PAIR = (Role.PREFILL, Role.DECODE)


def simulation(spec: FleetSpec, *sessions: Session, policy: str = "colocated") -> FleetSimulation:
    """Return a simulation that has not begun."""
    shape = StateShape.of(spec.model, 256)
    return FleetSimulation(spec, parse_policy(policy), shape, iter(sessions), 256, 0)


def test_what_a_read_continues_stays_during_the_read() -> None:
    """The reader seals another prompt between the read's start and its end."""
    run = simulation(fleet(2, capacity=TierBytes(GIB, 60 * CHUNK_BYTES)))
    source, target = run.workers.values()
    dram = target.memory.dram
    source.memory.dram.add(LONG, 60, (), 1)
    dram.add(LONG.head(40), 40, (), target.memory.next_tick())
    read: list[int] = []
    assert target.read_from(source, LONG, 60, None, read.append)
    _, sealed, _ = dram.add(OTHER, 50, (), target.memory.next_tick())
    run.loop.run()
    assert read == [60]
    fetched = target.flows.fetched.chunks
    assert (dram.used_bytes + dram.evicted_bytes) // CHUNK_BYTES == 40 + sealed + fetched
    assert not any(one.pins for one in (dram.root, *dram.runs()))


def test_an_ssd_is_read_after_the_chunks_that_a_peer_sends() -> None:
    """The reader's SSD has 40 of 101 chunks, behind 60 that only a peer has."""
    spec = fleet(2, roles=PAIR, cost_model=costs(bytes_per_s=100e9))
    turn = prompt(0, 101 * 256)
    run = simulation(spec, Session("a", (turn,), 0.0), policy="static_pd+restores=always_load")
    reader, peer = (worker.memory for worker in run.workers.values())
    reader.ssd.write(turn.blocks.head(100), 60, (), reader.next_tick())
    peer.seal(turn.blocks.head(60), ())
    run.run()
    flows = run.workers["w0"].flows
    assert (flows.staged.chunks, flows.fetched.chunks) == (40, 60)
    assert list(run.tally.hits) == [0, 0, 40 * 256, 60 * 256]
    assert [one.owner for one in reader.dram.runs()][:2] == ["w1", None]
    assert flows.written.chunks == 1, "the last chunk; the peer's are the peer's"
    assert not any(one.pins for one in (reader.dram.root, *reader.dram.runs()))


def test_pages_that_no_router_knows_are_no_queue_in_the_engine() -> None:
    """A prompt of which 8 of 9 chunks are in pages waits behind a long one."""
    first, second = prompt(500, 64 * 256), prompt(0, 9 * 256)
    run = simulation(fleet(), Session("a", (first,), 0.0), Session("b", (second,), 1e-3))
    (worker,) = run.workers.values()
    worker.memory.hbm.add(second.blocks.head(8), 8, (), worker.memory.next_tick())
    seen: list[int] = []
    run.loop.at(2e-3, lambda: seen.extend(x.expected_tokens for x in worker.engine.waiting))
    run.run()
    assert seen == [256]


def test_a_request_that_waits_for_its_state_counts_as_waiting() -> None:
    """It is read from a peer, then from an SSD, computed, and read by the worker that decodes."""
    spec = fleet(2, roles=PAIR, cost_model=costs(bytes_per_s=10e9))
    turn = prompt(0, 101 * 256)
    policy = "static_pd+restores=always_load"
    run = simulation(spec, Session("a", (turn,), 0.0), policy=policy)
    reader, peer = (worker.memory for worker in run.workers.values())
    reader.ssd.write(turn.blocks.head(100), 60, (), reader.next_tick())
    peer.seal(turn.blocks.head(60), ())
    seen: list[tuple[int, int]] = []

    def look() -> None:
        if len(run.sessions.live):
            loads = [worker.load() for worker in run.workers.values()]
            waiting = sum(load.waiting_requests for load in loads)
            seen.append((waiting, waiting + sum(load.running_requests for load in loads)))
            run.loop.at(run.loop.now_s + 1e-3, look)

    run.loop.at(1e-3, look)
    run.run()
    (request_s,) = run.tally.step_s
    waited_s = sum(run.tally.waits_s)
    assert {everywhere for _, everywhere in seen} == {1}
    assert len(seen) == pytest.approx(1e3 * request_s, abs=2)
    assert sum(waiting for waiting, _ in seen) == pytest.approx(1e3 * waited_s, abs=4)
    assert waited_s > 0.3 * request_s
