"""The chunks that one tier of one worker holds, and what leaves it when it is full.

The store has a node for each chunk. Here a node is a run of chunks, because a prompt of 100,000
tokens has 400 chunks and a simulation serves thousands of prompts a second. The result is the same:
a request that uses one chunk of a run uses all of them, and the deepest chunk leaves first. The
store's eviction policies choose the run; they see its last chunk.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.eviction import EvictionPolicy
from hetero_connector.store.catalog.nodes import Life
from ownership.simulator.state.runs import (
    NO_MATCH,
    ChunkSizes,
    LastChunk,
    Match,
    Run,
    evictability,
)
from ownership.simulator.traces.block_runs import BlockRuns


class ResidentChunks:
    """One tier. `used_bytes` + `reserved_bytes` never exceed `capacity_bytes`."""

    def __init__(
        self,
        sizes: ChunkSizes,
        capacity_bytes: int,
        eviction: EvictionPolicy,
        state_type: StateType,
        *,
        by_recency: bool = True,
        pins_checkpoints: bool = True,
    ) -> None:
        """`by_recency`: `eviction` ranks by `last_used` alone, so a run may grow and shrink by many
        chunks at once. `pins_checkpoints`: a checkpoint stays as long as its chunk."""
        self.sizes, self.capacity_bytes = sizes, capacity_bytes
        self.used_bytes = self.reserved_bytes = 0
        self.evicted_bytes = 0
        self.root = Run(0, 0, 0, None)
        self._eviction, self._state_type = eviction, state_type
        self._by_recency = by_recency
        self._pins_checkpoints, self._num_checkpoints = pins_checkpoints, 0
        self._held_bytes = 0
        """The part of `used_bytes` that pins keep."""
        self._next_victim: Run | None = None
        """The run that lost chunks last and has more. It is not in the policy, and leaves first
        until a run that was used less recently may leave, or it is used itself."""
        self._next_victim_used = 0
        self._policy_informed = not by_recency
        """True once the policy knows the runs that may leave. With recency alone that is when the
        first has to: many tiers are never full."""

    def match(self, chain: BlockRuns) -> Match:
        """Find the longest prefix of a chain that is here. Changes nothing."""
        children, chunks = self.root.children, 0
        if not chain.runs or chain.runs[0][0] not in children:
            return NO_MATCH
        path: list[Run] = []
        for first, count in chain.runs:
            while count:
                run = children.get(first)
                if run is None:
                    return Match(path, chunks)
                path.append(run)
                length = run.count
                if length > count:
                    return Match(path, chunks + count)
                chunks += length
                first += length
                count -= length
                children = run.children
        return Match(path, chunks)

    def use(self, match: Match, tick: int) -> Run:
        """Mark matched chunks as used, and return the run that ends there (the root if none).

        The last run may be cut, so do not ask `match` for checkpoints afterwards.
        """
        run = self.cut(match)
        self.mark(run, tick)
        return run

    def cut(self, match: Match) -> Run:
        """Return the run that ends with matched chunks, cut there if it is longer; see `use`."""
        if not match.path:
            return self.root
        last = match.path[-1]
        return self._split(last, match.chunks) if match.chunks < last.end else last

    def mark(self, run: Run, tick: int) -> None:
        """Mark a run and everything before it as used."""
        while run.parent is not None:
            run.last_used, run.uses = tick, run.uses + 1
            if run.last_chunk is not None:
                run.last_chunk.last_used, run.last_chunk.uses = tick, run.uses
            run = run.parent

    def pin(self, run: Run) -> None:
        """Keep a run and everything before it until `unpin`. O(runs before it)."""
        run.pins += 1
        self._hold(run, 1)

    def unpin(self, run: Run) -> None:
        """Undo one `pin`."""
        run.pins -= 1
        assert run.pins >= 0
        self._hold(run, -1)
        self._offer(run)

    def add(
        self, chain: BlockRuns, chunks: int, checkpoints: Sequence[int], tick: int,
        owner: str | None = None, match: Match | None = None,
    ) -> tuple[Run, int, list[int]]:  # fmt: skip
        """Add a chain of `chunks` chunks, and checkpoints at those boundaries.

        `owner`: the worker of which the new chunks are a replica; None: they are no replica. Chunks
        that are here already keep their owner. `match`: the chain's match, if it is known.

        If room is short, chunks come before checkpoints, and deep checkpoints before others.
        Returns the run at the end of the chain, the number of new chunks, and the new checkpoints.
        """
        match = self.match(chain) if match is None else match
        known = set(match.checkpoints()) if checkpoints else ()
        lacking = [boundary for boundary in checkpoints if boundary not in known]
        anchor = self.use(match, tick)
        wanted = chunks - match.chunks
        if not wanted and not lacking:
            return anchor, 0, []
        sizes = self.sizes
        anchor.pins += 1
        size_bytes = wanted * sizes.chunk_bytes + len(lacking) * sizes.checkpoint_bytes
        free_bytes = self.make_room(size_bytes)
        if free_bytes < size_bytes:
            wanted = min(wanted, free_bytes // max(1, sizes.chunk_bytes))
            free_bytes -= wanted * sizes.chunk_bytes
            lacking = [b for b in lacking if b <= match.chunks + wanted]
            fitting = free_bytes // max(1, sizes.checkpoint_bytes)
            lacking = lacking[max(0, len(lacking) - fitting) :]
        anchor.pins -= 1
        end = anchor
        if wanted:
            if wanted < chunks - match.chunks:
                chain = chain.head(match.chunks + wanted)
            end = self._extend(anchor, chain.tail(match.chunks), tick, owner)
        for boundary in lacking:
            run = self._run_at(end, boundary)
            insort(run.checkpoints, boundary)
            if run.held and self._pins_checkpoints:
                self._held_bytes += sizes.checkpoint_bytes
        self._num_checkpoints += len(lacking)
        self.used_bytes += wanted * sizes.chunk_bytes + len(lacking) * sizes.checkpoint_bytes
        self._offer(end)
        return end, wanted, lacking

    def reserve(self, size_bytes: int) -> bool:
        """Reserve room for other data, evicting if needed.

        False if all that may leave would be too little: then nothing leaves.
        """
        if size_bytes > self.capacity_bytes - self.reserved_bytes - self._held_bytes:
            return False
        free_bytes = self.make_room(size_bytes)
        assert free_bytes >= size_bytes, "what is not held may leave"
        self.reserved_bytes += size_bytes
        return True

    def reserve_up_to(self, size_bytes: int) -> int:
        """Reserve room as far as there is some, evicting if needed; return the bytes."""
        reserved_bytes = min(size_bytes, self.make_room(size_bytes))
        self.reserved_bytes += reserved_bytes
        return reserved_bytes

    def release(self, size_bytes: int) -> None:
        """Free reserved room."""
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0

    def make_room(self, size_bytes: int) -> int:
        """Evict until `size_bytes` are free or nothing more may leave; return the free bytes."""
        free_bytes = self.capacity_bytes - self.used_bytes - self.reserved_bytes
        while free_bytes < size_bytes:
            run = self._victim()
            if run is not None:
                freed_bytes = self._evict(run, size_bytes - free_bytes)
            elif self._num_checkpoints and not self._pins_checkpoints:
                freed_bytes = self._evict_checkpoints(size_bytes - free_bytes)
            else:
                break
            self.used_bytes -= freed_bytes
            self.evicted_bytes += freed_bytes
            free_bytes += freed_bytes
        return free_bytes

    def runs(self) -> Iterator[Run]:
        """Yield every run, parents before their children."""
        waiting = list(self.root.children.values())
        while waiting:
            run = waiting.pop()
            yield run
            waiting.extend(run.children.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, the tree and the capacity contradict each other."""
        sizes, size_bytes, num_checkpoints, held_bytes = self.sizes, 0, 0, 0
        for run in (self.root, *self.runs()):
            assert run.held == run.pins + sum(child.held for child in run.children.values())
            held_bytes += self._stay_bytes(run) if run.held else 0
        for run in self.runs():
            assert run.parent is not None
            assert run.parent.children[run.first] is run
            assert (run.start, run.count > 0) == (run.parent.end, True)
            assert run.checkpoints == sorted(set(run.checkpoints))
            assert all(run.start < boundary <= run.end for boundary in run.checkpoints)
            assert all(child.last_used <= run.last_used for child in run.children.values())
            size_bytes += 0 if run.is_missing else run.count * sizes.chunk_bytes
            size_bytes += len(run.checkpoints) * sizes.checkpoint_bytes
            num_checkpoints += len(run.checkpoints)
        assert (size_bytes, num_checkpoints) == (self.used_bytes, self._num_checkpoints)
        assert held_bytes == self._held_bytes
        assert 0 <= self.used_bytes + self.reserved_bytes <= self.capacity_bytes

    def _hold(self, run: Run | None, pins: int) -> None:
        """Add so many pins to a run and everything before it."""
        while run is not None:
            was_held, run.held = run.held, run.held + pins
            if not (was_held and run.held):
                self._held_bytes += pins * self._stay_bytes(run)
            run = run.parent

    def _stay_bytes(self, run: Run) -> int:
        """Return the bytes of a run that stay while it is held."""
        checkpoints = len(run.checkpoints) if self._pins_checkpoints else 0
        chunks = 0 if run.is_missing else run.count
        return chunks * self.sizes.chunk_bytes + checkpoints * self.sizes.checkpoint_bytes

    def _split(self, run: Run, chunks: int) -> Run:
        """Cut a run after the chain's first `chunks` chunks; return the new run before the cut."""
        parent, kept = run.parent, chunks - run.start
        assert parent is not None
        head = Run(run.first, kept, run.start, parent)
        head.last_used, head.uses = run.last_used, run.uses
        head.owner, head.is_missing, head.held = run.owner, run.is_missing, run.held
        at = bisect_right(run.checkpoints, chunks)
        head.checkpoints, run.checkpoints = run.checkpoints[:at], run.checkpoints[at:]
        parent.children[run.first] = head
        run.first, run.count, run.start = run.first + kept, run.count - kept, chunks
        run.parent, head.children[run.first] = head, run
        return head

    def _extend(self, anchor: Run, chain: BlockRuns, tick: int, owner: str | None) -> Run:
        """Append new chunks after `anchor`; return the run that ends with them."""
        for first, count in chain.runs:
            follows = anchor.first + anchor.count == first and anchor.parent is not None
            follows = follows and anchor.owner == owner and not anchor.is_missing
            if follows and self._by_recency and not anchor.children and not anchor.pins:
                anchor.count += count
            else:
                run = Run(first, count, anchor.end, anchor)
                run.owner = owner
                anchor.children[first] = run
                run.last_used, run.uses = tick, 1
                anchor = run
        return anchor

    def _run_at(self, run: Run, boundary: int) -> Run:
        """Return the run, at or before `run`, that contains the chunk before a boundary."""
        while boundary <= run.start and run.parent is not None:
            run = run.parent
        return run

    def _offer(self, run: Run) -> None:
        """Inform the policy of a run whose end may leave."""
        if not self._policy_informed or run.children or run.pins or run.parent is None:
            return
        victim = self._next_victim
        if victim is not None and run.last_used < self._next_victim_used:
            self._next_victim = None
            self._offer(victim)
        last = run.last_chunk
        if last is None:
            size_bytes, placed = self.sizes.chunk_bytes, not self._by_recency
            last = run.last_chunk = LastChunk(run, self._state_type, size_bytes, placed=placed)
            last.last_used, last.uses = run.last_used, run.uses
        if not self._by_recency:
            last.place(self.sizes.tokens)
        self._eviction.offer(last)

    def _victim(self) -> Run | None:
        """Return the run that loses its last chunks next."""
        run, self._next_victim = self._next_victim, None
        if run is not None:
            if run.last_used == self._next_victim_used and not run.children and not run.pins:
                return run
            self._offer(run)
        if not self._policy_informed:
            self._policy_informed = True
            for run in self.runs():
                self._offer(run)
        last = self._eviction.pop(evictability)
        if last is None:
            return None
        assert isinstance(last, LastChunk)
        return last.run

    def _evict(self, run: Run, needed_bytes: int) -> int:
        """Remove chunks from the run's end until `needed_bytes` are free; return the freed bytes.

        A policy that does not rank by recency is asked again after each chunk.
        """
        sizes, freed_bytes = self.sizes, 0
        while run.count and freed_bytes < needed_bytes:
            removed = 1
            if not run.checkpoints and self._by_recency and sizes.chunk_bytes:
                removed = min(run.count, -(-(needed_bytes - freed_bytes) // sizes.chunk_bytes))
            run.count -= removed
            freed_bytes += removed * sizes.chunk_bytes
            while run.checkpoints and run.checkpoints[-1] > run.end:
                run.checkpoints.pop()
                self._num_checkpoints -= 1
                freed_bytes += sizes.checkpoint_bytes
            if not self._by_recency:
                break
        if not run.count:
            self._offer(self._unlink(run))
        elif self._by_recency:
            self._next_victim, self._next_victim_used = run, run.last_used
        else:
            self._offer(run)
        return freed_bytes

    def _unlink(self, run: Run) -> Run:
        """Remove a leaf from the tree; return its parent."""
        parent = run.parent
        assert parent is not None
        del parent.children[run.first]
        if run.last_chunk is not None:
            run.last_chunk.life = Life.FORGOTTEN
        if run is self._next_victim:
            self._next_victim = None
        return parent

    def _evict_checkpoints(self, needed_bytes: int) -> int:
        """Remove checkpoints of chunks that stay until `needed_bytes` are free; return the bytes.

        Those nearest to a prompt's beginning go first: requests passed them longest ago.
        """
        size_bytes, freed_bytes = max(1, self.sizes.checkpoint_bytes), 0
        holding = sorted((run for run in self.runs() if run.checkpoints), key=lambda run: run.start)
        for run in holding:
            removed = min(len(run.checkpoints), -(-(needed_bytes - freed_bytes) // size_bytes))
            del run.checkpoints[:removed]
            self._num_checkpoints -= removed
            freed_bytes += removed * self.sizes.checkpoint_bytes
            if freed_bytes >= needed_bytes:
                break
        return freed_bytes
