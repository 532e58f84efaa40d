"""Reads between workers, and what happens at both ends meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ownership.scheduling.fleet import Role
from ownership.simulator.fleet_file import Failure, FleetSpec
from ownership.simulator.machine.peer_reads import PeerReads
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.small_fleets import CHUNK_BYTES, GIB, costs, fleet, prompt

LONG, OTHER = BlockRuns(((0, 60),)), BlockRuns(((500, 50),))
PAIR = (Role.PREFILL, Role.DECODE)


def simulation(spec: FleetSpec, *sessions: Session, policy: str = "static_pd") -> FleetSimulation:
    """One that has not begun."""
    shape = StateShape.of(spec.model, 256)
    return FleetSimulation(spec, parse_policy(policy), shape, iter(sessions), 256, 0)


@pytest.mark.parametrize("source_dies", [False, True])
def test_what_a_read_continues_stays_while_it_is_read(source_dies: bool) -> None:
    """The reader seals another prompt between the read's start and its end."""
    run = simulation(fleet(2, capacity=TierBytes(GIB, 60 * CHUNK_BYTES)))
    source, target = run.workers.values()
    dram, reads = target.memory.dram, PeerReads(run.loop, {})
    source.memory.dram.add(LONG, 60, (), 1)
    dram.add(LONG.head(40), 40, (), target.memory.tick())
    ended: list[int] = []
    assert reads.begin(source, target, LONG, 60, ended.append)
    _, sealed, _ = dram.add(OTHER, 50, (), target.memory.tick())
    if source_dies:
        source.crash()
        reads.cut_off(source)
    run.loop.run()
    assert ended == [0 if source_dies else 60]
    fetched = target.flows.fetched.chunks
    assert (dram.used_bytes + dram.evicted_bytes) // CHUNK_BYTES == 40 + sealed + fetched
    assert not any(one.pins for one in (dram.root, *dram.runs()))


@pytest.mark.parametrize("source_dies", [False, True])
def test_what_is_on_the_readers_ssd_is_not_read_from_a_peer(source_dies: bool) -> None:
    """A peer has 20 chunks behind the hundred that the prefiller has on SSD."""
    spec = fleet(2, roles=PAIR, cost_model=costs(bytes_per_s=100e9))
    if source_dies:
        spec = replace(spec, failures=(Failure("w1", 0.01, 0.01),))
    turn = prompt(0, 121 * 256)
    run = simulation(spec, Session("a", (turn,), 0.0), policy="static_pd+peers=any")
    reader, peer = (worker.memory for worker in run.workers.values())
    reader.ssd.add(turn.blocks.head(100), 100, (), reader.tick())
    peer.dram.add(turn.blocks.head(120), 120, (), peer.tick())
    run.run()
    flows = run.workers["w0"].flows
    staged, fetched = flows.staged.chunks, flows.fetched.chunks
    assert (staged, fetched > 0, fetched <= 20) == (100, not source_dies, True)
    assert list(run.tally.hits) == [0, 0, staged * 256, fetched * 256]
    (ttft_s,) = run.tally.ttft_s
    assert ttft_s > 100 * CHUNK_BYTES / 100e9, "it waits for the SSD"
    assert not any(one.pins for one in (reader.dram.root, *reader.dram.runs()))


def test_a_transfer_with_a_dead_worker_is_over_before_anything_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request decodes at the worker that dies, the state of another is on its way there."""
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    spec = fleet(3, roles=roles, cost_model=costs(bytes_per_s=1e8))
    spec = replace(spec, failures=(Failure("w1", 1.0, 100.0),))
    decoding = [Session(str(at), (prompt(900 + at, 256, 5_000),), 0.1 * at) for at in range(2)]
    run = simulation(spec, *decoding, Session("long", (prompt(0, 8_192),), 0.2))
    pending_s: list[float] = []

    def look(request: LiveRequest) -> None:
        pending_s.append(run.workers["w0"].outgoing.pending_s(run.loop.now_s))
        start_over(request)

    start_over = LiveRequest.start_over
    monkeypatch.setattr(LiveRequest, "start_over", look)
    run.run()
    assert pending_s == [0.0, 0.0]


def gapped(policy: str, source_dies: bool = False) -> FleetSimulation:
    """A prompt of 101 chunks at a worker whose SSD has 40 of them, that continue 60 of a peer's."""
    spec = fleet(2, roles=PAIR, cost_model=costs(bytes_per_s=100e9))
    if source_dies:
        spec = replace(spec, failures=(Failure("w1", 0.01, 0.01),))
    turn = prompt(0, 101 * 256)
    run = simulation(spec, Session("a", (turn,), 0.0), policy=policy)
    reader, peer = (worker.memory for worker in run.workers.values())
    reader.ssd.hold(turn.blocks.head(100), 60, (), reader.tick())
    peer.seal(turn.blocks.head(60), ())
    run.run()
    return run


def test_the_beginning_comes_from_a_peer_and_the_rest_from_the_own_ssd() -> None:
    run = gapped("static_pd+peers=any+restores=always_load")
    reader = run.workers["w0"]
    assert (reader.flows.staged.chunks, reader.flows.fetched.chunks) == (40, 60)
    assert list(run.tally.hits) == [0, 0, 40 * 256, 60 * 256]
    assert [one.owner for one in reader.memory.dram.runs()][:2] == ["w1", None]
    assert reader.flows.written.chunks == 1, "the last chunk; the peer's are the peer's"
    assert not any(one.pins for one in (reader.memory.dram.root, *reader.memory.dram.runs()))


@pytest.mark.parametrize(
    ("policy", "source_dies"),
    [("static_pd", False), ("static_pd+peers=any+restores=always_load", True)],
)
def test_without_the_beginning_the_rest_is_of_no_use(policy: str, source_dies: bool) -> None:
    run = gapped(policy, source_dies)
    reader = run.workers["w0"]
    assert list(run.tally.hits) == [0, 0, 0, 0]
    assert reader.flows.staged.chunks == (40 if source_dies else 0), "it had begun"
    assert reader.flows.fetched.chunks == 0
    assert reader.memory.ssd.reached(prompt(0, 101 * 256).blocks, 60).chunks == 101
