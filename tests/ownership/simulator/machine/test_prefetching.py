"""Staging ahead at one worker, driven by hand: what comes between is what counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from hetero_connector.spec.presets import PRESETS
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from hetero_connector.store.catalog.tick_times import TickTimes
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.channel import Channel
from ownership.simulator.machine.prefetching import Prefetching
from ownership.simulator.state.memory import TierBytes, WorkerMemory
from ownership.simulator.state.owners import Owners
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from tests.ownership.simulator.small_fleets import CHUNK_BYTES, DENSE, GIB, costs

LONG, OTHER = BlockRuns(((0, 66),)), BlockRuns(((500, 25),))
GAP_S, TURNS = 100.0, 8
LAST_S = GAP_S * (TURNS - 1) + 1.0
"""End of the last turn; the next is due `GAP_S` later."""


class OneWorker:
    """Sessions of the same long prompt that come back together, and whose state is on SSD."""

    def __init__(self, sessions: int = 1) -> None:
        cost_model = costs(bytes_per_s=1e9)
        saved_s = SecondsSaved(cost_model.compute.predict)
        shape = StateShape.of(PRESETS[DENSE](), 256)
        capacity = TierBytes(GIB, 66 * CHUNK_BYTES, 64 * GIB)
        self.loop, self.ssd_reads, self.staged = EventLoop(), Channel(), 0
        alone = Owners(lambda *_: ())
        self.memory = WorkerMemory("w0", shape, capacity, "leaf_lru", saved_s, alone)
        self.memory.ssd.add(LONG, 66, (), self.memory.tick())
        self.prefetching = Prefetching(
            self.loop, self.memory, cost_model, saved_s, self.ssd_reads, self._was_staged
        )
        for turn in range(TURNS):
            for session in range(sessions):
                self.loop.at(GAP_S * turn, self.prefetching.began, session)
                ended = partial(self.prefetching.ended, session, LONG)
                self.loop.at(GAP_S * turn + 1.0, ended)

    def hold(self, chain: BlockRuns) -> int:
        """As a seal does; how many chunks are new to DRAM."""
        return self.memory.dram.add(chain, chain.num_blocks, (), self.memory.tick())[1]

    def _was_staged(self, chunks: int, checkpoints: Sequence[int]) -> None:
        self.staged += chunks


def test_what_a_batch_continues_stays_while_it_is_read() -> None:
    """Another prompt's seal comes between a batch's start and its end."""
    worker = OneWorker()
    dram, loop = worker.memory.dram, worker.loop
    moved = 0

    def part_of_it_is_left() -> None:
        nonlocal moved
        dram.make_room(dram.capacity_bytes)
        dram.evicted_bytes = worker.staged = 0
        moved += worker.hold(LONG.head(50))
        look()

    def look() -> None:
        nonlocal moved
        if worker.ssd_reads.pending_s(loop.now_s):
            moved += worker.hold(OTHER)
        elif loop.now_s < LAST_S + GAP_S:
            loop.at(loop.now_s + 0.005, look)

    loop.at(LAST_S + 1.0, part_of_it_is_left)
    loop.run()
    assert moved > 50, "it came between"
    held = (dram.used_bytes + dram.evicted_bytes) // CHUNK_BYTES
    assert held == moved + worker.staged, "nothing is there that was not moved"
    assert not any(run.pins for run in (dram.root, *dram.runs()))
    dram.check_integrity()


def test_any_number_of_sessions_may_come_to_nothing_at_once() -> None:
    """While the first waits for the SSD all the others become due, and DRAM has no room."""
    worker = OneWorker(sessions=1_500)
    assert worker.memory.dram.reserve(worker.memory.dram.capacity_bytes)
    worker.loop.at(LAST_S + 1.0, lambda: worker.ssd_reads.start(LAST_S + 1.0, GAP_S - 2.0, 0))
    worker.loop.run()
    assert worker.staged == 0


def test_a_moment_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns end without a use between them."""
    noted: list[int] = []
    monkeypatch.setattr(TickTimes, "note", lambda _, tick, now_s: noted.append(tick))
    OneWorker(sessions=2).loop.run()
    assert noted
    assert noted == sorted(set(noted))
