"""A worker's tiers: pages in HBM, sealed state in DRAM and on SSD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, TypeVar, get_args

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.admission import Admission
from hetero_connector.store.catalog.eviction import LeafLru, make_policy
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from ownership.scheduling.step import WorkerPrefix
from ownership.simulator.state.gapped import Added, GappedChunks, lacking
from ownership.simulator.state.owners import Owners, Stretch, append, covers
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import ChunkSizes, Found, Run
from ownership.simulator.state.shape import StateShape
from ownership.simulator.state.worth_writing import WorthWriting
from ownership.simulator.traces.block_runs import BlockRuns

Eviction = Literal[EvictionName, "session"]
"""The store's policies, and the least recently used session as a whole."""
EVICTIONS: tuple[Eviction, ...] = (*get_args(EvictionName), "session")

_Tier = TypeVar("_Tier", bound=ResidentChunks)


def emptied_by(
    kind: type[_Tier],
    eviction: Eviction,
    sizes: ChunkSizes,
    capacity_bytes: int,
    state_type: StateType,
    seconds_saved: SecondsSaved,
    now: Callable[[], int],
) -> _Tier:
    """A tier with a policy by name. `now`: the logical clock that its ticks are of."""
    name: EvictionName = "leaf_lru" if eviction == "session" else eviction
    policy = make_policy(name, seconds_saved, now)
    return kind(
        sizes, capacity_bytes, policy, state_type,
        by_recency=name != "value", whole_sessions=eviction == "session",
    )  # fmt: skip


@dataclass(frozen=True)
class TierBytes:
    """Capacities; 0: there is no such tier."""

    hbm: int
    """KV pages on one rank."""
    dram: int = 0
    ssd: int = 0


class Sealed(NamedTuple):
    """What a prompt added to the tiers."""

    dram: Added
    ssd: Sequence[Added]
    """In the order in which it is written."""


class WorkerMemory:
    """What one worker holds. Every tier keeps leaves last, so pages and DRAM hold prefixes of
    prompts; the SSD need not have what was others' when it was written."""

    def __init__(
        self,
        name: str,
        shape: StateShape,
        capacity: TierBytes,
        eviction: Eviction,
        seconds_saved: SecondsSaved,
        owners: Owners,
        admission: Admission | None = None,
    ) -> None:
        """`admission`: what is worth writing to SSD; None: everything."""
        self.name, self.shape, self._owners = name, shape, owners
        self._worth = None if admission is None else WorthWriting(shape, admission)
        self._has_replicas = False
        self._ticks = count(1)
        self._tick = 0
        self._eviction, self._seconds_saved = eviction, seconds_saved
        self.state_type = (shape.model.prefix_types or shape.model.state_types)[0]
        self.hbm = self._pages(capacity.hbm)
        self.dram = self._stored(ResidentChunks, capacity.dram)
        self.ssd = self._stored(GappedChunks, capacity.ssd)

    def _pages(self, capacity_bytes: int) -> ResidentChunks:
        """vLLM's own prefix cache: least recently used blocks, a prompt's last first.

        A running request holds its prefix's pages, and of windows only those it has reached: pages
        of the checkpoints before may leave, and its own pages have room for that one.
        """
        return ResidentChunks(
            self.shape.pages, capacity_bytes, LeafLru(), self.state_type, pins_checkpoints=False
        )

    def _stored(self, kind: type[_Tier], capacity_bytes: int) -> _Tier:
        return emptied_by(
            kind, self._eviction, self.shape.stored, capacity_bytes, self.state_type,
            self._seconds_saved, lambda: self._tick,
        )  # fmt: skip

    def lose(self) -> None:
        """The process died: what is on SSD stays."""
        self.hbm = self._pages(self.hbm.capacity_bytes)
        self.dram = self._stored(ResidentChunks, self.dram.capacity_bytes)
        self._has_replicas = False

    def tick(self) -> int:
        """A new moment of the logical clock that recency is counted by."""
        self._tick = next(self._ticks)
        return self._tick

    @property
    def now(self) -> int:
        """The logical clock's moment."""
        return self._tick

    def held(self, chain: BlockRuns) -> WorkerPrefix | None:
        """Where a prompt could resume, by tier, as a scheduler is told; None: nowhere. `chain`: up
        to the last boundary at which it could at all."""
        found = (self.hbm.find(chain), *self.stored(chain))
        hbm, dram, ssd = [x.chunks for x in found]
        if not (hbm or dram or ssd):
            return None
        if self.shape.has_checkpoints:
            hbm, dram, ssd = [x.deepest_checkpoint(x.chunks) for x in found]
        size = self.shape.chunk_tokens
        return WorkerPrefix(hbm * size, dram * size, max(dram, ssd) * size)

    def stored(self, chain: BlockRuns) -> tuple[Found, Found]:
        """What a restore finds in DRAM and on SSD."""
        in_dram = self.dram.find(chain)
        return in_dram, self.ssd.reached(chain, in_dram.chunks)

    def resumable(self, found: Found, limit_chunks: int) -> int:
        """The deepest boundary at which a request could resume from one tier, in chunks."""
        if self.shape.has_checkpoints:
            return found.deepest_checkpoint(limit_chunks)
        return min(found.chunks, limit_chunks)

    def seal(self, chain: BlockRuns, checkpoints: Sequence[int]) -> Sealed:
        """Hold a prompt's chunks in DRAM and write them to SSD."""
        tick, in_dram = self.tick(), Added(0, 0, ())
        stretches = [Stretch(chain.num_blocks, self.name)]
        if self.dram.capacity_bytes:
            in_dram, stretches = self._keep(chain, checkpoints, tick)
        if not self.ssd.capacity_bytes:
            return Sealed(in_dram, ())
        return Sealed(in_dram, self._write(chain, checkpoints, tick, stretches))

    def _keep(
        self, chain: BlockRuns, checkpoints: Sequence[int], tick: int
    ) -> tuple[Added, list[Stretch]]:
        """In DRAM; and whose is what was not there, whether there was room or not."""
        found, chunks = self.dram.find(chain), chain.num_blocks
        stretches = self._owners.claim(self.name, chain, found.chunks)
        if len(stretches) == 1 and stretches[0].owner == self.name:
            run, new, boundaries = self.dram.add(chain, chunks, checkpoints, tick, found=found)
            return Added(run.end, new, boundaries), stretches
        return self._add_owned(chain, stretches, checkpoints, tick), stretches

    def _add_owned(
        self,
        chain: BlockRuns,
        stretches: Iterable[Stretch],
        checkpoints: Sequence[int],
        tick: int,
    ) -> Added:
        end, chunks, boundaries = 0, 0, list[int]()
        for end, owner in stretches:
            self._has_replicas |= owner != self.name
            upto = [b for b in checkpoints if b <= end]
            run, new, fresh = self.dram.add(
                chain.head(end), end, upto, tick, None if owner == self.name else owner
            )
            end, chunks = run.end, chunks + new
            boundaries += fresh
        return Added(end, chunks, boundaries)

    def _write(
        self,
        chain: BlockRuns,
        checkpoints: Sequence[int],
        tick: int,
        stretches: Sequence[Stretch],
    ) -> Sequence[Added]:
        """What is ours of a prompt and not on SSD yet, and checkpoints on the way."""
        ssd, worth, chunks = self.ssd, self._worth, chain.num_blocks
        if not (self._has_replicas or ssd.may_have_gaps or worth):
            run, new, boundaries = ssd.add(chain, chunks, checkpoints, tick)
            return [Added(run.end, new, boundaries)]
        in_dram, on_ssd = self.dram.find(chain), ssd.find(chain)
        if self._has_replicas:
            in_dram = self._taken_over(chain, in_dram, tick)
            if self.shape.has_checkpoints:
                known = {*checkpoints, *in_dram.checkpoints()}
                checkpoints = sorted(known - {*on_ssd.checkpoints()})
        added: list[Added] = []
        for start, end in self._owned(in_dram, stretches, chunks):
            on_ssd = ssd.find(chain) if added else on_ssd
            for first, last in lacking(on_ssd, start, end):
                head = chain if last == chunks else chain.head(last)
                kept = [b for b in checkpoints if start < b <= last]
                if worth is None:
                    found = on_ssd if last == chunks and not added else None
                    added.append(ssd.hold(head, first, kept, tick, found))
                else:
                    admitted = worth.admit(in_dram, ssd.find(head), start, first, last)
                    head, kept = head.head(admitted.chunks), admitted.checkpoints
                    added.append(Added(first, 0, ()))
                    if admitted.chunks > first or kept:
                        added[-1] = ssd.hold(head, first, kept, tick)
                    worth.refund(admitted, added[-1].end, added[-1].checkpoints)
                start = last
        return added

    def hold(self, in_dram: Found) -> Run:
        """Pin what was found in DRAM until it is unpinned there; its root if nothing was."""
        run = in_dram.path[-1] if in_dram.path else self.dram.root
        self.dram.pin(run)
        return run

    def owners_of(self, chain: BlockRuns, chunks: int) -> list[Stretch]:
        """Whose is what a peer reads of a chain's first `chunks` chunks from DRAM."""
        if not self._has_replicas:
            return [Stretch(chunks, self.name)]
        stretches: list[Stretch] = []
        for run in self.dram.find(chain.head(chunks)).path:
            append(stretches, Stretch(min(run.end, chunks), run.owner or self.name))
        return stretches

    def add_read(
        self, chain: BlockRuns, stretches: Iterable[Stretch], checkpoints: Sequence[int]
    ) -> None:
        """Hold in DRAM what a peer sent; what is ours of it is ours again."""
        self._add_owned(chain, stretches, checkpoints, self.tick())

    def owned(self, chain: BlockRuns) -> list[tuple[int, int]]:
        """Stretches of a chain that are here as no replica."""
        on_ssd = self.ssd.find(chain).owned()
        if covers(on_ssd, 0, chain.num_blocks):
            return on_ssd
        return sorted(on_ssd + self.dram.find(chain).owned())

    def _owned(
        self, in_dram: Found, stretches: Sequence[Stretch], chunks: int
    ) -> list[tuple[int, int]]:
        """Stretches of a prompt of `chunks` chunks that are no replica. `stretches`: whose is what
        DRAM had no room for."""
        others = [(run.start, min(run.end, in_dram.chunks)) for run in in_dram.path if run.owner]
        begin = in_dram.chunks
        for end, owner in stretches:
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

    def _taken_over(self, chain: BlockRuns, in_dram: Found, tick: int) -> Found:
        """What was found in DRAM; replicas whose owner has them no more are ours from now on."""
        abandoned = self._abandoned(chain, in_dram)
        for run in abandoned:
            upto = chain.head(min(run.end, in_dram.chunks))
            for end, owner in self._owners.claim(self.name, upto, run.start):
                part = self.dram.use(self.dram.find(chain.head(end)), tick)
                part.owner = None if owner == self.name else owner
        return self.dram.find(chain) if abandoned else in_dram

    def _abandoned(self, chain: BlockRuns, in_dram: Found) -> list[Run]:
        """Replicas of which their owner does not have all any more."""
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
            if not covers(owned[owner], run.start, min(run.end, in_dram.chunks))
        ]

    def cache_pages(
        self, chain: BlockRuns, chunks: int, checkpoints: Sequence[int]
    ) -> tuple[Run, int]:
        """Leave a computed prompt's full pages to the engine's prefix cache.

        `chunks`: how many of the prompt's chunks are full. Returns the run at their end and how
        many of them are there.
        """
        if chunks < chain.num_blocks:
            chain = chain.head(chunks)
        run, _, _ = self.hbm.add(chain, chunks, checkpoints, self.tick())
        return run, run.end
