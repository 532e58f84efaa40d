"""`HeteroConnector`: the class vLLM loads. Every method delegates in a line or two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from hetero_connector.engine.startup import parent_watch as orphan
from hetero_connector.engine.startup import rendezvous
from hetero_connector.engine.startup.engine_identity import engine_version
from hetero_connector.engine.startup.start import open_scheduler_side, open_worker_side
from hetero_connector.engine.worker.layer_hooks import called_in
from hetero_connector.metrics import Recorder
from hetero_connector.supported_vllm import check_version

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HeteroConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores a model's KV state as typed artifacts and restores prefixes from them."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(engine_version())
        self._config = HeteroConfig.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        self._recorder = Recorder()
        self._errors = HookErrors(self._recorder)
        self._scheduler = self._worker = None
        self._engine_id = str(self._kv_transfer_config.engine_id)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = open_scheduler_side(
                vllm_config, kv_cache_config, self._config, self._recorder
            )
            if self._scheduler:
                rendezvous.leave_arena(self._engine_id, self._scheduler.store.arena.handle)
            orphan.watch(self._release)
        else:
            self._worker = open_worker_side(
                vllm_config, kv_cache_config, self._config, self._recorder
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache, not a handoff: a dropped save is a future miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks are Python: full CUDA graphs would skip them.

        Asked in every process that reads the configuration, on machines without our disks too.
        """
        return bool(extra_config.get("layerwise", HeteroConfig.layerwise) != "off")

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Adopt the engine's pages and tell the scheduler side their geometry."""
        if self._worker:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> None:
        """Map the arena. vLLM asks every worker once both roles are there, before any request.

        Raises `StoreError` if it cannot be had: an engine that could load nothing must not start.
        """
        arena = rendezvous.find_arena(self._engine_id) if self._worker else None
        if self._worker and arena:
            self._worker.attach(arena)

    @is_a_miss(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First hook of a step: nothing has overwritten freed pages yet."""
        if self._worker:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.begin_step(kv_connector_metadata)

    @is_a_miss(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads."""
        if self._worker:
            step, attention = self._step(), kwargs.get("attn_metadata")
            if step.protected:
                attention = attention or forward_context.attn_metadata
                self._worker.start_replays(step, forward_context.slot_mapping, attention)
            self._worker.start_loads(step, hooks_called=called_in(forward_context))

    @is_a_miss(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until this layer's pages are loaded."""
        if self._worker:
            self._worker.layer_wanted(layer_name)

    @is_a_miss(lambda: None)
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Copy this layer's finished pages."""
        if self._worker:
            self._worker.layer_written(self._step(), layer_name)

    @is_a_miss(lambda: None)
    def wait_for_save(self) -> None:
        """Finish this step's copies."""
        if self._worker:
            self._worker.end_step(self._step())

    @is_a_miss(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Parked loads that have ended. The bytes were in DRAM: only a defect fails one."""
        done, failed = self._worker.outcome.take_transfers() if self._worker else (set(), set())
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    @is_a_miss(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of running requests that a defect left without what vLLM counts as loaded."""
        return self._worker.outcome.take_invalid_blocks() if self._worker else set()

    @is_a_miss(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank finished."""
        return self._worker.take_report() if self._worker else None

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Block tables."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler:
            self._scheduler.bind(kv_cache_manager)

    @is_a_miss(lambda: None)
    def on_new_request(self, request: Request) -> None:
        """Find out what names the request's state besides its tokens."""
        if self._scheduler:
            self._scheduler.identifier.begin(request)

    @is_a_miss(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be restored beyond `num_computed_tokens`; None to be asked again."""
        if not self._scheduler:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @is_a_miss(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request was admitted."""
        if self._scheduler:
            self._scheduler.allocated(request, num_external_tokens)

    @is_a_miss(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Restored tokens by tier."""
        return self._scheduler.hit_sources(request) if self._scheduler else {}

    @is_a_miss(StepMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """This step's loads and saves."""
        return self._scheduler.step(scheduler_output) if self._scheduler else StepMetadata()

    @is_a_miss(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Seal what all ranks have saved; unpin what all ranks have loaded."""
        report = connector_output.kv_connector_worker_meta
        if self._scheduler:
            told = report if isinstance(report, WorkerReport) else WorkerReport()
            self._scheduler.reported(told)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Without the hybrid manager: one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @is_a_miss(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the last boundary; never holds blocks."""
        tokens = self._scheduler.finished(request, block_ids) if self._scheduler else 0
        return False, handoff_answer(request, tokens)

    @is_a_miss(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keep stepping until every ordered save has been reported."""
        return self._scheduler is not None and self._scheduler.has_work

    @is_a_miss(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget everything stored, in every tier; False if a later process might find it again."""
        return self._scheduler.reset() if self._scheduler else True

    def weights_changed(self, version: str | None) -> None:
        """See `weight_updates`: vLLM has no such call."""
        if self._scheduler:
            self._scheduler.root.weights_changed(version)

    # Both

    def shutdown(self) -> None:
        """Write what is sealed to SSD; stop threads; release memory."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None
        if self._role is KVConnectorRole.SCHEDULER:
            rendezvous.forget_arena(self._engine_id)

    @is_a_miss(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What happened since the last call."""
        payload = self._recorder.drain()
        return HeteroStats(data=payload) if payload else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their payload."""
        return HeteroStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> HeteroPromMetrics:
        """Metrics on vLLM's `/metrics`."""
        return HeteroPromMetrics(*args, **kwargs)

    def _release(self) -> None:
        """Close the store under an engine that nobody uses: every later hook is a miss."""
        side, self._scheduler = self._scheduler, None
        if side is not None:
            side.close()

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
