"""What of a prompt is restored: the planner's decision about what the tiers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetero_connector.artifacts.record import ROOT, ChunkRange, SharedTiers, StoredChunk, Tier
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import Mode, RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec.state_types import StateType
from ownership.simulator.state.runs import NOTHING, Found
from ownership.simulator.state.shape import StateShape
from ownership.simulator.state.short_chunks import ShortChunk


class Restore(NamedTuple):
    """What a plan loads, in chunks and checkpoints."""

    boundary_chunks: int
    resume_tokens: int
    dram_chunks: int
    ssd_chunks: int
    dram_checkpoints: int
    ssd_checkpoints: int
    own_chunks: int
    """Up to which DRAM or SSD has the chunks, those in pages among them; in gaps a peer."""
    from_peer: bool = False
    """Whether any of it is at a peer."""
    peer_checkpoints: int = 0
    ssd_stretches: Sequence[tuple[int, int]] = ()
    """Where it comes from SSD: from where, up to where; told only if a peer has some before it."""
    short: ShortChunk | None = None
    """Behind those chunks, in DRAM."""

    def boundary_tokens(self, chunk_tokens: int) -> int:
        """Tokens up to which it is restored."""
        return self.short.end if self.short else self.boundary_chunks * chunk_tokens

    @property
    def staged(self) -> bool:
        """Whether anything has to come from SSD first."""
        return self.ssd_chunks + self.ssd_checkpoints > 0


class StoredChunks:
    """`StoredChunk`s as a store's index would answer, one for each place and what is held there.

    The planner asks where a chunk ends and what of it is in which tier, not whose it is; so all
    prompts share them.
    """

    def __init__(self, shape: StateShape) -> None:
        self._shape, self._shared = shape, SharedTiers()
        self._made: dict[tuple[Tier, Tier | None], list[StoredChunk]] = {}

    def upto(self, chunks: int, prefix: Tier, checkpoint: Tier | None) -> list[StoredChunk]:
        """At least the first `chunks` of any chain, if all of them hold this."""
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
        """A short chunk in DRAM."""
        held = dict.fromkeys(self._shape.model.types_at(short.end), Tier.DRAM)
        tiers, number = self._shared.share(held)
        return StoredChunk(
            ChunkRange(ROOT, ROOT, short.start, short.end), tiers, b"", False, number
        )


class Restorer:
    """Asks the package's planner, for one worker."""

    def __init__(
        self, shape: StateShape, costs: CostModel, mode: Mode, *, replay: bool, known: StoredChunks
    ) -> None:
        """`replay`: whether windows may be rebuilt by computing tokens again. `known`: shared by
        all workers of a model."""
        self._shape, self._known = shape, known
        windows = any(True for _ in shape.model.layers_of(StateType.WINDOW_SWA))
        tokens = WindowReplay.of(shape.model).tokens if replay and windows else 0
        self._planner = RestorePlanner(shape.model, shape.layout, costs, mode, replay_tokens=tokens)

    def plan(
        self, dram: Found, on_ssd: Found, prompt_tokens: int, local_chunks: int, load: EngineLoad,
        at_peer: Found = NOTHING, short: ShortChunk | None = None,
    ) -> Restore | None:  # fmt: skip
        """What to restore past the chunks in pages, of what the tiers hold; None: nothing.

        `short`: in DRAM, behind the last of the chunks.
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
        gaps = _gaps(on_ssd, in_dram, own)
        stored = self._known.upto(deepest, Tier.DRAM, None)[:in_dram]
        stored += self._known.upto(deepest, Tier.SSD, None)[in_dram:own]
        at_peers = self._known.upto(deepest, Tier.PEER, None)
        stored += at_peers[own:deepest]
        for start, end in gaps:
            stored[start:end] = at_peers[start:end]
        tiers = {Tier.PEER: at_peer, Tier.SSD: on_ssd, Tier.DRAM: dram}
        checkpoints = self._checkpoints(tiers, deepest)
        for boundary, tier in checkpoints.items():
            prefix = Tier.DRAM if boundary <= in_dram else Tier.SSD
            if boundary > own or any(start < boundary <= end for start, end in gaps):
                prefix = Tier.PEER
            stored[boundary - 1] = self._known.upto(deepest, prefix, tier)[boundary - 1]
        limit_tokens = limit * size
        if short is not None:
            stored.append(self._known.short(short))
            limit_tokens = short.end
        plan = self._planner.plan(
            stored, local_chunks * size, limit_tokens, prompt_tokens, load
        ).plan
        if plan is None:
            return None
        chunks, rest = divmod(plan.boundary, size)
        kept = checkpoints.get(chunks) if plan.boundary_types else None
        if rest:
            kept = Tier.DRAM if plan.boundary_types else None
        from_dram = max(0, min(in_dram, chunks) - local_chunks)
        # What pages have of it is read as well if DRAM is to have what continues a gap.
        first = in_dram if gaps else max(in_dram, local_chunks)
        stretches = _between(gaps, first, min(own, chunks))
        return Restore(
            chunks,
            plan.resume_tokens,
            from_dram,
            sum(end - start for start, end in stretches),
            int(kept is Tier.DRAM),
            int(kept is Tier.SSD),
            min(own, chunks),
            chunks > own or kept is Tier.PEER or any(start < chunks for start, _ in gaps),
            int(kept is Tier.PEER),
            stretches if gaps else (),
            short if rest else None,
        )

    def _checkpoints(self, tiers: Mapping[Tier, Found], deepest: int) -> dict[int, Tier]:
        """Boundaries that have a checkpoint, and the last of the tiers that has each."""
        if not self._shape.has_checkpoints:
            return {}
        return {b: t for t, found in tiers.items() for b in found.checkpoints() if b <= deepest}


def _gaps(on_ssd: Found, first: int, last: int) -> list[tuple[int, int]]:
    """What of the chunks behind the first `first`, up to `last`, an SSD has not."""
    gaps = ((max(run.start, first), min(run.end, last)) for run in on_ssd.path if run.gap)
    return [(start, end) for start, end in gaps if start < end]


def _between(gaps: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """What is left of the chunks behind the first `first`, up to `last`."""
    left = []
    for start, end in (*gaps, (last, last)):
        if first < (start := min(start, last)):
            left.append((first, start))
        first = max(first, end)
    return left
