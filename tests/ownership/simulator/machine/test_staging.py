"""Reads from an SSD: when what is read is there, and who waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.worker import Worker
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.checked_runs import check_tiers
from tests.ownership.simulator.machine.test_worker import simulation
from tests.ownership.simulator.small_fleets import (
    CHUNK_BYTES,
    DENSE,
    GIB,
    HYBRID,
    costs,
    fleet,
    prompt,
)

BYTES_PER_S = 10e9
READ_S = 1e-4 + 100 * CHUNK_BYTES / BYTES_PER_S
"""Seconds in which 100 chunks are read."""
TURN = prompt(0, 101 * 256)
LATER_S = READ_S / 2


def stored(
    *sessions: Session,
    dram_bytes: int = 16 * GIB,
    model: str = DENSE,
    restores: str = "always_load",
    bytes_per_s: float = BYTES_PER_S,
) -> tuple[FleetSimulation, Worker]:
    """Return a simulation whose only worker has 100 chunks of `TURN` on its SSD."""
    cost_model = costs(model, bytes_per_s=bytes_per_s)
    spec = fleet(1, model, TierBytes(16 * GIB, dram_bytes, 16 * GIB), cost_model=cost_model)
    run = simulation(spec, *sessions, policy=f"colocated+restores={restores}")
    (worker,) = run.workers.values()
    checkpoints = [100] if model == HYBRID else []
    worker.memory.ssd.add(TURN.blocks.head(100), 100, checkpoints, worker.memory.next_tick())
    return run, worker


def ran(run: FleetSimulation) -> dict[int, LiveRequest]:
    """Run a simulation; return its requests by their sessions."""
    found: dict[int, LiveRequest] = {}
    answered = run.tally.on_answered

    def keep(request: LiveRequest, now_s: float) -> None:
        found[request.session] = request
        answered(request, now_s)

    run.tally.on_answered = keep  # type: ignore[method-assign]
    run.run()
    for worker in run.workers.values():
        check_tiers(worker)
    return found


def test_what_is_read_is_there_when_the_read_has_ended() -> None:
    run, worker = stored(Session("a", (TURN,), 0.0))
    dram, seen = worker.memory.dram, list[tuple[int, int, int]]()

    def look() -> None:
        told = run.routers.prefixes(TURN.blocks.head(100), 256)["w0"].dram_tokens
        seen.append((told, dram.match(TURN.blocks).chunks, dram.reserved_bytes // CHUNK_BYTES))

    for at_s in (LATER_S, READ_S + 1e-6):
        run.loop.at(at_s, look)
    run.run()
    assert seen == [(0, 0, 100), (25_600, 100, 0)]


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_who_wants_what_is_being_read_waits_for_the_same_read(model: str) -> None:
    run, worker = stored(
        Session("a", (TURN,), 0.0), Session("b", (replace(TURN, output_tokens=3),), 1e-3),
        model=model,
    )  # fmt: skip
    staged = worker.flows.staged
    ends: list[float] = []
    worker.ssd_reads.on_transfer = lambda begin_s, end_s: ends.append(end_s)
    first, second = ran(run).values()
    assert (staged.chunks, staged.checkpoints.total()) == (100, int(model == HYBRID))
    assert len(ends) == 1
    assert first.hits.ssd == second.hits.ssd == 25_600
    assert min(first.first_token_s, second.first_token_s) > ends[0]
    assert second.staged_s == pytest.approx(ends[0] - 1e-3)


def test_what_no_other_request_reads_is_read_after_it() -> None:
    """The first one reads 60 of the chunks, the second one the rest."""
    short = replace(prompt(0, 61 * 256), output_tokens=1)
    other = replace(TURN, blocks=BlockRuns(((0, 40), (900, 61))))
    run, worker = stored(
        Session("a", (short,), 0.0), Session("b", (TURN,), LATER_S / 2),
        Session("c", (other,), LATER_S / 2 + 1e-3),
    )  # fmt: skip
    requests = ran(run)
    first, second, third = (requests[number] for number in range(3))
    assert worker.flows.staged.chunks == 100
    assert (first.hits.ssd, third.hits.ssd) == (60 * 256, 40 * 256)
    # By then the first one has computed its last chunk, and all of its are in pages.
    assert (second.hits.hbm, second.hits.ssd) == (61 * 256, 39 * 256)
    assert second.staged_s == pytest.approx(READ_S + 1e-4 - LATER_S / 2)
    assert third.staged_s < second.staged_s


@pytest.mark.parametrize("shared", [101, 90, 10])
def test_what_is_shared_of_a_read_is_no_queue_before_it(shared: int) -> None:
    """A read of 79 chunks is faster than computing them, and after another such read it is not.

    The second prompt has all 79, or 10 of them and others on the SSD.
    """
    blocks = BlockRuns.of_runs((*TURN.blocks.head(shared).runs, (500, 101 - shared)))
    other = replace(TURN, blocks=blocks)
    run, worker = stored(
        Session("a", (TURN,), 0.0), Session("b", (other,), 1e-3),
        restores="cost", bytes_per_s=17e9,
    )  # fmt: skip
    worker.memory.ssd.add(blocks.head(100), 100, [], worker.memory.next_tick())
    requests = ran(run)
    assert requests[0].hits.ssd == 79 * 256
    assert requests[1].hits.ssd == (79 * 256 if shared > 10 else 0)


def test_room_is_taken_once_for_what_two_reads_bring() -> None:
    """The second request has in pages what is read into DRAM for the first one."""
    short = replace(prompt(0, 61 * 256), output_tokens=1)
    run, worker = stored(Session("a", (short,), 0.0), Session("b", (TURN,), LATER_S))
    memory, seen = worker.memory, list[int]()

    def cache() -> None:
        memory.hbm.add(TURN.blocks.head(60), 60, (), memory.next_tick())

    def look() -> None:
        seen.append(memory.dram.reserved_bytes // CHUNK_BYTES)

    for at_s, act in ((0.9 * LATER_S, cache), (0.9 * LATER_S, look), (1.01 * LATER_S, look)):
        run.loop.at(at_s, act)
    ran(run)
    assert seen == [60, 100]
    assert worker.flows.staged.chunks == 100
    assert memory.dram.match(TURN.blocks).chunks == 101


def test_a_read_keeps_what_it_continues_and_what_it_reads() -> None:
    """All that may leave is evicted while the rest of a prompt is read, and before that."""
    short = replace(prompt(0, 61 * 256), output_tokens=1)
    run, worker = stored(Session("a", (short,), 0.0), Session("b", (TURN,), LATER_S / 2))
    memory, seen = worker.memory, list[tuple[int, int]]()

    def evict() -> None:
        for tier in (memory.dram, memory.ssd):
            tier.make_room(tier.capacity_bytes)
        seen.append((memory.dram.match(TURN.blocks).chunks, memory.ssd.match(TURN.blocks).chunks))

    for at_s in (LATER_S, 0.9 * READ_S):
        run.loop.at(at_s, evict)
    ran(run)
    assert seen == [(0, 100), (60, 100)]
    assert worker.flows.staged.chunks == 100
    assert memory.dram.match(TURN.blocks).chunks == 101


def test_reads_have_room_for_what_dram_can_hold() -> None:
    """A third of the chunks fit; the rest is computed, and what waits is served, too."""
    sessions = [Session(str(i), (TURN,), i * LATER_S / 2) for i in range(3)]
    run, worker = stored(*sessions, dram_bytes=33 * CHUNK_BYTES)
    requests = ran(run)
    assert len(requests) == 3
    assert requests[0].hits.ssd == 33 * 256
    assert worker.flows.staged.chunks == 100
