"""Reads from one worker's DRAM into another's: under way, arrived, or cut off by a death."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ownership.scheduling.fleet import Link
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.channel import Channel, start_between
from ownership.simulator.machine.worker import Worker
from ownership.simulator.state.owners import Stretch, append
from ownership.simulator.state.restoring import Restore
from ownership.simulator.state.runs import Run
from ownership.simulator.state.short_chunks import ShortChunk
from ownership.simulator.traces.block_runs import BlockRuns

Ended = Callable[[int], None]
"""Told how many chunks of the chain the reader was brought to; 0: the read was cut off."""


@dataclass(eq=False, slots=True)
class _Read:
    source: Worker
    target: Worker
    chain: BlockRuns
    stretches: list[Stretch]
    """Of the chain up to the boundary that is read: whose they are."""
    chunks: int
    """That the reader lacked."""
    checkpoints: list[int]
    staged: list[int]
    """Checkpoints that the reader's own SSD has."""
    short: ShortChunk | None
    """The last of the chunks, if it is no full one."""
    above: Run
    """What the reader has of it, pinned."""
    end_s: float
    ended: Ended

    @property
    def channels(self) -> tuple[Channel, Channel]:
        return self.source.outgoing, self.target.incoming


class PeerReads:
    """All reads between a fleet's workers, in the order they were begun."""

    def __init__(self, loop: EventLoop, links: Mapping[tuple[str, str], Link]) -> None:
        self._loop, self._links = loop, links
        self._under_way: dict[_Read, None] = {}

    def begin(
        self, source: Worker, target: Worker, chain: BlockRuns, limit: int, ended: Ended,
        ssd_s: float = 0.0, short: ShortChunk | None = None, plan: Restore | None = None,
    ) -> bool:  # fmt: skip
        """Read what the target lacks of a chain's first `limit` chunks; False: there is nothing.

        `ssd_s`: when the target's own SSD is read, which the read then has to wait for.
        `short`: the chain's last chunk, if it is no full one. `plan`: if some of the chunks that
        follow others are on the target's own SSD.
        """
        if not (source.up and target.up and target.spec.capacity.dram):
            return False
        there, here = (worker.memory.dram.find(chain) for worker in (source, target))
        boundary = limit if plan else source.memory.resumable(there, limit)
        if boundary <= target.memory.resumable(here, limit):
            return False
        shape, own, staged = target.shape, 0, list[int]()
        checkpoints = [boundary] if shape.has_checkpoints else []
        if plan is not None:
            own = plan.ssd_chunks
            checkpoints, staged = (
                [boundary] * plan.peer_checkpoints,
                [boundary] * plan.ssd_checkpoints,
            )
        chunks = max(0, boundary - here.chunks) - own
        if short is not None and boundary <= short.before:
            short = None
        short_tokens = short.end - short.start if short else 0
        size_bytes = shape.moved_bytes(chunks, len(checkpoints), short_tokens)
        tokens = chunks * shape.chunk_tokens
        if short_tokens and chunks:
            tokens += short_tokens - shape.chunk_tokens
        seconds = target.peer_seconds(tokens, len(checkpoints))
        link = self._links.get((source.name, target.name)) if self._links else None
        if link is not None:
            seconds = max(seconds, link.latency_s + size_bytes * link.seconds_per_byte)
        now_s = self._loop.now_s
        end_s = start_between(source.outgoing, target.incoming, now_s, seconds, size_bytes)
        stretches = source.memory.owners_of(chain, boundary)
        if plan is not None:
            stretches = _with_own(stretches, plan.ssd_stretches, target.name)
        above = target.memory.hold(target.memory.dram.find(chain.head(boundary)))
        read = _Read(
            source,
            target,
            chain,
            stretches,
            chunks,
            checkpoints,
            staged,
            short,
            above,
            end_s,
            ended,
        )
        self._under_way[read] = None
        self._loop.at(max(end_s, ssd_s), self._arrived, read)
        return True

    def cut_off(self, worker: Worker) -> None:
        """The worker has died: whoever waits for a read of it or by it is told at once."""
        under_way = self._under_way
        lost = [read for read in under_way if worker in (read.source, read.target)]
        for read in lost:
            del under_way[read]
        busy_until_s: dict[Channel, float] = {}
        for read in under_way:
            for channel in read.channels:
                busy_until_s[channel] = max(read.end_s, busy_until_s.get(channel, 0.0))
        for read in lost:
            for channel in read.channels:
                channel.cut(max(self._loop.now_s, busy_until_s.get(channel, 0.0)))
        for read in lost:
            if read.target is not worker:  # else its DRAM is gone
                read.target.memory.dram.unpin(read.above)
        for read in lost:
            read.ended(0)

    def _arrived(self, read: _Read) -> None:
        if read not in self._under_way:
            return  # cut off
        del self._under_way[read]
        target, boundary = read.target, read.stretches[-1].end
        target.flows.fetched.add(read.chunks, read.checkpoints, read.short)
        target.memory.dram.unpin(read.above)
        checkpoints = read.checkpoints + read.staged
        target.memory.add_read(read.chain, read.stretches, checkpoints)
        read.ended(boundary)


def _with_own(
    stretches: Sequence[Stretch], own: Sequence[tuple[int, int]], name: str
) -> list[Stretch]:
    """What a reader has of a chain when it has read its own SSD, and a peer for the rest."""
    merged: list[Stretch] = []

    def add_peers(last: int) -> None:
        for end, owner in stretches:
            if min(end, last) > (merged[-1].end if merged else 0):
                append(merged, Stretch(min(end, last), owner))

    for start, end in own:
        add_peers(start)
        append(merged, Stretch(end, name))
    add_peers(stretches[-1].end)
    return merged
