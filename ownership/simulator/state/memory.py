"""A worker's tiers: pages in HBM, sealed state in DRAM and on SSD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, get_args

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.admission import Admission
from hetero_connector.store.base import EvictionName
from hetero_connector.store.eviction import LeafLru, make_policy
from hetero_connector.store.seconds_saved import SecondsSaved
from ownership.scheduling.step import HeldPrefix
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import ChunkSizes, Found, Run
from ownership.simulator.state.shape import StateShape
from ownership.simulator.state.worth_writing import WorthWriting
from ownership.simulator.traces.block_runs import BlockRuns

Eviction = Literal[EvictionName, "session"]
"""The store's policies, and the least recently used session as a whole."""
EVICTIONS: tuple[Eviction, ...] = (*get_args(EvictionName), "session")


def emptied_by(
    eviction: Eviction,
    sizes: ChunkSizes,
    capacity_bytes: int,
    state_type: StateType,
    seconds_saved: SecondsSaved,
    now: Callable[[], int],
) -> ResidentChunks:
    """A tier with a policy by name. `now`: the logical clock that its ticks are of."""
    name: EvictionName = "leaf_lru" if eviction == "session" else eviction
    policy = make_policy(name, seconds_saved, now)
    return ResidentChunks(
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
    """What a prompt added to the tiers: chunks, and the boundaries of checkpoints."""

    dram_chunks: int = 0
    dram_checkpoints: Sequence[int] = ()
    dram_end: int = 0
    """Chunks of the prompt in DRAM, the new ones among them: they are the last of these."""
    ssd_chunks: int = 0
    ssd_checkpoints: Sequence[int] = ()
    ssd_end: int = 0
    """The same on SSD."""


class Replica(NamedTuple):
    """A prompt's chunks up to `end`, from where the replica before ends; `owner` has them."""

    end: int
    owner: str


Owns = Callable[[str, BlockRuns], bool]
"""(worker, chunks) -> whether it is there and has the last of them, as no replica of another's."""


class WorkerMemory:
    """What one worker holds. Every tier keeps leaves last, so each holds prefixes of prompts."""

    def __init__(
        self,
        shape: StateShape,
        capacity: TierBytes,
        eviction: Eviction,
        seconds_saved: SecondsSaved,
        owns: Owns,
        admission: Admission | None = None,
    ) -> None:
        """`admission`: what is worth writing to SSD; None: everything."""
        self.shape, self._owns = shape, owns
        self._worth = None if admission is None else WorthWriting(shape, admission)
        self._has_replicas = False
        self._ticks = count(1)
        self._tick = 0
        self._eviction, self._seconds_saved = eviction, seconds_saved
        self.state_type = (shape.model.prefix_types or shape.model.state_types)[0]
        self.hbm = self._pages(capacity.hbm)
        self.dram = self._stored(shape.stored, capacity.dram)
        self.ssd = self._stored(shape.stored, capacity.ssd)

    def _pages(self, capacity_bytes: int) -> ResidentChunks:
        """vLLM's own prefix cache: least recently used blocks, a prompt's last first.

        A running request holds its prefix's pages, and of windows only those it has reached: pages
        of the checkpoints before may leave, and its own pages have room for that one.
        """
        return ResidentChunks(
            self.shape.pages, capacity_bytes, LeafLru(), self.state_type, pins_checkpoints=False
        )

    def _stored(self, sizes: ChunkSizes, capacity_bytes: int) -> ResidentChunks:
        return emptied_by(
            self._eviction, sizes, capacity_bytes, self.state_type, self._seconds_saved,
            lambda: self._tick,
        )  # fmt: skip

    def lose(self) -> None:
        """The process died: what is on SSD stays."""
        self.hbm = self._pages(self.hbm.capacity_bytes)
        self.dram = self._stored(self.shape.stored, self.dram.capacity_bytes)
        self._has_replicas = False

    def tick(self) -> int:
        """A new moment of the logical clock that recency is counted by."""
        self._tick = next(self._ticks)
        return self._tick

    @property
    def now(self) -> int:
        """The logical clock's moment."""
        return self._tick

    def held(self, chain: BlockRuns, limit_chunks: int) -> HeldPrefix | None:
        """Where a prompt could resume, by tier, as a scheduler is told; None: nowhere."""
        hbm, dram, ssd = self.hbm.find(chain), self.dram.find(chain), self.ssd.find(chain)
        if not (hbm.chunks or dram.chunks or ssd.chunks):
            return None
        size = self.shape.chunk_tokens
        if not self.shape.has_checkpoints:
            depths = (hbm.chunks, dram.chunks, max(dram.chunks, ssd.chunks))
            return HeldPrefix(*(min(depth, limit_chunks) * size for depth in depths))
        deepest = min(limit_chunks, max(dram.chunks, ssd.chunks))
        anywhere = max(self.resumable(dram, deepest), self.resumable(ssd, deepest))
        return HeldPrefix(
            self.resumable(hbm, limit_chunks) * size,
            self.resumable(dram, limit_chunks) * size,
            anywhere * size,
        )

    def resumable(self, found: Found, limit_chunks: int) -> int:
        """The deepest boundary at which a request could resume from one tier, in chunks."""
        if self.shape.has_checkpoints:
            return found.deepest_checkpoint(limit_chunks)
        return min(found.chunks, limit_chunks)

    def seal(self, chain: BlockRuns, chunks: int, checkpoints: Sequence[int]) -> Sealed:
        """Hold a prompt's `chunks` chunks in DRAM and write them to SSD."""
        tick = self.tick()
        sealed = Sealed()
        if self.dram.capacity_bytes:
            last, new, boundaries = self.dram.add(chain, chunks, checkpoints, tick)
            sealed = Sealed(new, boundaries, last.end)
        if self.ssd.capacity_bytes:
            end, new, boundaries = self._write(chain, checkpoints, tick)
            sealed = sealed._replace(ssd_chunks=new, ssd_checkpoints=boundaries, ssd_end=end.end)
        return sealed

    def _write(
        self, chain: BlockRuns, checkpoints: Sequence[int], tick: int
    ) -> tuple[Run, int, list[int]]:
        if self._has_replicas:
            chain, checkpoints = self._to_write(chain, checkpoints)
        if self._worth is None:
            return self.ssd.add(chain, chain.num_blocks, checkpoints, tick)
        in_dram, on_ssd = self.dram.find(chain), self.ssd.find(chain)
        admitted = self._worth.admit(in_dram, on_ssd, chain.num_blocks)
        chunks, checkpoints = admitted.chunks, admitted.checkpoints
        end, new, boundaries = self.ssd.add(chain.head(chunks), chunks, checkpoints, tick)
        self._worth.refund(admitted, end.end, boundaries)
        return end, new, boundaries

    def hold(self, in_dram: Found) -> Run:
        """Pin what was found in DRAM until it is unpinned there; its root if nothing was."""
        run = in_dram.path[-1] if in_dram.path else self.dram.root
        self.dram.pin(run)
        return run

    def replicas_of(self, chain: BlockRuns, chunks: int, name: str) -> list[Replica]:
        """What a peer that reads the first `chunks` chunks from DRAM has then; `name`: ours."""
        if not self._has_replicas:
            return [Replica(chunks, name)]
        replicas: list[Replica] = []
        for run in self.dram.find(chain.head(chunks)).path:
            owner = run.owner or name
            if replicas and replicas[-1].owner == owner:
                replicas.pop()
            replicas.append(Replica(min(run.end, chunks), owner))
        return replicas

    def add_replicas(
        self, chain: BlockRuns, replicas: Iterable[Replica], checkpoints: Sequence[int], name: str
    ) -> None:
        """Hold in DRAM what a peer sent; what is `name`'s is ours again."""
        tick = self.tick()
        for end, owner in replicas:
            self._has_replicas = True
            boundaries = [boundary for boundary in checkpoints if boundary <= end]
            owner_here = None if owner == name else owner
            self.dram.add(chain.head(end), end, boundaries, tick, owner_here)

    def owns(self, chain: BlockRuns) -> bool:
        """Whether the last chunk is here, as no replica."""
        chunks = chain.num_blocks
        if self.ssd.find(chain).chunks == chunks:
            return True
        found = self.dram.find(chain)
        return found.chunks == chunks and found.path[-1].owner is None

    def owner_died(self, name: str) -> None:
        """Replicas of what it had are ours."""
        if self._has_replicas:
            for run in self.dram.runs():
                if run.owner == name:
                    run.owner = None

    def _to_write(
        self, chain: BlockRuns, checkpoints: Sequence[int]
    ) -> tuple[BlockRuns, Sequence[int]]:
        """What of a prompt goes to SSD: no replica that its owner still has, nor what continues one
        (`store/admission.py`: what a restart could not reach)."""
        on_ssd, in_dram = self.ssd.find(chain).chunks, self.dram.find(chain)
        ours = chain.num_blocks
        for run in in_dram.path:
            if run.owner is None or run.end <= on_ssd:
                continue
            if self._owns(run.owner, chain.head(min(run.end, in_dram.chunks))):
                ours = max(on_ssd, run.start)
                break
            run.owner = None
        boundaries = {*checkpoints, *in_dram.checkpoints()}
        return chain.head(ours), sorted(boundary for boundary in boundaries if boundary <= ours)

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
