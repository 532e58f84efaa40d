"""`SchedulerSide`: one method for each of vLLM's scheduler hooks.

There is one instance per engine, and it owns the store. Its methods run on vLLM's scheduling thread
in the order described in `docs/internals/restore.md`. Only `reset` and `close` wait for I/O;
another thread may call `close`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.artifacts.tails import AnsweredPrompts
from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.messages import StepMetadata, WorkerReport
from hetero_connector.engine.scheduler.admissions import Admissions
from hetero_connector.engine.scheduler.block_events import BlockEvents
from hetero_connector.engine.scheduler.block_tables import (
    BlockTable,
    current_table,
    recurrent_states,
)
from hetero_connector.engine.scheduler.chain_answer import ChainAnswer
from hetero_connector.engine.scheduler.chain_root import ChainRoot, Cleared
from hetero_connector.engine.scheduler.commands import Commands
from hetero_connector.engine.scheduler.cost_learner import CostLearner
from hetero_connector.engine.scheduler.early_saves import EarlySaves
from hetero_connector.engine.scheduler.engine_recorder import EngineRecorder
from hetero_connector.engine.scheduler.fleet import Fleet
from hetero_connector.engine.scheduler.idle_steps import IdleSteps
from hetero_connector.engine.scheduler.learned import LearnedKeeper
from hetero_connector.engine.scheduler.peer_matcher import PeerMatcher
from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.replays import Replays, can_hide
from hetero_connector.engine.scheduler.reports import Finished, Reports
from hetero_connector.engine.scheduler.request_identifier import (
    RequestIdentifier,
    UnidentifiedReason,
)
from hetero_connector.engine.scheduler.request_queue import RequestQueue
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.restore_counter import RestoreCounter, tokens_by_tier
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.engine.scheduler.saver import Saver
from hetero_connector.engine.scheduler.sessions import Mode as PrefetchMode
from hetero_connector.engine.scheduler.sessions import Sessions
from hetero_connector.engine.scheduler.shared_boundaries import SharedBoundaries
from hetero_connector.engine.scheduler.status import EngineStatus, MakeProfile
from hetero_connector.engine.scheduler.status_socket import StatusServer
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import CheckpointPolicy
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad, Parking
from hetero_connector.planner.sessions import ThinkTimes
from hetero_connector.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.heterocache")

_IDLE_STEP_S = 500e-6
_SOURCES = {
    Tier.DRAM.value: CacheHitSource.HOST,
    Tier.SSD.value: CacheHitSource.DISK,
    Tier.PEER.value: CacheHitSource.P2P,
}


@dataclass(frozen=True)
class Policies:
    """The policies by which one engine restores, saves and prefetches."""

    planner: RestorePlanner
    checkpoints: CheckpointPolicy
    window_replay: WindowReplay | None = None
    """None: no window is rebuilt by a replay."""
    think_times: ThinkTimes = field(default_factory=ThinkTimes)
    prefetch: PrefetchMode = "off"


class SchedulerSide:
    """Decides what each step restores and saves, and orders it from the workers."""

    def __init__(
        self,
        layout: ArtifactLayout,
        hasher: ChainHasher,
        store: ArtifactStore,
        recorder: Recorder,
        policies: Policies,
        *,
        layerwise: bool,
        parking: Parking = "never",
        load_deadline_s: float,
        fleet: Fleet | None = None,
        identifier: RequestIdentifier | None = None,
        events: BlockEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int | None = None,
    ) -> None:
        """`events`: None publishes none. `num_ranks`: of all pipeline stages; None: of one."""
        self.planner = policies.planner
        self.costs = policies.planner.costs
        self.store = store
        self.layout = layout
        self.root = ChainRoot(hasher, store, self._on_new_root, self._has_outdated_requests)
        self._recorder = recorder
        num_ranks = num_ranks or layout.model.tp_size
        self._hidden_share = float(layerwise)
        """Share of a load that the forward hides; all of a layer-wise one until a worker tells."""
        self._parking: Parking = parking
        self.predictions = Predictions(recorder, self.costs.load, store, clock)
        self._peers = PeerMatcher(layout, store, fleet, recorder, clock, load_deadline_s)
        self._shared = SharedBoundaries(layout.model)
        answered = AnsweredPrompts()
        self._restorer = Restorer(
            layout,
            store,
            recorder,
            policies.planner,
            self._engine_load,
            self.predictions,
            self._peers,
            self._shared,
            answered,
            deadline_s=load_deadline_s,
            clock=clock,
        )
        self._learner = CostLearner(self.costs, layout, store, clock)
        self._events = events
        self._saver = Saver(layout, store, num_ranks, policies.checkpoints, answered)
        if events is not None:
            events.on_new_root(self.root.hasher.root)
            self._saver.on_reserved = events.on_stored
        self._sessions = Sessions(
            layout, store, self.costs, policies.think_times, clock, policies.prefetch
        )
        self.identifier = identifier or RequestIdentifier(recorder)
        self._trackers: dict[str, RequestTracker] = {}
        self._queue = RequestQueue(num_ranks // layout.model.tp_size)
        self._errors = HookErrors(recorder)
        self.reports = Reports(self.predictions, recorder, self._errors)
        self._engine_recorder = EngineRecorder(self.reports, store, clock)
        self._replays = Replays(layout.model, policies.window_replay, self._restorer)
        self._counter = RestoreCounter(layout, recorder, clock)
        self._admissions = Admissions(
            layout,
            self._restorer,
            self._replays,
            self._saver,
            self._shared,
            self._counter,
            self._errors,
            self._table,
            num_ranks,
        )
        self.idle_steps = IdleSteps(self._has_news)
        book, awaits_copies = self._sessions.book, lambda: self._saver.awaits_reports
        self.commands = Commands(self, store, book, self.idle_steps.request_step, awaits_copies)
        self._status: StatusServer | None = None
        self._keeper: LearnedKeeper | None = None
        self._early = EarlySaves(self._saver, recorder, layout.model)
        self.is_stopped = False
        """True once a load has failed on a worker, or the store is closed. Any thread may read."""
        recorder.set("heterocache_cache_alive", 1.0)
        self._has_unanswered = False
        """True if a request got no answer from `match` since the last step."""
        self._kv_cache_manager: KVCacheManager | None = None

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's block tables, which are read in each step."""
        self._kv_cache_manager = kv_cache_manager
        self.root.bind(kv_cache_manager)
        self._shared.bind(kv_cache_manager)
        self._restorer.step_room.bind(kv_cache_manager)
        self._restorer.may_replay = can_hide(kv_cache_manager)
        if self._events is not None:
            self._events.bind(kv_cache_manager)

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`: return the tokens restorable beyond the local hit.

        None: not known yet, vLLM asks again. True: the load runs between steps.
        """
        if not self._admissions.admitted:  # a reset must not drop loads admitted in this step
            self.root.adopt_fleet_reset(is_matching=True)
        tracker = self._track(request)
        if tracker is UnidentifiedReason.PENDING and not self.is_stopped:
            self._has_unanswered = True
            return None, False
        if isinstance(tracker, UnidentifiedReason):
            return 0, False
        if request.skip_reading_prefix_cache:
            tracker.grow()
            self._sessions.on_asked(tracker, has_matched=True)
            return 0, False
        tracker.local_tokens = local_tokens
        self._admissions.end_parking(request.request_id)  # if its load was lost, vLLM asks again
        if self.is_stopped or tracker.is_lost or self.identifier.is_distrusted(request):
            self._restorer.forget(tracker)
            return 0, False
        try:
            tokens = self._restorer.stage(tracker, local_tokens)
        except Exception:
            self._restorer.forget(tracker)
            raise
        self._queue.enqueue(tracker)
        is_searching = tokens is None and tracker.restore is None
        self._sessions.on_asked(tracker, has_matched=not is_searching)
        parked = bool(tokens and tracker.restore and tracker.restore.plan.parked)
        if tokens and self._admissions.must_wait(tracker):
            tokens, parked = None, False
        self._has_unanswered |= tokens is None
        return tokens, parked

    def on_allocated(self, request: Request, num_external_tokens: int) -> None:
        """`update_state_after_alloc`: admit the request with that many restored tokens, or 0."""
        if (tracker := self._trackers.get(request.request_id)) is None:
            return
        tracker.admitting = True
        if request.num_computed_tokens == 0:  # else a load between steps has ended
            tracker.outdated = True  # unless the root says otherwise
            tracker.restored_tokens = num_external_tokens
            try:
                tracker.outdated = self.root.may_be_outdated(request, tracker.local_tokens)
                self.predictions.on_admitted(tracker, stopped=self.is_stopped)
            except Exception as error:  # vLLM counts on the load: it must be ordered all the same
                self._errors.count("update_state_after_alloc", error)
        assert self._kv_cache_manager is not None
        self._admissions.admit(tracker, num_external_tokens, self._kv_cache_manager)
        self._peers.forget(tracker)
        if not self._admissions.is_parked(request.request_id):
            self._queue.on_admitted(tracker)
        if self._events is not None:
            self._events.on_admitted(tracker)

    def hit_sources(self, request: Request) -> dict[CacheHitSource, int]:
        """Return the tokens of the admitted restore by vLLM's name of their tier."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None or tracker.restore is None:
            return {}
        return {_SOURCES[tier]: tokens for tier, tokens in tokens_by_tier(tracker.restore).items()}

    def order_step(self, output: SchedulerOutput) -> StepMetadata:
        """`build_connector_meta`: order this step's loads and saves."""
        meta = StepMetadata()
        self._admissions.order_loads(output, self._trackers, meta)
        try:
            self.idle_steps.on_step()
            self._order_saves(output, meta)
            self._learner.request_timing(output, self._trackers, meta)
            self._engine_recorder.on_step(output, meta)
            self.root.adopt_fleet_reset()
        except Exception as error:  # the loads that vLLM counts on are ordered already
            self._errors.count("build_connector_meta", error)
        self.commands.steps.run()  # the loads are ordered: no command can drop one
        self._yield_if_idle(output, meta)
        return meta

    def _order_saves(self, output: SchedulerOutput, meta: StepMetadata) -> None:
        meta.early_saves = self._early.take(output)
        self._queue.on_step(self._trackers, output.num_scheduled_tokens)
        for request_id in output.preempted_req_ids or ():
            if (tracker := self._trackers.get(request_id)) is not None:
                tracker.preemptions += 1
                if request_id not in output.num_scheduled_tokens:  # else admitted again already
                    self._queue.enqueue(tracker)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            try:
                self._save(request_id, num_tokens, output, meta)
            except Exception as error:
                self._errors.count("save", error)

    def on_report(self, report: WorkerReport) -> None:
        """`update_connector_output`: seal the finished saves and release the finished loads."""
        if report.broken:
            self.is_stopped = True
            self._recorder.set("heterocache_cache_alive", 0.0)
            self._shared.drop()
        if report.broken and self._events is not None:
            self._events.on_new_root(None)
        for save_id, ranks in report.saved.items():
            self._saver.on_report(save_id, ranks)
        for save_id, ranks in report.unsaved.items():
            self._saver.on_report(save_id, ranks, copied=False)
        for load_id, ranks in report.loaded.items():
            self._admissions.on_loaded(load_id, ranks)
        if report.hidden_share is not None:
            self._hidden_share = report.hidden_share
        self._learner.on_report(report)
        self._engine_recorder.on_report(report)

    def on_invalid_blocks(self) -> None:
        """Seal nothing of the present requests: vLLM was told of pages that were not loaded.

        Requests share pages, and steps that are under way have computed from them.
        """
        self._saver.distrust()
        self._shared.drop()
        for tracker in self._trackers.values():
            tracker.outdated = True

    def take_events(self) -> Sequence[KVCacheEvent]:
        """`take_events`: return the block events that the step publishes, after vLLM's own."""
        return self._events.take() if self._events is not None else ()

    def on_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        """`request_finished_all_groups`: order the save of the request's end.

        vLLM may free the blocks at once.
        """
        self.identifier.forget(request.request_id)
        if (tracker := self._trackers.pop(request.request_id, None)) is None:
            return Finished(0, self.reports.on_finished(request, None))
        self._admissions.forget(tracker)  # first: nothing else may keep its pins
        # Without a step since its admission, a load may still fill its pages: this connector's, or
        # that of another one in a MultiConnector.
        has_wrong_pages = tracker.admitting or tracker.outdated or self.is_stopped
        try:
            if not has_wrong_pages and self._may_save(tracker):
                with self._saver.all_or_none():
                    saves = self._saver.save_end(tracker, request.num_computed_tokens, block_ids)
                self._early.add(saves)
        except Exception as error:
            self._errors.count("save", error)
        self._saver.forget(tracker)
        self._queue.remove(request.request_id)
        self.predictions.on_progress(tracker)
        report = self.reports.on_finished(request, tracker)
        self._sessions.on_finished(tracker, request.num_computed_tokens)
        is_shared = self.root.is_shared and self._peers.accepts_claims
        return Finished(tracker.handoff_tokens if is_shared else 0, report)

    def reset(self) -> bool:
        """Forget everything stored. Returns False in the case that `Store.reset` does."""
        return self.root.reset()

    def reset_pages(self) -> bool:
        """See `ChainRoot.empty_pages`."""
        return self.root.empty_pages()

    def on_cleared(self, what: Cleared) -> None:
        """Name the chains of these running requests anew; no pages from before are saved."""
        self._change_root([x for x in self._trackers.values() if what.includes(x.request)])
        self.root.on_cleared(what)

    @property
    def has_work(self) -> bool:
        """True while the engine must step: a worker's report is to arrive, or news to leave."""
        has_backlog = self._events is not None and self._events.has_backlog
        is_due = self.idle_steps.is_due or has_backlog or self.commands.steps.has_any
        return self._saver.awaits_reports or bool(self._early) or is_due

    def serve_status(self, path: Path, about: Mapping[str, Any], profile: MakeProfile) -> None:
        """Answer questions about this engine at a Unix socket, until `close`.

        An engine that cannot open it serves all the same.
        """
        status = EngineStatus(
            about,
            self.store,
            self.predictions,
            profile,
            self._sessions.book,
            self._counter.sources,
            self.commands.activity,
            self._recorder,
        )
        self.commands.model_names = frozenset({about["model"], about["served_as"]})
        try:
            clearings = self.commands.clearings
            chain = ChainAnswer(about, self.layout, self.root, clearings, self.identifier)
            commands = {**self.commands.by_name(), "record": self._engine_recorder.record}
            self._status = StatusServer(path, {**status.answers(), "chain": chain}, commands)
        except OSError as error:
            logger.warning("no status socket at %s: %s", path, error)

    def keep_learned(self, keeper: LearnedKeeper) -> None:
        """Let `keeper` keep what is learned, until `close`."""
        self._keeper = keeper

    def close(self) -> None:
        """Leave the fleet, write sealed artifacts to SSD and release the tiers. Idempotent.

        Another thread may call it. Then nothing is restored or saved any more, but what vLLM has
        admitted is still loaded: it counts on the tokens.
        """
        self.is_stopped = True
        self.idle_steps.close()
        self.commands.steps.close()
        for part in (self._status, self._keeper):
            if part is not None:
                part.close()
        self._engine_recorder.close()
        self.reports.close()
        self.identifier.close()
        self._peers.close()
        self.store.close()

    def _on_new_root(self, hasher: ChainHasher) -> None:
        """Drop everything about running requests that belongs to the old root of the chains."""
        self._change_root(self._trackers.values())
        if self._events is not None:
            self._events.on_new_root(None if self.is_stopped else hasher.root)

    def _change_root(self, trackers: Collection[RequestTracker]) -> None:
        for tracker in trackers:
            self._restorer.forget(tracker)
            self._saver.forget(tracker)
            tracker.change_root(self.root.hasher)
        self._shared.drop()
        self._queue.requeue_waiting(trackers)

    def _has_outdated_requests(self) -> bool:
        return any(tracker.outdated for tracker in self._trackers.values())

    def _yield_if_idle(self, output: SchedulerOutput, meta: StepMetadata) -> None:
        """Pause if the step computes and copies nothing, and the engine steps only to ask again.

        It would keep a core busy, and inside the caller's process the interpreter's lock.
        """
        is_copying = bool(meta.loads or meta.early_saves)
        awaits_device = not is_copying and (self._saver.awaits_reports or self._admissions.loading)
        if (self._has_unanswered or awaits_device) and not output.num_scheduled_tokens:
            time.sleep(_IDLE_STEP_S)
        self._has_unanswered = False

    def _has_news(self) -> bool:
        """Return whether a step would report metrics or block events, or adopt a fleet's reset.

        On any thread. Publishes the store's health first. Others wait for a reset to be adopted.
        """
        self.store.publish_health()  # its own I/O thread does not while it hangs
        has_events = self._events is not None and self._events.has_news
        return has_events or self._recorder.has_news() or self.root.is_behind

    def _engine_load(self, new: RequestTracker, stored: Sequence[StoredChunk]) -> EngineLoad:
        """Return the work before the request `new`, of whose chain that much is stored."""
        queued, decodes, context, waiting = self._queue.work_ahead_of(new)
        reading, share = self.store.bytes_ahead_of(stored), self._hidden_share
        return EngineLoad(queued, decodes, reading, share, waiting, self._parking, context)

    def _track(self, request: Request) -> RequestTracker | UnidentifiedReason:
        tracker = self._trackers.get(request.request_id)
        if tracker is not None:
            return tracker
        if isinstance(identity := self.identifier.identify(request), UnidentifiedReason):
            return identity
        self.store.expire_due()  # the I/O thread may be busy, or there is none
        params = self._sessions.params.read(request.kv_transfer_params, request.request_id)
        hasher, clearings = self.root.hasher, self.commands.clearings
        tracker = RequestTracker.of(request, hasher, identity, clearings, params)
        self._trackers[request.request_id] = tracker
        self.predictions.on_asked(tracker)
        self._queue.enqueue(tracker)
        return tracker

    def _save(
        self, request_id: str, num_tokens: int, output: SchedulerOutput, meta: StepMetadata
    ) -> None:
        if (tracker := self._trackers.get(request_id)) is None:
            return
        self.predictions.on_progress(tracker)
        if tracker.admitting and self.root.may_be_outdated(tracker.request, tracker.local_hit):
            tracker.outdated = True
        if tracker.outdated or self.is_stopped or not self._may_save(tracker):
            return
        if tracker.admitting:
            tracker.admitting = False
            self._saver.on_admitted(tracker, tracker.request.num_computed_tokens)
        computed = tracker.request.num_computed_tokens + num_tokens
        recurrent = recurrent_states(output, request_id)
        if recurrent or self._saver.completes_chunk(tracker, computed):  # seldom while it decodes
            table = self._table(request_id)
            with self._saver.all_or_none():
                meta.saves += self._saver.save_step(tracker, computed, table, recurrent)

    def _may_save(self, tracker: RequestTracker) -> bool:
        """Return whether anything of the request may be stored."""
        is_refused = self.commands.is_draining or tracker.params.stores_nothing
        return not (is_refused or self.identifier.is_distrusted(tracker.request))

    def _table(self, request_id: str) -> BlockTable:
        assert self._kv_cache_manager is not None
        return current_table(self._kv_cache_manager, request_id)
