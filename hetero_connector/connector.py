"""`HeteroConnector`: the class that vLLM loads. Every hook delegates to one of the two sides."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from hetero_connector.config import HeteroConfig
from hetero_connector.engine.hook_errors import HookErrors, is_a_miss
from hetero_connector.engine.messages import StepMetadata, WorkerReport
from hetero_connector.engine.prometheus import HeteroPromMetrics, HeteroStats
from hetero_connector.engine.scheduler.handoff import handoff_answer
from hetero_connector.engine.scheduler.idle_steps import Loop
from hetero_connector.engine.scheduler.request_report import report_answer
from hetero_connector.engine.startup import rendezvous
from hetero_connector.engine.startup.engine_identity import engine_version
from hetero_connector.engine.startup.heads import preferred_layout
from hetero_connector.engine.startup.parent_watch import watch_parent
from hetero_connector.engine.startup.start import open_scheduler_side, open_worker_side
from hetero_connector.engine.worker.layer_hooks import calls_layer_hooks
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.supported_vllm import check_version

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.lora.request import LoRARequest
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HeteroConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores a model's KV state as typed artifacts, and restores prefixes from them."""

    _is_in_fleet = False
    """True with a directory."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(engine_version())
        self._config = HeteroConfig.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        self._is_in_fleet = bool(self._config.directory)
        self._recorder = Recorder()
        self._errors = HookErrors(self._recorder)
        self._scheduler = self._worker = None
        self._closing = threading.Lock()
        """Held while a side is closed: by vLLM's thread, or by the one that watches the parent."""
        self._engine = rendezvous.engine_name(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = open_scheduler_side(
                vllm_config, kv_cache_config, self._config, self._recorder
            )
            if self._scheduler:
                arena = self._scheduler.store.arena.handle
                rendezvous.publish_arena(self._engine, arena, self._scheduler.layout)
                self._publish_sharing()
            watch_parent(self._release)
        else:
            self._worker = open_worker_side(
                vllm_config, kv_cache_config, self._config, self._recorder
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, so a save that is not made costs only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: a full CUDA graph calls no layer hooks, and its step is loaded before it runs."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True: the engine's memory comes back at the same addresses, and only worker
        processes hold them. vLLM asks from 0.33 on."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout that vLLM should use if it can; None for no preference."""
        return preferred_layout(vllm_config)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pages."""
        if self._worker:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> None:
        """Map the arena. vLLM calls this on every worker before the first request.

        Raises StoreError if the arena cannot be mapped: an engine that can load nothing must not
        start.
        """
        found = rendezvous.find_arena(self._engine) if self._worker else None
        if self._worker and found:
            self._worker.attach(*found)

    def unregister_kv_caches(self) -> None:
        """Let every copy end: vLLM (from 0.33) is about to release the memory of the pages.

        It maps it again at the same addresses, so `restore_kv_caches` has nothing to do. Raises if
        a copy cannot be waited for: vLLM must not release the memory then.
        """
        if self._worker:
            self._worker.finish_copies()

    @is_a_miss(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step. This is its first hook: freed pages still hold their state."""
        if self._worker:
            assert isinstance(kv_connector_metadata, StepMetadata)
            if not self._worker.is_attached:  # inside a MultiConnector there may be no handshake
                self.get_handshake_metadata()
            self._worker.begin_step(kv_connector_metadata)

    @is_a_miss(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker:
            step = self._step()
            attention: Any = kwargs.get("attn_metadata")
            if step.protected:
                # Both are by layer: only microbatches have lists of them, and then no replays.
                attention = attention or forward_context.attn_metadata
                slots = cast("Mapping[str, torch.Tensor]", forward_context.slot_mapping)
                self._worker.protect_replays(step, slots, attention)
            self._worker.start_loads(step, hooks_called=calls_layer_hooks(forward_context))

    @is_a_miss(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until this layer's pages are loaded."""
        if self._worker:
            self._worker.ensure_loaded(layer_name)

    @is_a_miss(lambda: None)
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Copy the pages that the layer has just written."""
        if self._worker:
            self._worker.on_layer_written(self._step(), layer_name)

    @is_a_miss(lambda: None)
    def wait_for_save(self) -> None:
        """End the step: finish its copies."""
        if self._worker:
            self._worker.end_step(self._step())

    @is_a_miss(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose parked load has ended, and those whose load failed.

        The bytes were in DRAM already, so only a defect makes a load fail.
        """
        done, failed = self._worker.take_transfers() if self._worker else (set(), set())
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    @is_a_miss(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks of running requests that a defect left unloaded."""
        return self._worker.outcome.take_invalid_blocks() if self._worker else set()

    @is_a_miss(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what this rank finished since the last call."""
        return self._worker.take_report() if self._worker else None

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's block tables."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler:
            self._scheduler.bind(kv_cache_manager)

    @is_a_miss(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """Start to identify the request's adapter, media and prompt embeddings."""
        if self._scheduler:
            self._scheduler.identifier.begin(request)

    @is_a_miss(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that can be restored beyond `num_computed_tokens`.

        None: not known yet, vLLM asks again. True: the load runs between steps.
        """
        if not self._scheduler:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    @is_a_miss(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Admit the request: vLLM has allocated its blocks."""
        if self._scheduler:
            self._scheduler.on_allocated(request, num_external_tokens)
            self._scheduler.root.on_admitted(request)

    @is_a_miss(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return the restored tokens by tier."""
        return self._scheduler.hit_sources(request) if self._scheduler else {}

    @is_a_miss(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Order this step's loads and saves."""
        return self._scheduler.order_step(scheduler_output) if self._scheduler else StepMetadata()

    @is_a_miss(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Seal what all ranks have saved; unpin what all ranks have loaded."""
        meta, stats = connector_output.kv_connector_worker_meta, connector_output.kv_connector_stats
        if stats is not None:  # a MultiConnector has those of each connector by its class's name
            stats = stats.data.get(type(self).__name__, stats)
        if isinstance(stats, HeteroStats):
            self._recorder.add_reported(stats.data.get(COUNTERS, {}))
        if self._scheduler:
            if connector_output.invalid_block_ids:
                self._scheduler.on_invalid_blocks()
            report = meta if isinstance(meta, WorkerReport) else WorkerReport()
            self._scheduler.on_report(report)

    @is_a_miss(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the block events of what is stored; none unless the engine publishes its own."""
        return self._scheduler.take_events() if self._scheduler else ()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @is_a_miss(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the request's end. Never delays the release of its blocks."""
        handoff_tokens, report = 0, None
        if self._scheduler:
            handoff_tokens, report = self._scheduler.on_finished(request, block_ids)
        # Without a directory no other engine can read what is stored here, and in a MultiConnector
        # the keys may be those of another connector, which does hand the prompt off.
        answer = handoff_answer(request, handoff_tokens) if self._is_in_fleet else None
        if report is not None:
            answer = {**(answer or {}), **report_answer(report)}
        return False, answer

    @is_a_miss(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Return True while the engine must keep stepping so that saves are reported."""
        return self._scheduler is not None and self._scheduler.has_work

    @is_a_miss(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget everything stored, in every tier; False if a later process may find it again."""
        kept = self._scheduler.reset() if self._scheduler else True
        self._publish_sharing()
        return kept

    def on_weights_changed(self, version: str | None) -> None:
        """Store under another name from now on. `weight_updates` calls this, not vLLM."""
        if self._scheduler:
            self._scheduler.root.on_weights_changed(version)
            self._publish_sharing()

    def on_adapter_loaded(self, lora: LoRARequest, digest: bytes | None) -> None:
        """Note what an adapter's id stands for. `weight_updates` calls this, not vLLM."""
        if self._scheduler:
            self._scheduler.identifier.on_adapter_loaded(lora, digest)

    def on_loop_started(self, loop: Loop) -> None:
        """Wake an idle engine when there is something to report. `idle_steps` calls this."""
        if self._scheduler:
            self._scheduler.idle_steps.start(loop)

    # Both

    def shutdown(self) -> None:
        """Write what is sealed to SSD; stop threads; release memory."""
        with self._closing:
            for side in (self._worker, self._scheduler):
                if side is not None:
                    side.close()
            self._worker = self._scheduler = None
        if self._role is KVConnectorRole.SCHEDULER:
            rendezvous.withdraw_arena(self._engine)

    @is_a_miss(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the metrics recorded since the last call."""
        self._publish_sharing()
        payload = self._recorder.drain()
        return HeteroStats(data=payload) if payload else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return HeteroStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> HeteroPromMetrics:
        return HeteroPromMetrics(*args, **kwargs)

    def _publish_sharing(self) -> None:
        """Set the gauge of whether the engines of the fleet find what this one stores."""
        if self._scheduler and self._is_in_fleet:
            is_shared = float(self._scheduler.root.is_shared)
            if self._recorder.gauge("heterocache_shared") != is_shared:
                self._recorder.set("heterocache_shared", is_shared)

    def _release(self) -> None:
        """Close the store of an engine whose parent is dead; every later match is a miss.

        Called on a thread of its own. The side stays: a hook that runs meanwhile uses it, and the
        loads that vLLM has admitted must still be ordered.
        """
        with self._closing:
            if self._scheduler is not None:
                self._scheduler.close()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
