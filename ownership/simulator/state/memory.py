"""The tiers of a worker: pages in HBM, sealed state in DRAM and on SSD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, get_args

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.eviction import LeafLru, make_policy
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from ownership.scheduling.step import WorkerPrefix
from ownership.simulator.state.owners import ChunkOwners, OwnedSpan, append_span, are_covered
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import NO_MATCH, ChunkSizes, Match, Run
from ownership.simulator.state.shape import StateShape
from ownership.simulator.state.sparse import Added, SparseChunks, missing_ranges
from ownership.simulator.traces.block_runs import BlockRuns

EVICTIONS: tuple[EvictionName, ...] = get_args(EvictionName)
_Tier = TypeVar("_Tier", bound=ResidentChunks)


def make_tier(
    kind: type[_Tier],
    eviction: EvictionName,
    sizes: ChunkSizes,
    capacity_bytes: int,
    state_type: StateType,
    seconds_saved: SecondsSaved,
    now: Callable[[], int],
) -> _Tier:
    """Make an empty tier. `now`: the logical clock that its ticks are of."""
    policy = make_policy(eviction, seconds_saved, now)
    return kind(sizes, capacity_bytes, policy, state_type, by_recency=eviction == "leaf_lru")


@dataclass(frozen=True)
class TierBytes:
    """Capacities of a worker's tiers; 0: there is no such tier."""

    hbm: int
    """KV pages on one rank."""
    dram: int = 0
    ssd: int = 0


class Sealed(NamedTuple):
    """The part of a prompt that was new in the tiers."""

    dram: Added
    ssd: Sequence[Added]


class WorkerMemory:
    """All state of one worker. Pages and DRAM hold prefixes of prompts; the SSD may miss chunks
    that other workers own."""

    def __init__(
        self,
        name: str,
        shape: StateShape,
        capacity: TierBytes,
        eviction: EvictionName,
        seconds_saved: SecondsSaved,
        owners: ChunkOwners,
    ) -> None:
        self.name, self.shape, self._owners = name, shape, owners
        self._has_replicas = False
        self._tick = 0
        state_type = (shape.model.prefix_types or shape.model.state_types)[0]
        # vLLM's prefix cache: least recently used blocks, a prompt's last ones first. A running
        # request keeps its prefix's pages, but not the windows that it has passed.
        self.hbm = ResidentChunks(
            shape.pages, capacity.hbm, LeafLru(), state_type, pins_checkpoints=False
        )

        def stored(kind: type[_Tier], capacity_bytes: int) -> _Tier:
            sizes, now = shape.stored, lambda: self._tick
            return make_tier(
                kind, eviction, sizes, capacity_bytes, state_type, seconds_saved, now
            )  # fmt: skip

        self.dram = stored(ResidentChunks, capacity.dram)
        self.ssd = stored(SparseChunks, capacity.ssd)

    def next_tick(self) -> int:
        """Advance the logical clock of recency, and return it."""
        self._tick += 1
        return self._tick

    def worker_prefix(self, chain: BlockRuns, *, sees_pages: bool) -> WorkerPrefix | None:
        """Return where a prompt could resume, as a scheduler sees it; None: nowhere.

        `chain`: the prompt up to the last boundary at which it could resume. `sees_pages`: False
        if the scheduler does not know what is in HBM.
        """
        matches = (self.hbm.match(chain) if sees_pages else NO_MATCH, *self.stored(chain))
        hbm, dram, ssd = [x.chunks for x in matches]
        if not (hbm or dram or ssd):
            return None
        if self.shape.has_checkpoints:
            hbm, dram, ssd = [x.deepest_checkpoint(x.chunks) for x in matches]
        size = self.shape.chunk_tokens
        return WorkerPrefix(hbm * size, dram * size, max(dram, ssd) * size)

    def stored(self, chain: BlockRuns) -> tuple[Match, Match]:
        """Return what a restore can read from DRAM and from SSD."""
        in_dram = self.dram.match(chain)
        return in_dram, self.ssd.usable(chain, in_dram.chunks)

    def resumable(self, match: Match, limit_chunks: int) -> int:
        """Return the deepest boundary at which a request could resume from one tier, in chunks."""
        if self.shape.has_checkpoints:
            return match.deepest_checkpoint(limit_chunks)
        return min(match.chunks, limit_chunks)

    def seal(self, chain: BlockRuns, checkpoints: Sequence[int]) -> Sealed:
        """Add a computed prompt to DRAM, and write to SSD what this worker owns of it."""
        tick, in_dram = self.next_tick(), Added(0, 0, ())
        spans = [OwnedSpan(chain.num_blocks, self.name)]
        if self.dram.capacity_bytes:
            in_dram, spans = self._keep(chain, checkpoints, tick)
        if not self.ssd.capacity_bytes:
            return Sealed(in_dram, ())
        return Sealed(in_dram, self._write(chain, checkpoints, tick, spans))

    def pin_match(self, in_dram: Match) -> Run:
        """Pin matched chunks in DRAM; return the run to unpin there."""
        run = in_dram.path[-1] if in_dram.path else self.dram.root
        self.dram.pin(run)
        return run

    def owners_of(self, chain: BlockRuns, chunks: int) -> list[OwnedSpan]:
        """Return the owners of a chain's first `chunks` chunks, which are in DRAM."""
        if not self._has_replicas:
            return [OwnedSpan(chunks, self.name)]
        spans: list[OwnedSpan] = []
        for run in self.dram.match(chain.head(chunks)).path:
            append_span(spans, OwnedSpan(min(run.end, chunks), run.owner or self.name))
        return spans

    def add_read(
        self, chain: BlockRuns, spans: Iterable[OwnedSpan], checkpoints: Sequence[int]
    ) -> None:
        """Add to DRAM what a peer sent."""
        self._add_owned(chain, spans, checkpoints, self.next_tick())

    def owned(self, chain: BlockRuns) -> list[tuple[int, int]]:
        """Return the ranges of a chain that are here and no replica."""
        on_ssd = self.ssd.match(chain).owned()
        if are_covered(on_ssd, 0, chain.num_blocks):
            return on_ssd
        return sorted(on_ssd + self.dram.match(chain).owned())

    def cache_pages(
        self, chain: BlockRuns, chunks: int, checkpoints: Sequence[int]
    ) -> tuple[Run, int]:
        """Add a computed prompt's first `chunks` chunks, the full ones, to the prefix cache.

        Returns the run at their end, and how many of them are there.
        """
        if chunks < chain.num_blocks:
            chain = chain.head(chunks)
        run, _, _ = self.hbm.add(chain, chunks, checkpoints, self.next_tick())
        return run, run.end

    def _keep(
        self, chain: BlockRuns, checkpoints: Sequence[int], tick: int
    ) -> tuple[Added, list[OwnedSpan]]:
        """Add a chain to DRAM. Returns also the owners of its new chunks, added or not."""
        match, chunks = self.dram.match(chain), chain.num_blocks
        spans = self._owners.claim(self.name, chain, match.chunks)
        if len(spans) == 1 and spans[0].owner == self.name:
            run, new, boundaries = self.dram.add(chain, chunks, checkpoints, tick, match=match)
            return Added(run.end, new, boundaries), spans
        return self._add_owned(chain, spans, checkpoints, tick), spans

    def _add_owned(
        self,
        chain: BlockRuns,
        spans: Iterable[OwnedSpan],
        checkpoints: Sequence[int],
        tick: int,
    ) -> Added:
        end, chunks, boundaries = 0, 0, list[int]()
        for end, owner in spans:
            self._has_replicas |= owner != self.name
            upto = [b for b in checkpoints if b <= end]
            run, new, added = self.dram.add(
                chain.head(end), end, upto, tick, None if owner == self.name else owner
            )
            end, chunks = run.end, chunks + new
            boundaries += added
        return Added(end, chunks, boundaries)

    def _write(
        self,
        chain: BlockRuns,
        checkpoints: Sequence[int],
        tick: int,
        spans: Sequence[OwnedSpan],
    ) -> Sequence[Added]:
        """Write the chunks of a prompt that this worker owns and its SSD lacks."""
        ssd, chunks = self.ssd, chain.num_blocks
        if not (self._has_replicas or ssd.may_miss_chunks):
            run, new, boundaries = ssd.add(chain, chunks, checkpoints, tick)
            return [Added(run.end, new, boundaries)]
        in_dram, on_ssd = self.dram.match(chain), ssd.match(chain)
        if self._has_replicas:
            in_dram = self._take_over(chain, in_dram, tick)
            if self.shape.has_checkpoints:
                known = {*checkpoints, *in_dram.checkpoints()}
                checkpoints = sorted(known - {*on_ssd.checkpoints()})
        added: list[Added] = []
        for start, end in self._owned_ranges(in_dram, spans, chunks):
            on_ssd = ssd.match(chain) if added else on_ssd
            for first, last in missing_ranges(on_ssd, start, end):
                head = chain if last == chunks else chain.head(last)
                kept = [b for b in checkpoints if start < b <= last]
                match = on_ssd if last == chunks and not added else None
                added.append(ssd.write(head, first, kept, tick, match))
                start = last
        return added

    def _owned_ranges(
        self, in_dram: Match, spans: Sequence[OwnedSpan], chunks: int
    ) -> list[tuple[int, int]]:
        """Return the ranges of a prompt of `chunks` chunks that are no replica.

        `spans`: the owners of the chunks for which DRAM had no room.
        """
        others = [(run.start, min(run.end, in_dram.chunks)) for run in in_dram.path if run.owner]
        begin = in_dram.chunks
        for end, owner in spans:
            if owner != self.name and end > begin:
                others.append((begin, end))
            begin = max(begin, end)
        owned, start = [], 0
        for begin, end in (*others, (chunks, chunks)):
            if start < begin:
                owned.append((start, begin))
            if start < end:
                start = end
        return owned

    def _take_over(self, chain: BlockRuns, in_dram: Match, tick: int) -> Match:
        """Claim the replicas whose owner has them no more; return the match in DRAM after that."""
        abandoned = self._abandoned(chain, in_dram)
        for run in abandoned:
            upto = chain.head(min(run.end, in_dram.chunks))
            for end, owner in self._owners.claim(self.name, upto, run.start):
                part = self.dram.use(self.dram.match(chain.head(end)), tick)
                part.owner = None if owner == self.name else owner
        return self.dram.match(chain) if abandoned else in_dram

    def _abandoned(self, chain: BlockRuns, in_dram: Match) -> list[Run]:
        """Return the replicas of which the owner lacks a chunk."""
        replicas = [(run, run.owner) for run in in_dram.path if run.owner is not None]
        if not replicas:
            return []
        upto = chain.head(min(replicas[-1][0].end, in_dram.chunks))
        owned = {
            owner: self._owners.owned(owner, upto) for owner in {owner for _, owner in replicas}
        }
        return [
            run
            for run, owner in replicas
            if not are_covered(owned[owner], run.start, min(run.end, in_dram.chunks))
        ]
