"""What one tier of one worker holds of all prompts' chunks, and what leaves it when it is full.

The store has a node for each chunk. A prompt of 100,000 tokens is 400 of them, and a simulation
touches thousands of prompts a second; so here a node is a run of chunks that the same requests
used. Nothing is lost by it: what used one chunk of a run used all, and the deepest leaves first.
The store's eviction policies decide which run that is; they see its last chunk.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.eviction import EvictionPolicy
from hetero_connector.store.catalog.nodes import Life
from ownership.simulator.state.runs import NOTHING, ChunkSizes, Found, Run, Tail, evictability
from ownership.simulator.traces.block_runs import BlockRuns


class ResidentChunks:
    """The chunks in one tier. `used_bytes` + `reserved_bytes` never exceed `capacity_bytes`."""

    def __init__(
        self,
        sizes: ChunkSizes,
        capacity_bytes: int,
        eviction: EvictionPolicy,
        state_type: StateType,
        *,
        by_recency: bool = True,
        whole_sessions: bool = False,
        pins_checkpoints: bool = True,
    ) -> None:
        """`by_recency`: `eviction` ranks by `last_used` alone, so that runs may grow and shrink by
        many chunks at once. `whole_sessions`: with a chunk all of its branch goes.
        `pins_checkpoints`: they stay as long as the chunks they belong to."""
        self.sizes, self.capacity_bytes = sizes, capacity_bytes
        self.used_bytes = self.reserved_bytes = 0
        self.evicted_bytes = 0
        self.root = Run(0, 0, 0, None)
        self._eviction, self._state_type = eviction, state_type
        self._by_recency, self._whole_sessions = by_recency, whole_sessions
        self._pins_checkpoints, self._num_checkpoints = pins_checkpoints, 0
        self._leaving: Run | None = None
        """What chunks left last, if more of it may: it stands first, and the policy does without
        it until something that was used less recently may leave, or it is used itself."""
        self._leaving_used = 0
        self._offers = not by_recency
        """Whether the policy knows who may leave: where recency is all it goes by, only once
        somebody has to. Many a tier is never full."""

    def find(self, chain: BlockRuns) -> Found:
        """How far the chain leads. Changes nothing."""
        children, chunks = self.root.children, 0
        if not chain.runs or chain.runs[0][0] not in children:
            return NOTHING
        path: list[Run] = []
        for first, count in chain.runs:
            while count:
                run = children.get(first)
                if run is None:
                    return Found(path, chunks)
                path.append(run)
                length = run.count
                if length > count:
                    return Found(path, chunks + count)
                chunks += length
                first += length
                count -= length
                children = run.children
        return Found(path, chunks)

    def use(self, found: Found, tick: int) -> Run:
        """Mark what was found as used; the run that ends there (the root if nothing was).

        `found` is not to be asked about checkpoints any more: its last run may be cut.
        """
        path = found.path
        if not path:
            return self.root
        last = path[-1]
        if found.chunks < last.end:
            last = self._split(last, found.chunks)
        self._mark(path[:-1], tick)
        self._mark((last,), tick)
        return last

    def pin(self, run: Run) -> None:
        """It and what it continues stay until `unpin`."""
        run.pins += 1

    def unpin(self, run: Run) -> None:
        """Undo one `pin`."""
        run.pins -= 1
        assert run.pins >= 0
        self._offer(run)

    def add(
        self, chain: BlockRuns, chunks: int, checkpoints: Sequence[int], tick: int,
        owner: str | None = None, found: Found | None = None,
    ) -> tuple[Run, int, list[int]]:  # fmt: skip
        """Hold a chain, which is `chunks` chunks long, and checkpoints at those boundaries.

        `owner`: the worker whose state it is; None: ours. What is here already stays whose it is.
        `found`: where the chain leads, if that was just asked.

        As far as there is room: chunks first, then checkpoints, the deepest first. Returns the
        run at the end of what is held, and how many chunks and which checkpoints are new.
        """
        found = self.find(chain) if found is None else found
        known = set(found.checkpoints()) if checkpoints else ()
        lacking = [boundary for boundary in checkpoints if boundary not in known]
        anchor = self.use(found, tick)
        wanted = chunks - found.chunks
        if not wanted and not lacking:
            return anchor, 0, []
        sizes = self.sizes
        self.pin(anchor)
        size_bytes = wanted * sizes.chunk_bytes + len(lacking) * sizes.checkpoint_bytes
        free_bytes = self.make_room(size_bytes)
        if free_bytes < size_bytes:
            wanted = min(wanted, free_bytes // max(1, sizes.chunk_bytes))
            free_bytes -= wanted * sizes.chunk_bytes
            lacking = [b for b in lacking if b <= found.chunks + wanted]
            fitting = free_bytes // max(1, sizes.checkpoint_bytes)
            lacking = lacking[max(0, len(lacking) - fitting) :]
        anchor.pins -= 1
        end = anchor
        if wanted:
            if wanted < chunks - found.chunks:
                chain = chain.head(found.chunks + wanted)
            end = self._extend(anchor, chain.tail(found.chunks), tick, owner)
        for boundary in lacking:
            insort(self._run_at(end, boundary).checkpoints, boundary)
        self._num_checkpoints += len(lacking)
        self.used_bytes += wanted * sizes.chunk_bytes + len(lacking) * sizes.checkpoint_bytes
        self._offer(end)
        return end, wanted, lacking

    def reserve(self, size_bytes: int, spared: Callable[[Run], bool] | None = None) -> bool:
        """Room for what is no chunk (yet), evicting if needed; False: there is too little."""
        if self.make_room(size_bytes, spared) < size_bytes:
            return False
        self.reserved_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give reserved room back."""
        self.reserved_bytes -= size_bytes
        assert self.reserved_bytes >= 0

    def make_room(self, size_bytes: int, spared: Callable[[Run], bool] | None = None) -> int:
        """Evict until so many bytes are free, or nothing may leave; how many are free.

        `spared`: asked of the next to leave whether it rather stays.
        """
        free_bytes = self.capacity_bytes - self.used_bytes - self.reserved_bytes
        while free_bytes < size_bytes:
            run = self._victim()
            if run is not None and spared is not None and spared(run):
                self._offer(run)
                break
            if run is not None:
                gone_bytes = self._evict(run, size_bytes - free_bytes)
            elif self._num_checkpoints and not self._pins_checkpoints:
                gone_bytes = self._evict_checkpoints(size_bytes - free_bytes)
            else:
                break
            self._gone(gone_bytes)
            free_bytes += gone_bytes
        return free_bytes

    def runs(self) -> Iterator[Run]:
        """Every run, parents before their children."""
        waiting = list(self.root.children.values())
        while waiting:
            run = waiting.pop()
            yield run
            waiting.extend(run.children.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where counts, the tree and the capacity contradict each other."""
        sizes, size_bytes, num_checkpoints = self.sizes, 0, 0
        for run in self.runs():
            assert run.parent is not None
            assert run.parent.children[run.first] is run
            assert (run.start, run.count > 0) == (run.parent.end, True)
            assert run.checkpoints == sorted(set(run.checkpoints))
            assert all(run.start < boundary <= run.end for boundary in run.checkpoints)
            assert all(child.last_used <= run.last_used for child in run.children.values())
            size_bytes += 0 if run.gap else run.count * sizes.chunk_bytes
            size_bytes += len(run.checkpoints) * sizes.checkpoint_bytes
            num_checkpoints += len(run.checkpoints)
        assert (size_bytes, num_checkpoints) == (self.used_bytes, self._num_checkpoints)
        assert 0 <= self.used_bytes + self.reserved_bytes <= self.capacity_bytes

    def _gone(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self.evicted_bytes += size_bytes

    def _mark(self, runs: Iterable[Run], tick: int) -> None:
        for run in runs:
            run.last_used, run.uses = tick, run.uses + 1
            if run.tail is not None:
                run.tail.last_used, run.tail.uses = tick, run.uses

    def _split(self, run: Run, chunks: int) -> Run:
        """Cut behind the chain's first `chunks` chunks: the new run before the cut."""
        parent, kept = run.parent, chunks - run.start
        assert parent is not None
        head = Run(run.first, kept, run.start, parent)
        head.last_used, head.uses = run.last_used, run.uses
        head.owner, head.gap = run.owner, run.gap
        at = bisect_right(run.checkpoints, chunks)
        head.checkpoints, run.checkpoints = run.checkpoints[:at], run.checkpoints[at:]
        parent.children[run.first] = head
        run.first, run.count, run.start = run.first + kept, run.count - kept, chunks
        run.parent, head.children[run.first] = head, run
        return head

    def _extend(self, anchor: Run, chain: BlockRuns, tick: int, owner: str | None) -> Run:
        """Put new chunks behind `anchor`; the run that ends with them."""
        for first, count in chain.runs:
            follows = anchor.first + anchor.count == first and anchor.parent is not None
            follows = follows and anchor.owner == owner and not anchor.gap
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
        """The run on the way to `run` that the chunk before a boundary is of."""
        while boundary <= run.start and run.parent is not None:
            run = run.parent
        return run

    def _offer(self, run: Run) -> None:
        """Tell the policy of a run whose end may leave."""
        if not self._offers or run.children or run.pins or run.parent is None:
            return
        leaving = self._leaving
        if leaving is not None and run.last_used < self._leaving_used:
            self._leaving = None
            self._offer(leaving)
        if run.tail is None:
            run.tail = Tail(
                run, self._state_type, self.sizes.chunk_bytes, placed=not self._by_recency
            )
            run.tail.last_used, run.tail.uses = run.last_used, run.uses
        if not self._by_recency:
            run.tail.place(self.sizes.tokens)
        self._eviction.offer(run.tail)

    def _victim(self) -> Run | None:
        """The next run to leave, from its end on."""
        run, self._leaving = self._leaving, None
        if run is not None:
            if run.last_used == self._leaving_used and not run.children and not run.pins:
                return run
            self._offer(run)
        if not self._offers:
            self._offers = True
            for run in self.runs():
                self._offer(run)
        tail = self._eviction.pop(evictability)
        if tail is None:
            return None
        assert isinstance(tail, Tail)
        return tail.run

    def _evict(self, run: Run, needed_bytes: int) -> int:
        """Take chunks from the run's end until so many bytes are free; what became free."""
        sizes, gone_bytes = self.sizes, 0
        while run.count and gone_bytes < needed_bytes:
            gone = 1
            if not run.checkpoints and self._by_recency and sizes.chunk_bytes:
                gone = min(run.count, -(-(needed_bytes - gone_bytes) // sizes.chunk_bytes))
            if self._whole_sessions:
                gone = run.count
            run.count -= gone
            gone_bytes += gone * sizes.chunk_bytes
            while run.checkpoints and run.checkpoints[-1] > run.end:
                run.checkpoints.pop()
                self._num_checkpoints -= 1
                gone_bytes += sizes.checkpoint_bytes
            if not self._by_recency:
                break
        if run.count:
            if self._by_recency:
                self._leaving, self._leaving_used = run, run.last_used
            else:
                self._offer(run)
            return gone_bytes
        parent = self._unhook(run)
        if self._whole_sessions and parent.parent and not parent.children and not parent.pins:
            self._offer(parent)
            return gone_bytes + self._evict(parent, parent.count * sizes.chunk_bytes)
        self._offer(parent)
        return gone_bytes

    def _unhook(self, run: Run) -> Run:
        """Take a leaf out of the tree; what is the end of its branch then."""
        parent = run.parent
        assert parent is not None
        del parent.children[run.first]
        if run.tail is not None:
            run.tail.life = Life.FORGOTTEN
        if run is self._leaving:
            self._leaving = None
        return parent

    def _evict_checkpoints(self, needed_bytes: int) -> int:
        """Take checkpoints of chunks that stay until so many bytes are free; what became free.

        Those nearest to a prompt's beginning first: requests went past them longest ago.
        """
        size_bytes, gone_bytes = max(1, self.sizes.checkpoint_bytes), 0
        holding = sorted((run for run in self.runs() if run.checkpoints), key=lambda run: run.start)
        for run in holding:
            gone = min(len(run.checkpoints), -(-(needed_bytes - gone_bytes) // size_bytes))
            del run.checkpoints[:gone]
            self._num_checkpoints -= gone
            gone_bytes += gone * self.sizes.checkpoint_bytes
            if gone_bytes >= needed_bytes:
                break
        return gone_bytes
