"""Restores from their admission by vLLM to the end of their load.

vLLM counts the promised tokens as computed when it admits a request. If anything goes wrong after
that, vLLM must be told that they were not loaded: no answer may come from pages without state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, StoredChunk
from hetero_connector.engine.hook_errors import HookErrors
from hetero_connector.engine.messages import Load, LostLoad, StepMetadata
from hetero_connector.engine.scheduler.block_tables import BlockTable, table_of
from hetero_connector.engine.scheduler.replays import Replays
from hetero_connector.engine.scheduler.requests import PendingRestore, RequestTracker
from hetero_connector.engine.scheduler.restore_counter import RestoreCounter
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.engine.scheduler.saver import Saver
from hetero_connector.engine.scheduler.shared_boundaries import SharedBoundaries

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

_ALL_PAGES = 1 << 40


@dataclass
class _OrderedLoad:
    """A load on its way, and the restore that it belongs to."""

    request_id: str
    pending: PendingRestore
    ranks_left: int


class Admissions:
    """Orders the loads of admitted restores and releases them when all ranks have loaded."""

    def __init__(
        self,
        layout: ArtifactLayout,
        restorer: Restorer,
        replays: Replays,
        saver: Saver,
        shared: SharedBoundaries,
        counter: RestoreCounter,
        errors: HookErrors,
        tables: Callable[[str], BlockTable],
        num_ranks: int,
    ) -> None:
        """`tables` returns a request's block table."""
        self._block_tokens = layout.model.layers[0].block_tokens
        self._num_ranks = num_ranks
        self._restorer = restorer
        self._replays = replays
        self._saver = saver
        self._shared = shared
        self._counter = counter
        self._errors = errors
        self._tables = tables
        self._parked: dict[str, ChunkKey] = {}
        """The last chunk that is loaded for each parked request, by the request's id."""
        self.admitted: list[RequestTracker] = []
        """Requests admitted since the last step."""
        self.loading: defaultdict[str, list[PendingRestore]] = defaultdict(list)
        """Restores that ranks have not reported yet, oldest first. A request has two if it was
        preempted and admitted again before the first was reported."""
        self._ordered: dict[int, _OrderedLoad] = {}
        """Loads that some rank has not reported yet, by number."""
        self.lost: list[LostLoad] = []
        """Loads that the next step reports to vLLM as lost."""

    def admit(self, tracker: RequestTracker, tokens: int, manager: KVCacheManager) -> None:
        """Admit the request: vLLM has allocated its blocks and counts `tokens` as restored.

        They may be fewer than the restorer answered. A parked request is admitted once more, with 0
        tokens, when its load has ended.
        """
        request_id, computed = tracker.request.request_id, tracker.request.num_computed_tokens
        # With computed tokens it is admitted once more: a load between steps has ended, this
        # connector's or that of another one in a MultiConnector.
        is_counted = computed > 0 and not self.is_parked(request_id)
        self.end_parking(request_id)
        if tokens and tracker.restore is not None and tracker.restore.plan.parked:
            self._parked[request_id] = tracker.restore.plan.chunks[-1].chunk.key
        if not tokens:
            self._restorer.forget(tracker)
        else:
            try:
                self._admit_restore(tracker, tokens)
            except Exception as error:
                self._report_lost(tracker, "admission", error)
        try:
            self._replays.on_admitted(tracker, manager)
        except Exception as error:  # vLLM may have published windows that are not exact
            self._report_lost(tracker, "replay", error)
        if not (is_counted or self.is_parked(request_id)):
            num_tokens = int(tracker.request.num_tokens)
            self._counter.sources.add_admitted(num_tokens, tracker.local_tokens)

    def is_parked(self, request_id: str) -> bool:
        """True while vLLM waits for the end of the request's load."""
        return request_id in self._parked

    def must_wait(self, tracker: RequestTracker) -> bool:
        """True while another request loads what this one could hit in vLLM's cache.

        vLLM shares the pages of a parked load when it has ended, those of others at once. A shared
        boundary is in its cache when it is loaded.
        """
        assert tracker.restore is not None
        if tracker.awaits is None:
            plan = tracker.restore.plan
            same = self._parked_for(plan.chunks[-1].chunk.key) if plan.parked else None
            tracker.awaits = same or self._sharer_of(plan.chunks, tracker.local_tokens)
        awaited = tracker.awaits
        return awaited is not None and (
            self.is_parked(awaited) or awaited in self._loaders().values()
        )

    def _parked_for(self, last: ChunkKey) -> str | None:
        """Return the id of a parked request that loads the prefix up to this chunk, if any."""
        return next((name for name, key in self._parked.items() if key == last), None)

    def _sharer_of(self, chunks: Sequence[StoredChunk], local_tokens: int) -> str | None:
        """Return the id of a request that loads a shared boundary of these chunks, if any.

        vLLM hits there once it is loaded: only one after the `local_tokens` counts.
        """
        loaders = self._loaders()
        if not loaders:
            return None
        found = (x.chunk.key for x in chunks if x.chunk.end > local_tokens)
        return next((loaders[key] for key in found if key in loaders), None)

    def end_parking(self, request_id: str) -> None:
        """Note that vLLM does not wait for the request's load, or not any more."""
        self._parked.pop(request_id, None)

    def order_loads(
        self, output: SchedulerOutput, trackers: Mapping[str, RequestTracker], meta: StepMetadata
    ) -> None:
        """Order this step's loads, and let the workers report the lost ones to vLLM."""
        for request_id in output.preempted_req_ids or ():
            self.end_replay(request_id)
        new = {x.req_id: x.block_ids for x in output.scheduled_new_reqs} if self.admitted else {}
        admitted, self.admitted = self.admitted, []
        for tracker in admitted:
            request_id = tracker.request.request_id
            num_tokens = output.num_scheduled_tokens.get(request_id, 0)
            try:
                self._load(tracker, new.get(request_id), num_tokens, meta)
            except Exception as error:
                self._report_lost(tracker, "load", error)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if request_id in self._replays:
                try:
                    self._replay(trackers[request_id], num_tokens, meta)
                except Exception as error:
                    self._report_lost(trackers[request_id], "replay", error)
        if meta.loads:
            # Without this vLLM calls the load hook after the forward: too late to mask a replay's
            # slots, and a parked load would begin after the forward, which does not need it. vLLM
            # sets it only for a step that admits a request whose load is not parked.
            output.has_sync_kv_loads = True
        for load in meta.loads:
            pending = self.loading[load.request_id][-1]
            self._ordered[load.load_id] = _OrderedLoad(load.request_id, pending, self._num_ranks)
        meta.lost, self.lost = self.lost, []

    def on_loaded(self, load_id: int, ranks: int) -> None:
        """Count `ranks` more ranks that have ended a load."""
        load = self._ordered.get(load_id)
        if load is None:  # reported twice
            return
        load.ranks_left -= ranks
        if load.ranks_left <= 0:
            del self._ordered[load_id]
            load.pending.loads_left -= 1
            self._shared.on_loaded(load_id)
            self._release_loaded(load.request_id)

    def end_replay(self, request_id: str) -> None:
        """End the request's replay, if it has one."""
        if self._replays.end(request_id):
            self._release_loaded(request_id)

    def forget(self, tracker: RequestTracker) -> None:
        """Drop a request that has ended."""
        request_id = tracker.request.request_id
        self.end_replay(request_id)
        self._restorer.forget(tracker)
        self.end_parking(request_id)
        if tracker in self.admitted:
            self.admitted.remove(tracker)

    def _loaders(self) -> dict[ChunkKey, str]:
        loaders = self._shared.loaders()
        for tracker in self.admitted:
            if tracker.restore is not None and tracker.restore.shared is not None:
                loaders[tracker.restore.shared.chunk.key] = tracker.request.request_id
        return loaders

    def _admit_restore(self, tracker: RequestTracker, tokens: int) -> None:
        """Order the load of these tokens in the next step. Raises ValueError if it cannot be."""
        if not self._restorer.admit(tracker, tokens):
            raise ValueError(f"vLLM admitted {tokens} tokens, but no stored state ends there")
        tracker.attempts = None
        self.admitted.append(tracker)

    def _report_lost(self, tracker: RequestTracker, hook: str, error: Exception) -> None:
        """Let the workers report to vLLM that the request's tokens will not be loaded."""
        self._errors.count(hook, error)
        request_id = tracker.request.request_id
        parked = self.is_parked(request_id)
        self.forget(tracker)
        tracker.outdated = True
        tracker.is_lost = True
        first = tracker.local_tokens // self._block_tokens
        blocks = self._tables(request_id)(0, range(first, _ALL_PAGES))
        self.lost.append(LostLoad(request_id, blocks, parked))

    def _load(
        self,
        tracker: RequestTracker,
        block_ids: Sequence[list[int]] | None,
        num_tokens: int,
        meta: StepMetadata,
    ) -> None:
        """`block_ids`: as vLLM sends them if the request is new in this step, else None.

        `num_tokens`: those that the step computes, 0 of a parked request.
        """
        pending = tracker.restore
        assert pending is not None
        request_id = tracker.request.request_id
        loads = []
        if pending.plan.replay_tokens:
            self._replays.begin(request_id, pending)
        else:
            # The ids save a walk over the thousands of block objects of a long prompt.
            table = self._tables(request_id) if block_ids is None else table_of(block_ids)
            loads.append(self._restorer.build_load(tracker, table))
            end = pending.plan.boundary + num_tokens
            running = self._restorer.build_running_load(request_id, pending, table, end)
            loads += [running] if running else []
            loads += self._share(tracker, pending)
        self._saver.on_restored(pending.plan)
        # Nothing may fail from here on: a load that is ordered must not be reported as lost, too.
        meta.loads += loads
        self.loading[request_id].append(pending)
        tracker.restore = None

    def _share(self, tracker: RequestTracker, pending: PendingRestore) -> list[Load]:
        """Return the order to load the restore's shared boundary, if it has one."""
        if pending.shared is None or tracker.outdated:
            return []
        request, parked = tracker.request, pending.plan.parked
        pages = self._shared.take(request, pending.shared.chunk, parked=parked)
        if pages is None:
            return []
        load = self._restorer.build_shared_load(request.request_id, pending, pages.table)
        self._shared.on_ordered(load.load_id, pages)
        return [load]

    def _replay(self, tracker: RequestTracker, num_tokens: int, meta: StepMetadata) -> None:
        request_id = tracker.request.request_id
        if self._replays.order_step(tracker, num_tokens, self._tables(request_id), meta):
            self.end_replay(request_id)

    def _release_loaded(self, request_id: str) -> None:
        """Release the request's restores of which all ranks have made the loads."""
        restores = self.loading[request_id]
        for pending in list(restores):
            # A replay belongs to the newest restore, and orders a load in each of its steps.
            is_replayed = pending is restores[-1] and request_id in self._replays
            if not is_replayed and pending.loads_left <= 0:
                restores.remove(pending)
                pending.handle.release()
                try:
                    self._counter.count(pending)
                except Exception as error:  # the other restores must be released, too
                    self._errors.count("restore metrics", error)
        if not restores:
            del self.loading[request_id]
