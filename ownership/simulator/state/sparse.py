"""A tier that may lack chunks before those it holds: an SSD, to which a worker writes what it owns.

Chunks of a chain that another worker owns are *missing* here: runs that take no room and are
removed with the last chunk that continues them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import Match, Run
from ownership.simulator.traces.block_runs import BlockRuns


class Added(NamedTuple):
    """Consecutive chunks, and checkpoints, that are new in a tier."""

    end: int
    """Number of the chain's chunks up to the last of them."""
    chunks: int
    checkpoints: Sequence[int]


def missing_ranges(match: Match, start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of chunks from `start` to `end` that a tier lacks.

    The last range is the one after all that is known; it may be empty.
    """
    known = min(match.chunks, end)
    missing = ((max(x.start, start), min(x.end, known)) for x in match.path if x.is_missing)
    return [*((first, last) for first, last in missing if first < last), (max(known, start), end)]


class SparseChunks(ResidentChunks):
    """`match` passes missing runs; `usable` ends before them."""

    may_miss_chunks = False
    """False as long as no run was ever missing."""

    def usable(self, chain: BlockRuns, covered: int) -> Match:
        """Match a chain up to the first missing chunk after its first `covered` ones.

        A reader has those from elsewhere.
        """
        match = self.match(chain)
        if self.may_miss_chunks and match.chunks > covered:
            for at, run in enumerate(match.path):
                if run.is_missing and min(run.end, match.chunks) > covered:
                    return Match(match.path[:at], run.start)
        return match

    def write(
        self, chain: BlockRuns, first: int, checkpoints: Sequence[int], tick: int,
        match: Match | None = None,
    ) -> Added:  # fmt: skip
        """Add the chunks after a chain's first `first` ones, as far as there is room.

        They are one of its missing ranges; chunks before them that are not here become missing
        runs. `match`: the chain's match, if it is known.
        """
        chunks, filled = chain.num_blocks, 0
        match = self.match(chain) if match is None else match
        if first != match.chunks:
            if first < match.chunks:
                end, filled = self._fill(chain, first, tick)
                if end.end < chunks:
                    return Added(end.end, filled, ())
            elif first == chunks:  # the chunks before it were evicted for another range
                return Added(match.chunks, 0, ())
            else:
                between = chain.head(first).tail(match.chunks)
                self._add_missing(self.use(match, tick), between, tick)
            match = self.match(chain)
        if checkpoints:
            missing = [run for run in match.path if run.is_missing]
            checkpoints = [
                b for b in checkpoints if not any(run.start < b <= run.end for run in missing)
            ]
        end, added, boundaries = self.add(chain, chunks, checkpoints, tick, match=match)
        return Added(end.end, filled + added, boundaries)

    def check_integrity(self) -> None:
        """Check also that every missing run is continued by others."""
        super().check_integrity()
        for run in self.runs():
            assert not run.is_missing or (run.children and not run.checkpoints)
            assert self.may_miss_chunks or not run.is_missing

    def _add_missing(self, parent: Run, chain: BlockRuns, tick: int) -> None:
        """Append missing runs. The caller adds a chunk after them at once."""
        self.may_miss_chunks = True
        for first, count in chain.runs:
            run = Run(first, count, parent.end, parent)
            run.is_missing, parent.children[first] = True, run
            run.last_used, run.uses = tick, 1
            parent = run

    def _fill(self, chain: BlockRuns, first: int, tick: int) -> tuple[Run, int]:
        """Add the chunks of a missing run after a chain's first `first` ones.

        Returns the last run that is filled then, and the number of new chunks: fewer than the run
        has if room is short.
        """
        run = self.use(self.match(chain), tick)
        if run.start < first:
            self._split(run, first)
        assert run.is_missing
        parent = run.parent
        assert parent is not None
        run.pins += 1
        size_bytes = self.sizes.chunk_bytes
        free_bytes = self.make_room(run.count * size_bytes)
        fitting = min(run.count, free_bytes // max(1, size_bytes))
        run.pins -= 1
        filled = parent
        if fitting:
            filled = self._split(run, first + fitting) if fitting < run.count else run
            filled.is_missing = False
            self.used_bytes += fitting * size_bytes
            if filled.held:
                self._held_bytes += fitting * size_bytes
            self._offer(filled)
        if filled is not run:
            self._offer(run)
        return filled, fitting

    def _offer(self, run: Run) -> None:
        if run.is_missing and not (run.children or run.pins):
            run = self._unlink(run)
        super()._offer(run)

    def _unlink(self, run: Run) -> Run:
        parent = super()._unlink(run)
        while parent.is_missing and not (parent.children or parent.pins):
            parent = super()._unlink(parent)
        return parent
