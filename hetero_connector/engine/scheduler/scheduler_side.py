"""The scheduler side: match, restore, save, seal. Runs in the engine core's process.

One instance per engine. It owns the store; every method is called from the engine's
scheduling thread, in the order described in `docs/architecture.md`, and none waits
for I/O.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.messages import StepMetadata, WorkerReport
from hetero_connector.engine.scheduler.admissions import Admissions
from hetero_connector.engine.scheduler.block_tables import BlockTable, current_table, offers
from hetero_connector.engine.scheduler.chain_root import ChainRoot
from hetero_connector.engine.scheduler.cost_learner import CostLearner
from hetero_connector.engine.scheduler.early_saves import EarlySaves
from hetero_connector.engine.scheduler.fleet import Fleet
from hetero_connector.engine.scheduler.peer_matcher import PeerMatcher
from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.replays import Replays, can_hide
from hetero_connector.engine.scheduler.request_identifier import RequestIdentifier, Unidentified
from hetero_connector.engine.scheduler.request_queue import RequestQueue
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.restore_counter import RestoreCounter, tokens_by_tier
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.engine.scheduler.saver import Saver
from hetero_connector.engine.scheduler.sessions import Mode as PrefetchMode
from hetero_connector.engine.scheduler.sessions import Sessions
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import CheckpointPolicy
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.planner.sessions import ThinkTimes
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_IDLE_STEP_S = 500e-6
_SOURCES = {
    Tier.DRAM.value: CacheHitSource.HOST,
    Tier.SSD.value: CacheHitSource.DISK,
    Tier.PEER.value: CacheHitSource.P2P,
}


class SchedulerSide:
    """Decides what each step restores and saves."""

    def __init__(
        self,
        layout: ArtifactLayout,
        hasher: ChainHasher,
        store: ArtifactStore,
        recorder: Recorder,
        *,
        planner: RestorePlanner,
        layerwise: bool,
        load_deadline_s: float,
        checkpoints: CheckpointPolicy,
        window_replay: WindowReplay | None = None,
        think_times: ThinkTimes | None = None,
        prefetch: PrefetchMode = "off",
        fleet: Fleet | None = None,
        identifier: RequestIdentifier | None = None,
    ) -> None:
        self.costs = planner.costs
        """What it has learned of the engine's costs."""
        self.store = self._store = store
        self._layout = layout
        self.root = ChainRoot(hasher, store, self._begin_anew, self._has_old_requests)
        """What the chains of requests are rooted in."""
        self._recorder = recorder
        self._tp_size = layout.model.tp_size
        # Recurrent state is copied by vLLM before the first layer runs, so it has to be in
        # place before the admitting step: such models load between steps.
        self._parked = StateType.RECURRENT in layout.model.state_types
        self._layerwise = layerwise and not self._parked
        self._predictions = Predictions(recorder, planner.costs.load, store, time.monotonic)
        self._peers = PeerMatcher(layout, store, fleet, recorder, time.monotonic, load_deadline_s)
        self._restorer = Restorer(
            layout,
            store,
            recorder,
            planner,
            self._engine_load,
            self._predictions,
            self._peers,
            deadline_s=load_deadline_s,
            clock=time.monotonic,
        )
        self._learner = CostLearner(planner.costs, layout, store, time.monotonic)
        self._saver = Saver(layout, store, self._tp_size, checkpoints)
        self._sessions = Sessions(
            layout, store, planner.costs, think_times or ThinkTimes(), time.monotonic, prefetch
        )
        self.identifier = identifier or RequestIdentifier(recorder)
        self._trackers: dict[str, RequestTracker] = {}
        self._queue = RequestQueue()
        self._errors = HookErrors(recorder)
        self._replays = Replays(layout.model, window_replay, self._restorer)
        self._admissions = Admissions(
            layout,
            self._restorer,
            self._replays,
            self._saver,
            RestoreCounter(layout, recorder),
            self._errors,
            self._table,
            parked=self._parked,
        )
        self._early = EarlySaves(self._saver, recorder, layout.model)
        self._broken = False
        """A worker could not load: it neither loads nor saves any more."""
        self._staging = False
        """A request was told to ask again since the last step."""
        self._kv_cache_manager: KVCacheManager | None = None

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's block tables, read each step."""
        self._kv_cache_manager = kv_cache_manager
        self.root.bind(kv_cache_manager)
        self._restorer.may_replay = can_hide(kv_cache_manager)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`: tokens that can be restored beyond the local hit."""
        if not self._admissions.admitted:  # what was admitted in this step is loaded first
            self.root.follow_fleet()
        tracker = self._track(request)
        if tracker is Unidentified.PENDING:
            self._staging = True
            return None, False
        if tracker is Unidentified.NEVER or request.skip_reading_prefix_cache:
            return 0, False
        tracker.local_tokens = local_tokens
        if self._broken:
            self._restorer.forget(tracker)
            return 0, False
        try:
            tokens = self._restorer.tokens(tracker, local_tokens)
        except Exception:
            self._restorer.forget(tracker)
            raise
        self._queue.waits(tracker)
        self._sessions.began(tracker)
        self._staging |= tokens is None
        return tokens, bool(tokens) and self._parked

    def allocated(self, request: Request, num_external_tokens: int) -> None:
        """`update_state_after_alloc`: the request is admitted, with or without our tokens."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return
        tracker.admitting = True
        if request.num_computed_tokens == 0:  # not a parked load that has ended
            tracker.outdated = self.root.may_be_old(tracker.local_tokens)
        assert self._kv_cache_manager is not None
        self._admissions.admit(tracker, num_external_tokens, self._kv_cache_manager)
        self._peers.forget(tracker)
        if not (num_external_tokens and self._parked):
            self._queue.admitted(tracker)

    def hit_sources(self, request: Request) -> dict[CacheHitSource, int]:
        """Tokens of the admitted restore by tier, in vLLM's words."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None or tracker.restore is None:
            return {}
        return {_SOURCES[tier]: tokens for tier, tokens in tokens_by_tier(tracker.restore).items()}

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """`build_connector_meta`: this step's loads and saves."""
        meta = StepMetadata(arena=self._store.arena.handle)
        self._admissions.order(output, self._trackers, meta)
        try:
            self._order_saves(output, meta)
            self._learner.ask(output, self._trackers, meta)
            self.root.follow_fleet()
        except Exception as error:  # what vLLM counts on is ordered
            self._errors.count("build_connector_meta", error)
        self._yield_if_idle(output)
        return meta

    def _order_saves(self, output: SchedulerOutput, meta: StepMetadata) -> None:
        meta.early_saves = self._early.take(output)
        self._queue.stepped(self._trackers, output.num_scheduled_tokens)
        for request_id in output.preempted_req_ids or ():
            if request_id in self._trackers:
                self._queue.waits(self._trackers[request_id])
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            try:
                with self._saver.all_or_none():
                    self._save(request_id, num_tokens, output, meta)
            except Exception as error:
                self._errors.count("save", error)

    def reported(self, report: WorkerReport) -> None:
        """`update_connector_output`: what the workers finished."""
        self._broken |= report.broken
        for save_id, ranks in report.saved.items():
            self._saver.reported(save_id, ranks)
        for save_id, ranks in report.unsaved.items():
            self._saver.reported(save_id, ranks, copied=False)
        for request_id, ranks in report.loaded.items():
            self._admissions.loaded(request_id, ranks)
        self._learner.learn(report)

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> int:
        """`request_finished_all_groups`: order the tail's save; the blocks may be freed now.

        Returns up to where an engine that it is handed off to will find it; 0: nothing of it.
        """
        self.identifier.forget(request.request_id)
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is None:
            return 0
        self._queue.gone(request.request_id)
        self._predictions.progressed(request.request_id, request.num_tokens)
        self._predictions.forget(request.request_id)
        unloaded = self._parked and request.request_id in self._admissions.loading
        self._admissions.forget(tracker)
        unsound = unloaded or tracker.outdated or self._broken
        if not (unsound or self.identifier.doubts(request)):
            try:
                with self._saver.all_or_none():
                    saves = self._saver.finish(tracker, request.num_computed_tokens, block_ids)
                self._early.add(saves)
            except Exception as error:
                self._errors.count("save", error)
        self._saver.forget(tracker)
        self._sessions.ended(tracker, request.num_computed_tokens)
        return tracker.handoff_tokens if self.root.is_shared and self._peers.accepts_claims else 0

    def reset(self) -> bool:
        """Forget everything stored, and what requests hold of it; False as `Store.reset`."""
        return self.root.reset()

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping for a worker's report to arrive."""
        return self._saver.outstanding or bool(self._early)

    def close(self) -> None:
        """Leave the fleet, write what is sealed to SSD and let go of the tiers."""
        self.identifier.close()
        self._peers.close()
        self._store.close()

    def _begin_anew(self, hasher: ChainHasher) -> None:
        """Chains have another root. What it is for holds for running requests' pages, too."""
        for tracker in self._trackers.values():
            self._restorer.forget(tracker)
            self._saver.forget(tracker)
            tracker.begin_anew(hasher)
        self._queue.reset(self._trackers.values())

    def _has_old_requests(self) -> bool:
        return any(tracker.outdated for tracker in self._trackers.values())

    def _yield_if_idle(self, output: SchedulerOutput) -> None:
        """Let the I/O thread have the interpreter when a step has nothing else to run.

        An engine core inside the caller's process steps without pause while a request waits
        for the SSD, and would keep the interpreter's lock from the thread that reads.
        """
        if self._staging and not output.num_scheduled_tokens:
            time.sleep(_IDLE_STEP_S)
        self._staging = False

    def _engine_load(self, new: RequestTracker) -> EngineLoad:
        """What the engine is busy with before `new`, as far as requests are tracked."""
        queued, decodes, waiting = self._queue.ahead_of(new)
        reading = self._store.reading_bytes
        return EngineLoad(queued, decodes, reading, self._layerwise, waiting)

    def _track(self, request: Request) -> RequestTracker | Unidentified:
        tracker = self._trackers.get(request.request_id)
        if tracker is not None:
            return tracker
        identity = self.identifier.identity(request)
        if isinstance(identity, Unidentified):
            return identity
        tracker = RequestTracker.of(request, self.root.hasher, identity)
        self._trackers[request.request_id] = tracker
        self._queue.waits(tracker)
        return tracker

    def _save(
        self, request_id: str, num_tokens: int, output: SchedulerOutput, meta: StepMetadata
    ) -> None:
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        self._predictions.progressed(request_id, tracker.request.num_tokens)
        if tracker.outdated or self._broken or self.identifier.doubts(tracker.request):
            return
        computed = tracker.request.num_computed_tokens
        if tracker.admitting:
            tracker.admitting = False
            self._saver.admitted(tracker, computed)
        offered = offers(output, request_id) if self._parked else ()
        table = self._table(request_id)
        meta.saves += self._saver.step(tracker, computed + num_tokens, table, offered)

    def _table(self, request_id: str) -> BlockTable:
        assert self._kv_cache_manager is not None
        return current_table(self._kv_cache_manager, request_id)
