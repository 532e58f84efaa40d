"""One request's restore: match, plan, stage in DRAM, admit, let go.

vLLM asks `get_num_new_matched_tokens` until it gets a number. While artifacts are
being read from SSD the answer is "ask again later" (the request stays parked in the
waiting queue and holds no KV blocks); once everything is in DRAM and verified the
answer is a number that can be kept. Whatever fails shortens the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ROOT, ArtifactId, Tier
from hetero_connector.engine.messages import ArtifactCopy, Blocks, Load, PageCopy
from hetero_connector.engine.requests import PendingRestore, RequestTracker
from hetero_connector.metrics import Recorder
from hetero_connector.planner.restore_plan import RestorePlan, plan_restore
from hetero_connector.spec import StateType
from hetero_connector.store.base import Store, StoredChunk

_MAX_ATTEMPTS = 4
"""Plans tried for one request before it settles for what DRAM holds."""

BlockTable = Callable[[int, range], list[int]]
"""`table(group, pages)`: block ids of these pages of a KV cache group; 0 for a null block."""


class Restorer:
    """Answers how many tokens of a request can be restored, and builds the load."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: Store,
        recorder: Recorder,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._model = layout.model
        self._store = store
        self._recorder = recorder
        self._deadline_s = deadline_s
        self._clock = clock
        self._excluded: dict[str, set[ArtifactId]] = {}
        self._started: dict[str, float] = {}
        self._attempts: dict[str, int] = {}

    def tokens(self, tracker: RequestTracker, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be restored now; None to be asked again."""
        pending = tracker.restore
        if pending is not None and not pending.fits(local_tokens):
            pending.handle.release()
            pending = None
        elif pending is not None:
            # The engine's own cache may have grown meanwhile: its pages are not ours to write.
            pending.local_tokens = local_tokens
        while True:
            if pending is None:
                pending = self._begin(tracker, local_tokens)
                tracker.restore = pending
            if pending is None:
                self._settle(tracker)
                return 0
            if not pending.handle.done:
                return None
            if not pending.handle.failed:
                self._settle(tracker)
                return pending.plan.boundary - local_tokens
            self._exclude(tracker, pending)
            pending = tracker.restore = None

    def forget(self, tracker: RequestTracker) -> None:
        """Drop what is staged for the request, if it was never admitted with it."""
        self._settle(tracker)
        if tracker.restore is not None:
            tracker.restore.handle.release()
            tracker.restore = None

    def sources(self, tracker: RequestTracker) -> dict[str, int]:
        """Tokens of the staged restore by tier."""
        if tracker.restore is None:
            return {}
        return _tokens_by_tier(tracker.restore.plan, tracker.restore.local_tokens)

    def load(self, tracker: RequestTracker, table: BlockTable, parked: bool) -> Load:
        """The worker's order for an admitted restore."""
        pending = tracker.restore
        assert pending is not None
        pending.ranks_left = self._model.tp_size
        offsets = pending.handle.offsets
        copies = [
            ArtifactCopy(artifact.state_type, start, end, offsets[artifact])
            for artifact, start, end, _ in pending.plan.loads
        ]
        blocks = dict(self._blocks(pending, table))
        self._count(pending)
        return Load(tracker.request.request_id, PageCopy(copies, blocks), parked)

    def _begin(self, tracker: RequestTracker, local_tokens: int) -> PendingRestore | None:
        """Match and plan; start bringing the planned artifacts to DRAM."""
        known = tracker.grow()
        stored = self._stored(tracker, known - 1)
        tails = 1 if stored and not self._is_full(stored[-1]) else 0
        tracker.matched_chunks = len(stored) - tails
        if not stored or stored[-1].chunk.end <= local_tokens:
            return None
        plan = plan_restore(self._model, stored, local_tokens, known - 1)
        if plan is None:
            return None
        handle = self._store.begin_restore([load.id for load in plan.loads])
        self._started.setdefault(tracker.request.request_id, self._clock())
        return PendingRestore(plan, handle, local_tokens)

    def _is_full(self, stored: StoredChunk) -> bool:
        return stored.chunk.end - stored.chunk.start == self._layout.chunk_tokens

    def _stored(self, tracker: RequestTracker, limit: int) -> list[StoredChunk]:
        """Matching chunks and the longest matching tail, without what has failed before."""
        stored = self._store.match(tracker.chain.chunks(limit))
        stored += self._tail(tracker, stored, limit)
        request_id = tracker.request.request_id
        excluded = self._excluded.get(request_id)
        if not excluded:
            return stored
        dram_only = (
            self._attempts[request_id] >= _MAX_ATTEMPTS
            or self._clock() - self._started[request_id] >= self._deadline_s
        )
        return [_without(s, excluded, dram_only) for s in stored]

    def _tail(
        self, tracker: RequestTracker, stored: list[StoredChunk], limit: int
    ) -> list[StoredChunk]:
        chunk = stored[-1].chunk if stored else None
        start = chunk.end if chunk else 0
        for length in sorted(self._store.tails(chunk.key if chunk else ROOT), reverse=True):
            if start + length <= limit:
                found = self._store.match([tracker.chain.ending_at(start + length)])
                if found:
                    return found
        return []

    def _exclude(self, tracker: RequestTracker, pending: PendingRestore) -> None:
        request_id = tracker.request.request_id
        self._excluded.setdefault(request_id, set()).update(pending.handle.failed)
        self._attempts[request_id] = self._attempts.get(request_id, 0) + 1
        pending.handle.release()
        self._recorder.add("heterocache_restores_shortened")

    def _settle(self, tracker: RequestTracker) -> None:
        """The answer stands: forget how it came about."""
        request_id = tracker.request.request_id
        started = self._started.pop(request_id, None)
        if started is not None:
            self._recorder.observe("heterocache_stage_seconds", self._clock() - started)
        self._excluded.pop(request_id, None)
        self._attempts.pop(request_id, None)

    def _blocks(
        self, pending: PendingRestore, table: BlockTable
    ) -> Iterator[tuple[tuple[StateType, int], Blocks]]:
        boundary, local = pending.plan.boundary, pending.local_tokens
        for layer in chain.from_iterable(self._model.page_groups.values()):
            pages = layer.pages_needed(local, boundary)
            # Pages below the local hit belong to the engine's prefix cache: never touched.
            first = max(pages.start, local // layer.block_tokens)
            ids = table(layer.group, range(first, pages.stop))
            yield (layer.state_type, layer.group), Blocks(first, ids)

    def _count(self, pending: PendingRestore) -> None:
        for tier, tokens in _tokens_by_tier(pending.plan, pending.local_tokens).items():
            self._recorder.add("heterocache_hit_tokens", tokens, tier=tier)
        self._recorder.add("heterocache_hits")
        self._count_by_type(pending)

    def _count_by_type(self, pending: PendingRestore) -> None:
        loads, local = pending.plan.loads, pending.local_tokens
        alike = Counter((load[0][1], load[3], load[2] - load[1]) for load in loads)
        already = Counter(
            {(x.tier, x.state_type): local - x.start for x in loads if x.start < local}
        )
        size_bytes: Counter[tuple[Tier, StateType]] = Counter()
        tokens: Counter[tuple[Tier, StateType]] = Counter()
        for (kind, tier, length), count in alike.items():
            # A boundary state has one size in a plan: it is loaded at one boundary.
            size = self._layout.artifact_bytes(
                kind, pending.plan.boundary - length, pending.plan.boundary
            )
            size_bytes[tier, kind] += count * size
            tokens[tier, kind] += count * length
        for (tier, kind), total in size_bytes.items():
            labels = {"tier": tier.value, "state_type": kind.value}
            self._recorder.add("heterocache_restored_bytes", total, **labels)
            restored = tokens[tier, kind] - already[tier, kind]
            self._recorder.add("heterocache_restored_tokens", restored, **labels)


def _without(stored: StoredChunk, excluded: set[ArtifactId], dram_only: bool) -> StoredChunk:
    tiers = {
        state_type: tier
        for state_type, tier in stored.tiers.items()
        if ArtifactId(stored.chunk.key, state_type) not in excluded
        and not (dram_only and tier is not Tier.DRAM)
    }
    return replace(stored, tiers=tiers)


def _tokens_by_tier(plan: RestorePlan, local_tokens: int) -> dict[str, int]:
    """Restored tokens by the slowest tier that any of their state came from."""
    if all(load.tier is Tier.DRAM for load in plan.loads):
        return {Tier.DRAM.value: plan.boundary - local_tokens}
    slowest: dict[tuple[int, int], Tier] = {}
    for load in plan.loads:
        span = (max(load.start, local_tokens), load.end)
        if load.tier is not Tier.DRAM or span not in slowest:
            slowest[span] = load.tier
    tokens: dict[str, int] = {}
    for (start, end), tier in slowest.items():
        tokens[tier.value] = tokens.get(tier.value, 0) + end - start
    return tokens
