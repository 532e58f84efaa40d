"""One request's restore: match, plan, stage in DRAM, admit, let go.

vLLM asks `get_num_new_matched_tokens` until it gets a number. While artifacts are
being read from SSD or from peers the answer is "ask again later" (the request stays parked in the
waiting queue and holds no KV blocks); once everything is in DRAM and verified the
answer is a number that can be kept. Whatever fails shortens the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ArtifactId, SharedTiers, Tier, up_to_gap
from hetero_connector.artifacts.tails import longest_tail
from hetero_connector.engine.block_tables import BlockTable
from hetero_connector.engine.handing_over import handoff_tokens
from hetero_connector.engine.messages import ArtifactSpan, Blocks, Load
from hetero_connector.engine.peer_matching import PeerMatcher
from hetero_connector.engine.predictions import Predictions
from hetero_connector.engine.requests import (
    Attempts,
    PendingRestore,
    RequestTracker,
    replayable,
)
from hetero_connector.metrics import Recorder
from hetero_connector.planner.decision import EngineLoad
from hetero_connector.planner.restore_plan import RestorePlan
from hetero_connector.planner.restore_planner import RestorePlanner
from hetero_connector.spec import StateType
from hetero_connector.store.base import Store, StoredChunk, Wanted

_MAX_ATTEMPTS = 4
"""Plans tried for one request before it settles for what DRAM holds."""


class Restorer:
    """Answers how many tokens of a request can be restored, and builds the load."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: Store,
        recorder: Recorder,
        planner: RestorePlanner,
        engine_load: Callable[[RequestTracker], EngineLoad],
        predictions: Predictions,
        peers: PeerMatcher,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._model = layout.model
        self._store = store
        self._recorder = recorder
        self._planner = planner
        self._costs = planner.costs
        self._engine_load = engine_load
        self._predictions = predictions
        self._peers = peers
        self._deadline_s = deadline_s
        self._clock = clock
        self.may_replay = True
        """Whether a plan may rebuild windows by a replay."""

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
                known = tracker.grow()
                if self._peers.pending(tracker, local_tokens, known - 1):
                    return None
                pending = self._begin(tracker, local_tokens, known)
                tracker.restore = pending
            if pending is None:
                self._answered(tracker)
                return 0
            if not pending.handle.done:
                return None
            if not pending.handle.failed:
                self._learn_wait(tracker, pending)
                self._answered(tracker)
                return pending.plan.resume_tokens - local_tokens
            self._exclude(tracker, pending)
            pending = tracker.restore = None

    def forget(self, tracker: RequestTracker) -> None:
        """Drop what is staged for the request, if it was never admitted with it."""
        self._answered(tracker)
        tracker.attempts = None
        self._peers.forget(tracker)
        if tracker.restore is not None:
            tracker.restore.handle.release()
            tracker.restore = None

    def sources(self, tracker: RequestTracker) -> dict[str, int]:
        """Tokens of the staged restore by tier."""
        if tracker.restore is None:
            return {}
        local_tokens = tracker.restore.local_tokens
        return _tokens_by_tier(_beyond(tracker.restore.plan, local_tokens), local_tokens)

    def load(self, tracker: RequestTracker, table: BlockTable, parked: bool) -> Load:
        """The worker's order for an admitted restore, all of it."""
        pending = tracker.restore
        assert pending is not None
        tokens = range(pending.local_tokens, pending.plan.boundary)
        return self.part(tracker.request.request_id, pending, table, tokens, parked=parked)

    def part(
        self,
        request_id: str,
        pending: PendingRestore,
        table: BlockTable,
        tokens: range,
        *,
        parked: bool = False,
    ) -> Load:
        """The worker's order to load these tokens' share of an admitted restore."""
        pending.ranks_left += self._model.tp_size
        blocks = self._blocks(pending.plan, table, tokens)
        spans = [_within(span, tokens) for span in self._spans(pending)]
        return Load(request_id, spans, blocks, parked)

    def _begin(
        self, tracker: RequestTracker, local_tokens: int, known: int
    ) -> PendingRestore | None:
        """Match and plan; start bringing the planned artifacts to DRAM."""
        stored = self._stored(tracker, local_tokens, known - 1)
        request_id = tracker.request.request_id
        if not stored or stored[-1].chunk.end <= local_tokens:
            if not self._predictions.expects(request_id):
                return None
            stored = []  # what it was to restore is gone, or the engine's by now
        load = self._engine_load(tracker)
        may_replay = self.may_replay and replayable(tracker.request)
        decision = self._planner.plan(
            stored, local_tokens, known - 1, known, load, may_replay=may_replay
        )
        self._predictions.decided(request_id, decision, stored, local_tokens, known)
        plan = decision.plan
        if plan is None:
            return None
        now_s = self._clock()
        tracker.attempts = tracker.attempts or Attempts(now_s)
        tracker.attempts.begin(now_s)
        handle = self._store.begin_restore(_wanted(plan), self._peers.copies(tracker))
        return PendingRestore(plan, handle, local_tokens, load.only_decodes)

    def _stored(self, tracker: RequestTracker, local_tokens: int, limit: int) -> list[StoredChunk]:
        """Matching chunks and the longest matching tail, without what has failed before.

        Chunks of which nothing is stored are among them where the engine holds their tokens.
        """
        stored = self._peers.extend(tracker, self._store.holdings(tracker.chain.chunks(limit)))
        needed = self._model.prefix_types
        tracker.matched_chunks = up_to_gap(stored, needed)
        if tracker.matched_chunks < len(stored):
            del stored[up_to_gap(stored, needed, local_tokens) :]
        stored += self._tail(tracker, stored, limit)
        attempts = tracker.attempts
        if attempts is None or not attempts.count:  # nothing has failed
            return stored
        late = attempts.seconds(self._clock()) >= self._deadline_s
        return without(stored, attempts.failed, late or attempts.count >= _MAX_ATTEMPTS)

    def _tail(
        self, tracker: RequestTracker, stored: list[StoredChunk], limit: int
    ) -> list[StoredChunk]:
        last = stored[-1].chunk if stored else None
        start = last.end if last else 0
        remote = self._peers.tail(tracker, start, limit)
        remote_tokens = remote[0].chunk.end - start if remote else 0
        # Beside others' hand-overs the store may not name this one's length.
        said = (handoff_tokens(tracker.request, limit) or 0) - start
        said = said if 0 < said < self._layout.chunk_tokens else 0
        own = longest_tail(self._store, tracker.chain, last, limit, remote_tokens, said)
        return own or remote

    def _exclude(self, tracker: RequestTracker, pending: PendingRestore) -> None:
        assert tracker.attempts is not None
        tracker.attempts.failed.update(self._peers.without_copy(tracker, pending.handle.failed))
        tracker.attempts.count += 1
        pending.handle.release()
        self._recorder.add("heterocache_restores_shortened")

    def _learn_wait(self, tracker: RequestTracker, pending: PendingRestore) -> None:
        attempts = tracker.attempts
        if attempts is not None and attempts.staged_s is None and not attempts.count:
            waited_s = attempts.seconds(self._clock())
            self._costs.learn_wait(pending.beside_decodes, pending.handle.staged_s, waited_s)

    def _answered(self, tracker: RequestTracker) -> None:
        """The first answer ends the staging; later ones, while it waits for pages, do not."""
        attempts = tracker.attempts
        if attempts is not None and attempts.staged_s is None:
            attempts.staged_s = attempts.seconds(self._clock())
            self._recorder.observe("heterocache_stage_seconds", attempts.staged_s)

    def _blocks(
        self, plan: RestorePlan, table: BlockTable, tokens: range
    ) -> dict[tuple[StateType, int], Blocks]:
        read: dict[tuple[int, int, int], Blocks] = {}
        blocks = {}
        types = plan.prefix_types + plan.boundary_types
        for layer in chain.from_iterable(self._model.page_groups[t] for t in types):
            pages = layer.pages_needed(tokens.start, tokens.stop)
            # Pages below the local hit belong to the engine's prefix cache: never touched.
            first = max(pages.start, tokens.start // layer.block_tokens)
            key = (layer.group, first, pages.stop)
            if key not in read:
                read[key] = Blocks(first, table(layer.group, range(first, pages.stop)))
            blocks[layer.state_type, layer.group] = read[key]
        return blocks

    def _spans(self, pending: PendingRestore) -> list[ArtifactSpan]:
        """The plan's artifacts where they lie now, column by column as they were asked for."""
        plan, size = pending.plan, self._layout.chunk_tokens
        columns = pending.handle.columns
        prefix_start, last_start = plan.chunks[0].chunk.start, plan.chunks[-1].chunk.start
        starts = [prefix_start] * len(plan.prefix_types) + [last_start] * len(plan.boundary_types)
        types = plan.prefix_types + plan.boundary_types
        return [
            ArtifactSpan(state_type, start, plan.boundary, size, offsets)
            for state_type, start, offsets in zip(types, starts, columns, strict=True)
        ]

    def count(self, pending: PendingRestore) -> None:
        """Count a restore whose loads have ended, while it is held."""
        local = pending.local_tokens
        plan = _beyond(pending.plan, local)
        for tier, tokens in _tokens_by_tier(plan, local).items():
            self._recorder.add("heterocache_hit_tokens", tokens, tier=tier)
        self._recorder.add("heterocache_hits")
        if plan.replay_tokens:
            self._recorder.add("heterocache_replayed_tokens", plan.replay_tokens)
        count = self._count_run if _in_dram(plan) else self._count_tiers
        for state_type in plan.prefix_types:
            count(plan.chunks, state_type, local, Tier.DRAM)
        for state_type in plan.boundary_types:
            count(plan.chunks[-1:], state_type, local, Tier.DRAM)

    def _count_tiers(
        self, chunks: Sequence[StoredChunk], state_type: StateType, local_tokens: int, _: Tier
    ) -> None:
        """Count run by run: successive chunks whose artifact lay in one tier."""
        for tier, run in groupby(chunks, key=lambda stored: stored.tiers[state_type]):
            self._count_run(list(run), state_type, local_tokens, tier)

    def _count_run(
        self, run: Sequence[StoredChunk], state_type: StateType, local_tokens: int, tier: Tier
    ) -> None:
        first, last = run[0].chunk, run[-1].chunk
        # All but the last of a chain are full chunks, of one size.
        size = (len(run) - 1) * self._layout.artifact_bytes(state_type, first.start, first.end)
        size += self._layout.artifact_bytes(state_type, last.start, last.end)
        tokens = last.end - max(first.start, local_tokens)
        labels = {"tier": tier.value, "state_type": state_type.value}
        self._recorder.add("heterocache_restored_tokens", tokens, **labels)
        self._recorder.add("heterocache_restored_bytes", size, **labels)


def _wanted(plan: RestorePlan) -> list[Wanted]:
    return [Wanted(t, plan.chunks) for t in plan.prefix_types] + [
        Wanted(t, plan.chunks[-1:]) for t in plan.boundary_types
    ]


def _within(span: ArtifactSpan, tokens: range) -> ArtifactSpan:
    """Only the chunks that reach into `tokens`."""
    size = span.chunk_tokens
    first = max(0, tokens.start - span.start) // size
    last = min(len(span.offsets), -(-(tokens.stop - span.start) // size))
    if first == 0 and last == len(span.offsets):
        return span
    end = min(span.end, span.start + last * size)
    return span._replace(start=span.start + first * size, end=end, offsets=span.offsets[first:last])


def without(
    chunks: Sequence[StoredChunk], excluded: set[ArtifactId], dram_only: bool
) -> list[StoredChunk]:
    """As if what is excluded were not stored. Chunks that hold the same share one mapping."""
    shared, left = SharedTiers(), []
    for stored in chunks:
        tiers = {
            state_type: tier
            for state_type, tier in stored.tiers.items()
            if ArtifactId(stored.chunk.key, state_type) not in excluded
            and not (dram_only and tier is not Tier.DRAM)
        }
        whole = len(tiers) == len(stored.tiers)
        left.append(stored if whole else StoredChunk(stored.chunk, shared.share(tiers)[0]))
    return left


def _beyond(plan: RestorePlan, local_tokens: int) -> RestorePlan:
    """The plan without chunks that the engine came to hold by itself while it waited."""
    if plan.chunks[0].chunk.end > local_tokens:
        return plan
    return replace(plan, chunks=[s for s in plan.chunks if s.chunk.end > local_tokens])


def _in_dram(plan: RestorePlan) -> bool:
    return all(set(tiers.values()) == {Tier.DRAM} for tiers in plan.held)


def _tokens_by_tier(plan: RestorePlan, local_tokens: int) -> dict[str, int]:
    """Restored tokens by the tier that their chunk waited for: DRAM if all that is loaded of it is
    there, else where the first of its state types that is not there is.

    Tokens to be replayed are computed, so they are not among them.
    """
    total = plan.resume_tokens - local_tokens
    if _in_dram(plan):
        return {Tier.DRAM.value: total}
    tokens: dict[str, int] = {}
    for stored in plan.chunks:
        needed = plan.prefix_types
        if stored is plan.chunks[-1]:
            needed += plan.boundary_types
        slow = [stored.tiers[t] for t in needed if stored.tiers[t] is not Tier.DRAM]
        if slow:
            chunk = stored.chunk
            covered = min(chunk.end, plan.resume_tokens) - max(chunk.start, local_tokens)
            if covered <= 0:
                continue
            tokens[slow[0].value] = tokens.get(slow[0].value, 0) + covered
    in_dram = total - sum(tokens.values())
    return ({Tier.DRAM.value: in_dram} if in_dram else {}) | tokens
