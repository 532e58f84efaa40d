"""Record the metrics of restores: tokens by tier, and bytes by state type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.engine.scheduler.requests import PendingRestore
from hetero_connector.metrics import Recorder
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.spec import StateType

_NEAREST_FIRST = tuple(Tier)


class TokenSources:
    """Counts from where the tokens of admitted requests came, since the start.

    The scheduler's thread counts; any thread may ask.
    """

    def __init__(self) -> None:
        self._admitted = self._local = 0
        self._restored = dict.fromkeys((tier.value for tier in Tier), 0)

    def add_admitted(self, tokens: int, local_tokens: int) -> None:
        """Count a request that has got its pages, with those of its tokens that were in pages."""
        self._admitted += tokens
        self._local += local_tokens

    def add_restored(self, tokens_by_tier: Mapping[str, int]) -> None:
        """Count a restore whose loads have ended."""
        for tier, tokens in tokens_by_tier.items():
            self._restored[tier] += tokens

    def tokens(self) -> dict[str, int]:
        """Return the tokens by source: the engine's own cache, each tier, and computing."""
        restored = dict(self._restored)
        computed = self._admitted - self._local - sum(restored.values())
        return {"engine_cache": self._local, **restored, "computed": max(0, computed)}


class RestoreCounter:
    """Records restores whose loads have ended."""

    def __init__(
        self, layout: ArtifactLayout, recorder: Recorder, clock: Callable[[], float]
    ) -> None:
        self.sources = TokenSources()
        self._layout = layout
        self._recorder = recorder
        self._clock = clock

    def count(self, pending: PendingRestore) -> None:
        """Record one restore, and the time of its end."""
        pending.loaded_s = self._clock()
        local = pending.local_tokens
        plan = _beyond(pending)
        by_tier = _tokens_by_tier(plan, local)
        self.sources.add_restored(by_tier)
        for tier, tokens in by_tier.items():
            self._recorder.add("heterocache_hit_tokens", tokens, tier=tier)
        self._recorder.add("heterocache_hits")
        if plan.replay_tokens:
            self._recorder.add("heterocache_replayed_tokens", plan.replay_tokens)
        count = self._count_run if _in_dram(plan) else self._count_tiers
        loaded = range(local, plan.boundary)
        for state_type in plan.prefix_types:
            count(plan.chunks, state_type, loaded, Tier.DRAM)
        for state_type in plan.boundary_types:
            count(plan.chunks[-1:], state_type, loaded, Tier.DRAM)

    def _count_tiers(
        self, chunks: Sequence[StoredChunk], state_type: StateType, loaded: range, _: Tier
    ) -> None:
        """Count runs of successive chunks whose artifact was in one tier."""
        for tier, run in groupby(chunks, key=lambda stored: stored.tiers[state_type]):
            self._count_run(list(run), state_type, loaded, tier)

    def _count_run(
        self, run: Sequence[StoredChunk], state_type: StateType, loaded: range, tier: Tier
    ) -> None:
        first, last = run[0].chunk, run[-1].chunk
        # All chunks but the last are full, so they have one size.
        size = (len(run) - 1) * self._layout.artifact_bytes(state_type, first.start, first.end)
        end = min(last.end, loaded.stop)
        size += self._layout.artifact_bytes(state_type, last.start, end)
        tokens = end - max(first.start, loaded.start)
        labels = {"tier": tier.value, "state_type": state_type.value}
        self._recorder.add("heterocache_restored_tokens", tokens, **labels)
        self._recorder.add("heterocache_restored_bytes", size, **labels)


def tokens_by_tier(pending: PendingRestore) -> dict[str, int]:
    """Return the tokens of an admitted restore by the tier that they came from."""
    return _tokens_by_tier(_beyond(pending), pending.local_tokens)


def _beyond(pending: PendingRestore) -> RestorePlan:
    """Return the plan without chunks in the engine's own cache."""
    plan, local_tokens = pending.plan, pending.local_tokens
    if plan.chunks[0].chunk.end > local_tokens:
        return plan
    return replace(plan, chunks=[s for s in plan.chunks if s.chunk.end > local_tokens])


def _in_dram(plan: RestorePlan) -> bool:
    return all(set(tiers.values()) == {Tier.DRAM} for tiers in plan.tiers)


def _tokens_by_tier(plan: RestorePlan, local_tokens: int) -> dict[str, int]:
    """Return the restored tokens by the farthest tier that their chunk needed.

    Replayed tokens are computed, so they do not count.
    """
    total = plan.resume_tokens - local_tokens
    if _in_dram(plan):
        return {Tier.DRAM.value: total}
    tokens: dict[str, int] = {}
    for stored in plan.chunks:
        needed = plan.prefix_types
        if stored is plan.chunks[-1]:
            needed += plan.boundary_types
        farthest = max((stored.tiers[t] for t in needed), key=_NEAREST_FIRST.index)
        if farthest is not Tier.DRAM:
            chunk = stored.chunk
            covered = min(chunk.end, plan.resume_tokens) - max(chunk.start, local_tokens)
            if covered <= 0:
                continue
            tokens[farthest.value] = tokens.get(farthest.value, 0) + covered
    in_dram = total - sum(tokens.values())
    return ({Tier.DRAM.value: in_dram} if in_dram else {}) | tokens
