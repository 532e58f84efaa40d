"""One request's restore until it is admitted: match, plan, stage in DRAM.

vLLM calls `get_num_new_matched_tokens` in every step until it gets a number. While artifacts are
being read from SSD or from peers the answer is None: the request stays in vLLM's waiting queue and
has no KV blocks. When everything is in DRAM and verified, the answer is a number of tokens that
will be loaded. If a read fails, the request is planned again without that artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import (
    ArtifactId,
    SharedTiers,
    StoredChunk,
    Tier,
    distinct_tiers,
    num_unbroken,
)
from hetero_connector.artifacts.tails import AnsweredPrompts, chunk_beyond, longest_tail
from hetero_connector.engine.messages import ArtifactSpan, Blocks, Load
from hetero_connector.engine.scheduler.block_tables import BlockTable
from hetero_connector.engine.scheduler.handoff import handoff_tokens
from hetero_connector.engine.scheduler.peer_matcher import PeerMatcher
from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.request_params import ALL_TIERS, DRAM_ALONE, LoadTiers
from hetero_connector.engine.scheduler.requests import (
    Attempts,
    PendingRestore,
    RequestTracker,
    replayable,
)
from hetero_connector.engine.scheduler.shared_boundaries import SharedBoundaries
from hetero_connector.engine.scheduler.step_room import StepRoom
from hetero_connector.metrics import Recorder
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Wanted

_MAX_ATTEMPTS = 4
"""Failed plans of one request after which it restores only from DRAM."""


class Restorer:
    """Stages the restores of one engine and builds the orders to load them."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: ArtifactStore,
        recorder: Recorder,
        planner: RestorePlanner,
        engine_load: Callable[[RequestTracker, Sequence[StoredChunk]], EngineLoad],
        predictions: Predictions,
        peers: PeerMatcher,
        shared: SharedBoundaries,
        answered: AnsweredPrompts,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._model = layout.model
        self._store = store
        self._recorder = recorder
        self._planner = planner
        self._engine_load = engine_load
        self._predictions = predictions
        self._peers = peers
        self._shared = shared
        self._answered = answered
        self._deadline_s = deadline_s
        self._load_ids = count(1)
        self._clock = clock
        self.may_replay = True
        """True if plans may rebuild windows by a replay."""
        self.step_room = StepRoom(self._model)

    def stage(self, tracker: RequestTracker, local_tokens: int) -> int | None:
        """Continue to stage the request's restore, and begin it in the first call.

        Returns the tokens beyond `local_tokens` that are ready to load, 0 if there are none, and
        None while staging goes on.
        """
        pending = tracker.restore
        if pending is not None and not pending.fits(local_tokens):
            pending.handle.abandon()
            pending = tracker.restore = None
        elif pending is not None:
            # The engine's own cache may have grown; its pages must not be written.
            pending.local_tokens = local_tokens
        while True:
            if pending is None:
                known = tracker.grow()
                limit = tracker.last_to_restore(local_tokens)
                asks_peers = tracker.params.kv_load_tiers.peers
                if asks_peers and not self._peers.search(tracker, local_tokens, limit):
                    return None
                pending = self._begin(tracker, local_tokens, known, limit)
                tracker.restore = pending
            if pending is None:
                self._end_staging(tracker)
                return 0
            if not pending.handle.poll():
                return None
            if not pending.handle.failed:
                self._end_staging(tracker)
                if not self.step_room.suffices(int(tracker.request.num_tokens)):
                    pending.plan = replace(pending.plan, parked=True)
                return pending.plan.resume_tokens - local_tokens
            self._exclude(tracker, pending)
            pending = tracker.restore = None

    def admit(self, tracker: RequestTracker, tokens: int) -> bool:
        """Cut the restore to the `tokens` that vLLM admitted; False if it cannot be cut there.

        vLLM may round an answer down to its own grid. Boundary state must then be stored for that
        very boundary.
        """
        pending = tracker.restore
        if pending is None:
            return False
        plan, end = pending.plan, pending.local_tokens + tokens
        if end >= plan.resume_tokens:
            return end == plan.resume_tokens
        if plan.replay_tokens:  # a longer replay is exact, too
            if end % self._model.alignment == 0:
                pending.plan = replace(plan, replay_tokens=plan.boundary - end)
            return pending.plan is not plan
        if end % self._model.handoff_step == 0 and not self._model.boundary_types_at(end):
            pending.plan, pending.shared = plan.cut_to(end), None
            return True
        return self._admit_shorter(tracker, pending, end)

    def _admit_shorter(self, tracker: RequestTracker, pending: PendingRestore, end: int) -> bool:
        """Replace the plan by one that ends with an earlier chunk, if DRAM has all of it."""
        chunks = [x for x in pending.plan.chunks if x.chunk.end <= end]
        if not chunks or chunks[-1].chunk.end != end:
            return False
        needed = self._model.boundary_types_at(end)
        if not set(needed) <= chunks[-1].tiers.keys():
            return False
        plan = RestorePlan(
            end,
            chunks,
            pending.plan.prefix_types,
            needed,
            distinct_tiers(chunks),
            parked=pending.plan.parked,
        )
        handle = self._store.begin_restore(_wanted(plan), self._peers.copies(tracker))
        if not handle.poll() or handle.failed:
            handle.abandon()
            return False
        pending.handle.abandon()
        pending.plan, pending.handle, pending.shared = plan, handle, None
        return True

    def forget(self, tracker: RequestTracker) -> None:
        """Drop the request's restore unless it was admitted."""
        self._end_staging(tracker)
        tracker.attempts = None
        self._peers.forget(tracker)
        if tracker.restore is not None:
            tracker.restore.handle.abandon()
            tracker.restore = None

    def build_load(self, tracker: RequestTracker, table: BlockTable) -> Load:
        """Return the order to load an admitted restore."""
        pending = tracker.restore
        assert pending is not None
        tokens = range(pending.local_tokens, pending.plan.boundary)
        request_id = tracker.request.request_id
        return self.build_partial_load(request_id, pending, table, tokens)

    def build_partial_load(
        self, request_id: str, pending: PendingRestore, table: BlockTable, tokens: range
    ) -> Load:
        """Return the order to load the range `tokens` of an admitted restore."""
        plan = pending.plan
        types = plan.prefix_types + plan.boundary_types
        blocks = self._blocks(types, table, tokens)
        spans = [_within(x, tokens) for x in self._spans(pending)]
        pending.loads_left += 1
        load_id = next(self._load_ids)
        return Load(request_id, spans, blocks, plan.parked, tokens.stop, load_id)

    def build_running_load(
        self, request_id: str, pending: PendingRestore, table: BlockTable, end: int
    ) -> Load | None:
        """Return the order to load recurrent state where this step's forward reads it.

        vLLM copies the restored block there before any layer runs, so before the block is loaded.
        `end`: the first token that the step leaves. None if there is no such state.
        """
        plan = pending.plan
        if plan.parked or StateType.RECURRENT not in plan.boundary_types:
            return None
        spans = [x for x in self._spans(pending) if x.state_type is StateType.RECURRENT]
        blocks = {}
        for layer in self._model.page_groups[StateType.RECURRENT]:
            restored = layer.pages_needed(0, plan.boundary).start
            running = -(-end // layer.block_tokens) - 1
            ids = table(layer.group, range(running, running + 1))
            blocks[StateType.RECURRENT, layer.group] = Blocks(restored, ids)
        pending.loads_left += 1
        return Load(
            request_id,
            spans,
            blocks,
            parked=False,
            resume_tokens=plan.boundary,
            load_id=next(self._load_ids),
        )

    def build_shared_load(
        self, request_id: str, pending: PendingRestore, table: BlockTable
    ) -> Load:
        """Return the order to load the boundary state of the restore's shared boundary."""
        assert pending.shared is not None
        chunk, parked = pending.shared.chunk, pending.plan.parked
        wanted = _shared_wanted(self._model, pending.shared)
        columns = pending.handle.columns[-len(wanted) :]
        blocks = self._blocks([x.state_type for x in wanted], table, range(chunk.end))
        size = self._layout.chunk_tokens
        spans = [
            ArtifactSpan(x.state_type, chunk.start, chunk.end, size, offsets)
            for x, offsets in zip(wanted, columns, strict=True)
        ]
        pending.loads_left += 1
        load_id = next(self._load_ids)
        return Load(request_id, spans, blocks, parked, chunk.end, load_id)

    def _begin(
        self, tracker: RequestTracker, local_tokens: int, known: int, limit: int
    ) -> PendingRestore | None:
        """Match and plan, and begin to stage the planned artifacts; None if there is no plan.

        `limit`: the last token at which the request may resume.
        """
        stored = self._find_stored(tracker, local_tokens, limit)
        tracker.stored_tokens = min(stored[-1].chunk.end, known) if stored else 0
        if tracker.stored_tokens <= local_tokens:
            if tracker.wait is None or tracker.wait.decision is None:
                return None
            stored = []  # evicted since the last plan, or in the engine's own cache by now
        load = self._engine_load(tracker, stored)
        decision = self._planner.plan(
            stored,
            local_tokens,
            limit,
            known,
            load,
            may_replay=self.may_replay and replayable(tracker.request),
            deadline_s=self._left_s(tracker.attempts),
        )
        self._predictions.on_decision(tracker, decision, known)
        plan = decision.plan
        if plan is None:
            return None
        now_s = self._clock()
        tracker.attempts = tracker.attempts or Attempts(now_s)
        tracker.attempts.begin(now_s)
        copies = self._peers.copies(tracker)
        shared = self._find_shared(tracker, plan, local_tokens)
        wanted = _wanted(plan)
        if shared is not None:
            wanted += _shared_wanted(self._model, shared)
        left_s = self._left_s(tracker.attempts)
        handle = self._store.begin_restore(wanted, copies, within_s=left_s)
        return PendingRestore(plan, handle, local_tokens, shared=shared)

    def _left_s(self, attempts: Attempts | None) -> float:
        """Return the seconds in which the artifacts of the next attempt must be in DRAM."""
        if attempts is None or attempts.staged_s is not None:
            return self._deadline_s
        return max(0.0, self._deadline_s - attempts.seconds(self._clock()))

    def _find_shared(
        self, tracker: RequestTracker, plan: RestorePlan, local_tokens: int
    ) -> StoredChunk | None:
        """Return the last chunk before the plan's end where others can leave the chain, if any.

        Stored chains fork there or after it, and its boundary state is stored here.
        """
        if plan.replay_tokens or not self._shared.is_supported:
            return None
        is_forked = False
        for index in range(len(plan.chunks) - 2, -1, -1):
            stored = plan.chunks[index]
            if stored.chunk.end <= local_tokens:
                return None
            is_forked = is_forked or self._store.is_fork(stored.chunk.key)
            if is_forked and self._has_boundary_state(stored):
                return stored if self._shared.is_wanted(tracker.request, stored.chunk) else None
        return None

    def _has_boundary_state(self, stored: StoredChunk) -> bool:
        needed = self._model.boundary_types_at(stored.chunk.end)
        tiers = [stored.tiers.get(t, Tier.PEER) for t in needed]
        return bool(tiers) and Tier.PEER not in tiers

    def _find_stored(
        self, tracker: RequestTracker, local_tokens: int, limit: int
    ) -> list[StoredChunk]:
        """Return the matching chunks, without failed artifacts. The last may be a tail, or be cut.

        They include chunks of which nothing is stored, if the engine has their tokens in pages.
        """
        stored = self._peers.extend(tracker, self._store.holdings(tracker.chain.chunks(limit)))
        needed = self._model.prefix_types
        tracker.matched_chunks = num_unbroken(stored, needed)
        if tracker.matched_chunks < len(stored):
            del stored[num_unbroken(stored, needed, local_tokens) :]
        stored += self._find_last(tracker, stored, local_tokens, limit)
        attempts, tiers = tracker.attempts, tracker.params.kv_load_tiers
        if attempts is None or not attempts.count:
            return stored if tiers == ALL_TIERS else without(stored, set(), tiers)
        late = attempts.seconds(self._clock()) >= self._deadline_s
        if late or attempts.count >= _MAX_ATTEMPTS:
            tiers = DRAM_ALONE
        return without(stored, attempts.failed, tiers)

    def _find_last(
        self, tracker: RequestTracker, stored: list[StoredChunk], local_tokens: int, limit: int
    ) -> list[StoredChunk]:
        """Find the chunk after `stored` that restores the most: a tail, or one that is cut."""
        last = stored[-1].chunk if stored else None
        start = last.end if last else 0
        remote = self._peers.tail(tracker, start, limit)
        remote_tokens = remote[0].chunk.end - start if remote else 0
        # The store remembers a few tail lengths; among many handoffs it may lack this one's.
        handoff_tail = (handoff_tokens(tracker.request, limit) or 0) - start
        if not 0 < handoff_tail < self._layout.chunk_tokens:
            handoff_tail = 0
        own = longest_tail(self._store, tracker.chain, last, limit, remote_tokens, handoff_tail)
        found = own or remote
        end = found[-1].chunk.end if found else start
        cut = self._model.last_cut(limit)
        if max(end, local_tokens) < cut:
            found = (
                self._answered.find(self._store, tracker.chain, start, cut)
                or chunk_beyond(self._store, tracker.chain, last, limit)
                or self._peers.chunk_beyond(tracker, start, limit)
                or found
            )
        return found

    def _exclude(self, tracker: RequestTracker, pending: PendingRestore) -> None:
        assert tracker.attempts is not None
        tracker.attempts.failed.update(self._peers.switch_copies(tracker, pending.handle.failed))
        tracker.attempts.count += 1
        pending.handle.abandon()
        self._recorder.add("heterocache_restores_replanned")

    def _end_staging(self, tracker: RequestTracker) -> None:
        """Record the time of staging at the first answer; later answers do not count."""
        attempts = tracker.attempts
        if attempts is not None and attempts.staged_s is None:
            attempts.staged_s = attempts.seconds(self._clock())
            self._recorder.observe("heterocache_stage_seconds", attempts.staged_s)

    def _blocks(
        self, types: Sequence[StateType], table: BlockTable, tokens: range
    ) -> dict[tuple[StateType, int], Blocks]:
        read: dict[tuple[int, int, int], Blocks] = {}
        blocks = {}
        for layer in chain.from_iterable(self._model.page_groups[t] for t in types):
            pages = layer.pages_needed(tokens.start, tokens.stop)
            # Pages below the local hit belong to the engine's prefix cache and are not touched.
            first = max(pages.start, tokens.start // layer.block_tokens)
            key = (layer.group, first, pages.stop)
            if key not in read:
                read[key] = Blocks(first, table(layer.group, range(first, pages.stop)))
            blocks[layer.state_type, layer.group] = read[key]
        return blocks

    def _spans(self, pending: PendingRestore) -> list[ArtifactSpan]:
        """Return the plan's artifacts with their place in the arena, one span per state type."""
        plan, size = pending.plan, self._layout.chunk_tokens
        first, last = plan.chunks[0].chunk, plan.chunks[-1].chunk
        starts = [first.start] * len(plan.prefix_types) + [last.start] * len(plan.boundary_types)
        types = plan.prefix_types + plan.boundary_types
        columns = pending.handle.columns[: len(types)]
        return [
            ArtifactSpan(state_type, start, last.end, size, offsets)
            for state_type, start, offsets in zip(types, starts, columns, strict=True)
        ]


def _wanted(plan: RestorePlan) -> list[Wanted]:
    return [Wanted(t, plan.chunks) for t in plan.prefix_types] + [
        Wanted(t, plan.chunks[-1:]) for t in plan.boundary_types
    ]


def _shared_wanted(model: ModelSpec, shared: StoredChunk) -> list[Wanted]:
    return [Wanted(t, [shared]) for t in model.boundary_types_at(shared.chunk.end)]


def _within(span: ArtifactSpan, tokens: range) -> ArtifactSpan:
    """Return the part of the span whose chunks overlap `tokens`."""
    size = span.chunk_tokens
    first = max(0, tokens.start - span.start) // size
    last = min(len(span.offsets), -(-(tokens.stop - span.start) // size))
    if first == 0 and last == len(span.offsets):
        return span
    end = min(span.end, span.start + last * size)
    return span._replace(start=span.start + first * size, end=end, offsets=span.offsets[first:last])


def without(
    chunks: Sequence[StoredChunk], excluded: set[ArtifactId], tiers: LoadTiers
) -> list[StoredChunk]:
    """Return the chunks as if the excluded artifacts were not stored.

    What is outside DRAM and `tiers` is excluded, too. Equal chunks share one mapping of tiers.
    """
    allowed = {Tier.DRAM}
    allowed |= {Tier.SSD} if tiers.ssd else set()
    allowed |= {Tier.PEER} if tiers.peers else set()
    shared, left = SharedTiers(), []
    for stored in chunks:
        left_in = {
            state_type: tier
            for state_type, tier in stored.tiers.items()
            if ArtifactId(stored.chunk.key, state_type) not in excluded and tier in allowed
        }
        whole = len(left_in) == len(stored.tiers)
        left.append(stored if whole else StoredChunk(stored.chunk, shared.share(left_in)[0]))
    return left
