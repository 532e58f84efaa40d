"""Small models and stored chains, and a slow planner that checks the real one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import (
    UNNUMBERED,
    ChunkKey,
    ChunkRange,
    SharedTiers,
    StoredChunk,
    Tier,
)
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel, CostTerms
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import HBM_S_PER_GIB_S, STALL_S_PER_S, EngineLoad
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType

KV, SWA, LOCAL = StateType.DENSE_KV, StateType.WINDOW_SWA, StateType.CHUNKED_LOCAL
CHUNK = 64

FULL = LayerSpec("full", 0, KV, 1, 16, 1000, 1024, "uint8", RestoreRule.EVERY_TOKEN)
WINDOW = replace(
    FULL, layer="window", group=1, state_type=SWA, restore_rule=RestoreRule.WINDOW, window=80,
    boundary_tokens=79,
)  # fmt: skip
CHUNKED = replace(
    FULL, layer="local", group=2, state_type=LOCAL, restore_rule=RestoreRule.CHUNK_START, window=192
)
DENSE = ModelSpec((FULL,), alignment=16)
HYBRID = ModelSpec((FULL, WINDOW), alignment=16)
LLAMA4 = ModelSpec((FULL, CHUNKED), alignment=16)
TWO_WINDOWS = ModelSpec((FULL, WINDOW, CHUNKED), alignment=16)
WINDOWS_ONLY = ModelSpec((WINDOW,), alignment=16)


def layout_of(model: ModelSpec) -> ArtifactLayout:
    return ArtifactLayout(model, CHUNK)


def chain_of(
    mappings: Sequence[Mapping[StateType, Tier]],
    tail_tokens: int = 0,
    shared: bool = True,
    chunk_tokens: int = CHUNK,
) -> list[StoredChunk]:
    """One chunk per mapping, the last cut to `tail_tokens` if given.

    Equal mappings are one object, as the index gives them, unless `shared` is False.
    """
    known = SharedTiers()
    stored = []
    for index, tiers in enumerate(mappings):
        start = index * chunk_tokens
        last = index == len(mappings) - 1
        end = start + (tail_tokens if tail_tokens and last else chunk_tokens)
        chunk = ChunkRange(ChunkKey((index + 1).to_bytes(16)), ChunkKey(bytes(16)), start, end)
        one, number = known.share(tiers) if shared else (dict(tiers), UNNUMBERED)
        stored.append(StoredChunk(chunk, one, number=number))
    return stored


def in_tier(tier: Tier, *types: StateType) -> dict[StateType, Tier]:
    return dict.fromkeys(types, tier)


def rates(
    latency_s: float, s_per_byte: float, while_computing_s: float = 0.0, **by_type: float
) -> TierRates:
    """The same rate for all types except those given by name."""
    per_byte = {t: by_type.get(t.value, s_per_byte) for t in StateType}
    return TierRates(latency_s, per_byte, s_per_byte, while_computing_s)


def costs_of(
    model: ModelSpec,
    compute: tuple[float, float, float] = (0.01, 1e-3, 1e-6),
    load: Mapping[Tier, TierRates] | None = None,
    step_tokens: int = 0,
) -> CostModel:
    """Costs that are known, not learned."""
    return CostModel(
        ComputeRegression(ComputeCoefficients(*compute)),
        LoadModel(model.state_types, load or {}),
        step_tokens,
    )


def deepest(
    model: ModelSpec,
    stored: Sequence[StoredChunk],
    local_tokens: int,
    limit_tokens: int,
    replay_tokens: int = 0,
) -> RestorePlan | None:
    """The plan of `always_load`."""
    planner = RestorePlanner(
        layout_of(model), costs_of(model), "always_load", replay_tokens=replay_tokens
    )
    planner.replay_when_missing = bool(replay_tokens)
    prompt_tokens = max(local_tokens, limit_tokens) + 1
    return planner.plan(stored, local_tokens, limit_tokens, prompt_tokens, EngineLoad()).plan


@dataclass(frozen=True)
class SlowPlanner:
    """Prices chunk by chunk with plain numbers, to check the arrays."""

    layout: ArtifactLayout
    costs: CostModel
    load: EngineLoad
    prompt_tokens: int

    def terms(
        self,
        chunks: Sequence[StoredChunk],
        start_tokens: int,
        replay_tokens: int = 0,
        cut: int | None = None,
    ) -> CostTerms:
        """The terms of loading `chunks`, the last with its boundary state unless that is replayed.

        `start_tokens`: where computing starts when `chunks` is empty. `cut`: the last of `chunks`
        is copied to pages up to there.
        """
        resume = cut or (chunks[-1].chunk.end - replay_tokens if chunks else start_tokens)
        compute_s, first_s = self._compute(resume)
        staged: dict[Tier, dict[StateType, float]] = {}
        to_pages: dict[StateType, float] = {}
        for stored in chunks:
            types = self.layout.model.prefix_types
            if stored is chunks[-1] and not replay_tokens:
                types = self.layout.model.state_types
            for t in types:
                size = self.layout.artifact_bytes(t, stored.chunk.start, stored.chunk.end)
                if not size:  # of a local chunk that has just begun nothing is stored
                    continue
                end = min(resume, stored.chunk.end) if cut else stored.chunk.end
                copied = self.layout.artifact_bytes(t, stored.chunk.start, end)
                to_pages[t] = to_pages.get(t, 0) + copied
                if stored.tiers[t] is not Tier.DRAM:
                    by_type = staged.setdefault(stored.tiers[t], {})
                    by_type[t] = by_type.get(t, 0) + size
        queue_s = self.costs.queue_s(self.load.queued_tokens)
        staging_s = max([self._seconds(tier, sizes) for tier, sizes in staged.items()], default=0.0)
        if staging_s:  # its end shows between two steps
            step_s = self._decode_step_s()
            staging_s = max(staging_s, step_s / 2) + step_s / 2
        exposed_s = dram_s = self._seconds(Tier.DRAM, to_pages)
        if share := self.load.hidden_share:
            layers = len(self.layout.model.stored_layers)
            hidden_s = share * dram_s
            exposed_s = (dram_s - hidden_s) + max(hidden_s - first_s, 0.0) + hidden_s / layers
        held_s = exposed_s + compute_s
        if parked := bool(chunks) and not replay_tokens and self._parks(exposed_s):
            exposed_s, held_s = dram_s + self._decode_step_s() / 2, compute_s
        waited_s = max(staging_s, queue_s)
        if staging_s or parked:  # it waits, so others go first
            ahead = self.load.queued_tokens + self.load.waiting_tokens
            waited_s = max(waited_s, self.costs.queue_s(ahead))
        page_bytes = sum(
            x.page_stride_bytes / x.block_tokens
            for x in self.layout.model.layers
            if x.restore_rule is RestoreRule.EVERY_TOKEN
        )
        gib = page_bytes * self.prompt_tokens / 2**30
        return CostTerms(
            queue_s,
            waited_s - queue_s + exposed_s,
            compute_s,
            STALL_S_PER_S * self.load.running_decodes * held_s,
            HBM_S_PER_GIB_S * gib * (exposed_s + compute_s),
        )

    def _parks(self, exposed_s: float) -> bool:
        if self.load.parking == "long" and self.load.running_decodes:
            return exposed_s > self._decode_step_s()
        return self.load.parking == "always"

    def _decode_step_s(self) -> float:
        decodes = self.load.running_decodes
        context = self.load.decoded_context
        return self.costs.delays().decode_step_s(decodes, context) if decodes else 0.0

    def _seconds(self, tier: Tier, sizes: Mapping[StateType, float]) -> float:
        ahead_bytes = self.load.in_flight_bytes.get(tier, 0)
        computing = self.load.running_decodes + self.load.queued_tokens > 0
        return self.costs.load.predict(tier, sizes, ahead_bytes, while_computing=computing)

    def _compute(self, resume: int) -> tuple[float, float]:
        """(all steps, the first step), step by step."""
        limit = self.costs.step_tokens or self.prompt_tokens
        steps = []
        while resume < self.prompt_tokens:
            new = min(limit, self.prompt_tokens - resume)
            steps.append(float(self.costs.compute.predict(new, resume)))
            resume += new
        return math.fsum(steps), steps[0] if steps else 0.0
