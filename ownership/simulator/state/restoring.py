"""The restore of a prompt: the package's planner decides by what the tiers hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hetero_connector.artifacts.record import ROOT, ChunkRange, SharedTiers, StoredChunk, Tier
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.planner import Mode, RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec.state_types import StateType
from ownership.simulator.state.chunks import ShortChunk
from ownership.simulator.state.runs import NO_MATCH, Match
from ownership.simulator.state.shape import StateShape


class Restore(NamedTuple):
    """The loads of a plan, in chunks and checkpoints."""

    boundary_chunks: int
    resume_tokens: int
    dram_chunks: int
    ssd_chunks: int
    dram_checkpoints: int
    ssd_checkpoints: int
    stored_chunks: int
    """Number of leading chunks that this worker's DRAM and SSD have after staging."""
    from_peer: bool = False
    """True if any of it is at a peer."""
    short: ShortChunk | None = None
    """The short chunk in DRAM after those chunks."""

    def boundary_tokens(self, chunk_tokens: int) -> int:
        """Return the boundary in tokens."""
        return self.short.end if self.short else self.boundary_chunks * chunk_tokens

    @property
    def is_staged(self) -> bool:
        """True if anything has to be read from SSD first."""
        return self.ssd_chunks + self.ssd_checkpoints > 0


class StoredChunkTable:
    """`StoredChunk`s as a store's index would return them, shared by all prompts.

    The planner asks where a chunk ends and which tier holds it, not which prompt it is of.
    """

    def __init__(self, shape: StateShape) -> None:
        self._shape, self._shared = shape, SharedTiers()
        self._made: dict[tuple[Tier, Tier | None], list[StoredChunk]] = {}

    def at_least(self, chunks: int, prefix: Tier, checkpoint: Tier | None) -> list[StoredChunk]:
        """Return `chunks` leading chunks or more, each held by these tiers."""
        made = self._made.setdefault((prefix, checkpoint), [])
        if len(made) < chunks:
            model, size = self._shape.model, self._shape.chunk_tokens
            held: dict[StateType, Tier] = dict.fromkeys(model.prefix_types, prefix)
            if checkpoint is not None:
                held |= dict.fromkeys(model.boundary_types, checkpoint)
            tiers: Mapping[StateType, Tier]
            tiers, number = self._shared.share(held)
            made += (
                StoredChunk(
                    ChunkRange(ROOT, ROOT, i * size, (i + 1) * size), tiers, b"", False, number
                )
                for i in range(len(made), 2 * chunks)
            )
        return made

    def short(self, short: ShortChunk) -> StoredChunk:
        """Return a short chunk that DRAM holds."""
        held = dict.fromkeys(self._shape.model.types_at(short.end), Tier.DRAM)
        tiers, number = self._shared.share(held)
        return StoredChunk(
            ChunkRange(ROOT, ROOT, short.start, short.end), tiers, b"", False, number
        )


class Restorer:
    """Asks the package's planner, for one worker."""

    def __init__(
        self, shape: StateShape, costs: CostModel, mode: Mode, table: StoredChunkTable
    ) -> None:
        """`table`: may be shared by all workers of a model."""
        self._shape, self._table = shape, table
        self._planner = RestorePlanner(shape.layout, costs, mode, replay_tokens=0)

    def plan(
        self, dram: Match, on_ssd: Match, prompt_tokens: int, local_chunks: int, load: EngineLoad,
        at_peer: Match = NO_MATCH, short: ShortChunk | None = None,
    ) -> Restore | None:  # fmt: skip
        """Plan what to restore after the `local_chunks` in pages; None: nothing.

        `short`: a short chunk in DRAM after the last of the chunks.
        """
        size = self._shape.chunk_tokens
        limit = (prompt_tokens - 1) // size
        own = max(dram.chunks, on_ssd.chunks)
        deepest = min(limit, max(own, at_peer.chunks))
        if short is not None and short.before != deepest:
            short = None
        if deepest <= local_chunks and short is None:
            return None
        in_dram, own = min(dram.chunks, deepest), min(own, deepest)
        stored = self._table.at_least(deepest, Tier.DRAM, None)[:in_dram]
        stored += self._table.at_least(deepest, Tier.SSD, None)[in_dram:own]
        stored += self._table.at_least(deepest, Tier.PEER, None)[own:deepest]
        tiers = {Tier.PEER: at_peer, Tier.SSD: on_ssd, Tier.DRAM: dram}
        checkpoints = self._checkpoints(tiers, deepest)
        for boundary, tier in checkpoints.items():
            prefix = Tier.DRAM if boundary <= in_dram else Tier.SSD
            if boundary > own:
                prefix = Tier.PEER
            stored[boundary - 1] = self._table.at_least(deepest, prefix, tier)[boundary - 1]
        limit_tokens = limit * size
        if short is not None:
            stored.append(self._table.short(short))
            limit_tokens = short.end
        plan = self._planner.plan(
            stored, local_chunks * size, limit_tokens, prompt_tokens, load
        ).plan
        if plan is None:
            return None
        chunks, rest = divmod(plan.boundary, size)
        checkpoint = checkpoints.get(chunks) if plan.boundary_types else None
        if rest:
            checkpoint = Tier.DRAM if plan.boundary_types else None
        return Restore(
            chunks,
            plan.resume_tokens,
            max(0, min(in_dram, chunks) - local_chunks),
            max(0, min(own, chunks) - max(in_dram, local_chunks)),
            int(checkpoint is Tier.DRAM),
            int(checkpoint is Tier.SSD),
            min(own, chunks),
            chunks > own or checkpoint is Tier.PEER,
            short if rest else None,
        )

    def _checkpoints(self, tiers: Mapping[Tier, Match], deepest: int) -> dict[int, Tier]:
        """Return the boundaries that have a checkpoint, each with the last tier that has it."""
        if not self._shape.has_checkpoints:
            return {}
        return {b: t for t, match in tiers.items() for b in match.checkpoints() if b <= deepest}
