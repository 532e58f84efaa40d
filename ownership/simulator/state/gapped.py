"""A tier that need not hold what its chunks continue: an SSD, whose engine writes what it owns.

What another worker owns of a chain is a *gap* here: runs of which only the place is known. They
take no room, and are gone with the last chunk that continues them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import Found, Run
from ownership.simulator.traces.block_runs import BlockRuns


class Added(NamedTuple):
    """Chunks that follow each other and checkpoints, new in a tier."""

    end: int
    """Chunks of the chain up to the last of them."""
    chunks: int
    checkpoints: Sequence[int]


def lacking(found: Found, behind: int, chunks: int) -> list[tuple[int, int]]:
    """Stretches that a tier lacks of what follows a chain's first `behind` chunks, up to `chunks`:
    from where, up to where. The last is what follows all that is known; it may be empty."""
    known = min(found.chunks, chunks)
    gaps = ((max(run.start, behind), min(run.end, known)) for run in found.path if run.gap)
    stretches = [(start, end) for start, end in gaps if start < end]
    return [*stretches, (max(known, behind), chunks)]


class GappedChunks(ResidentChunks):
    """`find` passes over gaps; `reached` says what is of use."""

    may_have_gaps = False

    def has(self, chain: BlockRuns) -> bool:
        """Whether the last chunk is here."""
        found = self.find(chain)
        return found.chunks == chain.num_blocks and not found.path[-1].gap

    def reached(self, chain: BlockRuns, covered: int) -> Found:
        """What is here for one who has the chain's first `covered` chunks from elsewhere: up to
        the first gap that those leave."""
        found = self.find(chain)
        if self.may_have_gaps and found.chunks > covered:
            for at, run in enumerate(found.path):
                if run.gap and min(run.end, found.chunks) > covered:
                    return Found(found.path[:at], run.start)
        return found

    def hold(
        self, chain: BlockRuns, first: int, checkpoints: Sequence[int], tick: int,
        found: Found | None = None,
    ) -> Added:  # fmt: skip
        """Hold what follows a chain's first `first` chunks, a stretch that is `lacking`, and
        those checkpoints. What is not here before it is a gap. As far as there is room.

        `found`: where the chain leads, if that was just asked.
        """
        chunks, filled = chain.num_blocks, 0
        found = self.find(chain) if found is None else found
        if first != found.chunks:
            if first < found.chunks:
                end, filled = self._fill(chain, first, tick)
                if end.end < chunks:
                    return Added(end.end, filled, ())
            elif first == chunks:  # what it would follow has made room for another stretch
                return Added(found.chunks, 0, ())
            else:
                self._open_gap(self.use(found, tick), chain.head(first).tail(found.chunks), tick)
            found = self.find(chain)
        if checkpoints:
            gaps = [run for run in found.path if run.gap]
            checkpoints = [b for b in checkpoints if not any(g.start < b <= g.end for g in gaps)]
        end, added, boundaries = self.add(chain, chunks, checkpoints, tick, found=found)
        return Added(end.end, filled + added, boundaries)

    def forget(self, chain: BlockRuns, chunks: int, checkpoints: Sequence[int]) -> None:
        """Let go of those checkpoints, and of all of a chain behind its first `chunks` chunks.
        Nothing of it may be pinned."""
        found = self.find(chain)
        for run in found.path:
            here = (b for b in run.checkpoints if b <= found.chunks)
            self._drop_checkpoints(run, [b for b in here if b in checkpoints])
        if found.chunks <= chunks:
            return
        lost = [run for run in found.path if run.end > chunks]
        if lost[-1].end > found.chunks:
            lost[-1] = self._split(lost[-1], found.chunks)
        if lost[0].start < chunks:
            self._split(lost[0], chunks)
        for run in lost:
            if not run.gap:
                self._drop_checkpoints(run, run.checkpoints)
                self._gone(run.count * self.sizes.chunk_bytes)
                run.gap = self.may_have_gaps = True
        self._offer(lost[-1])

    def check_integrity(self) -> None:
        """Check also that something continues every gap."""
        super().check_integrity()
        for run in self.runs():
            assert not run.gap or (run.children and not run.checkpoints)
            assert self.may_have_gaps or not run.gap

    def _open_gap(self, above: Run, chain: BlockRuns, tick: int) -> None:
        """Its end has to be followed by something at once."""
        self.may_have_gaps = True
        for first, count in chain.runs:
            run = Run(first, count, above.end, above)
            run.gap, above.children[first] = True, run
            run.last_used, run.uses = tick, 1
            above = run

    def _fill(self, chain: BlockRuns, first: int, tick: int) -> tuple[Run, int]:
        """Hold what a gap has of a chain behind its first `first` chunks, as far as there is room;
        the run at the end of what is there then, and how many chunks are new."""
        run = self.use(self.find(chain), tick)
        if run.start < first:
            self._split(run, first)
        assert run.gap
        above = run.parent
        assert above is not None
        self.pin(run)
        size_bytes = self.sizes.chunk_bytes
        free_bytes = self.make_room(run.count * size_bytes)
        fitting = min(run.count, free_bytes // max(1, size_bytes))
        run.pins -= 1
        filled = above
        if fitting:
            filled = self._split(run, first + fitting) if fitting < run.count else run
            filled.gap = False
            self.used_bytes += fitting * size_bytes
            self._offer(filled)
        if filled is not run:
            self._offer(run)
        return filled, fitting

    def _drop_checkpoints(self, run: Run, boundaries: Sequence[int]) -> None:
        run.checkpoints = [b for b in run.checkpoints if b not in boundaries]
        self._num_checkpoints -= len(boundaries)
        self._gone(len(boundaries) * self.sizes.checkpoint_bytes)

    def _offer(self, run: Run) -> None:
        if run.gap and not (run.children or run.pins):
            run = self._unhook(run)
        super()._offer(run)

    def _unhook(self, run: Run) -> Run:
        above = super()._unhook(run)
        while above.gap and not (above.children or above.pins):
            above = super()._unhook(above)
        return above
