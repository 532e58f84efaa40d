"""Steps of the second model runner as FULL CUDA graphs, where there are none.

    with full_steps() as steps:
        generate(llm, prompt)

A replayed graph calls no layer hook, and it reads the buffers that it was captured with. Here the
model runs eagerly instead, while the hooks cannot find the connector; it gets the slot mappings of
the step, which must lie at the addresses of the first such step. vLLM's runner does the rest: it
calls `pre_forward` outside a forward context, as before each FULL graph.

`full_decodes` lets vLLM's dispatcher choose the steps instead, as it does on CUDA by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

CAPTURE_SIZES = (2, 4, 8, 64, 256)
"""Batches are padded to these: even one decode gets a row that is nobody's."""

Dispatch = Callable[..., tuple[Any, Any]]
"""Arguments and results of vLLM's `dispatch_cg_and_sync_dp`."""


def full_steps() -> AbstractContextManager[list[int]]:
    """Run every step as a FULL graph; yields the tokens of each."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.model_runner import dispatch_cg_and_sync_dp

    def dispatch(manager: Any, num_requests: int, *rest: Any, **kw: Any) -> tuple[Any, Any]:
        batch, sync = dispatch_cg_and_sync_dp(manager, num_requests, *rest, **kw)
        return replace(batch, cg_mode=CUDAGraphMode.FULL, num_reqs=num_requests), sync

    return _full_graphs(dispatch)


def full_decodes(sizes: Sequence[int] = CAPTURE_SIZES) -> AbstractContextManager[list[int]]:
    """Run the steps as on CUDA by default: decodes as FULL graphs, others as PIECEWISE ones.

    Batches are padded to `sizes`; larger ones run eagerly. Yields the tokens of each FULL step,
    with padding.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import dispatch_cg_and_sync_dp

    dispatchers: dict[int, CudaGraphManager] = {}
    """By the manager of an engine."""

    def dispatcher_like(manager: Any) -> CudaGraphManager:
        config = manager.vllm_config.compilation_config
        dispatcher = CudaGraphManager(
            manager.vllm_config, manager.device, CUDAGraphMode.NONE, manager.decode_query_len
        )
        dispatcher.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        with (
            patch.object(config, "cudagraph_capture_sizes", list(sizes)),
            patch.object(config, "max_cudagraph_capture_size", max(sizes)),
        ):
            dispatcher._init_candidates()
        dispatcher._graphs_captured = True
        return dispatcher

    def dispatch(manager: Any, *rest: Any, **kw: Any) -> tuple[Any, Any]:
        if id(manager) not in dispatchers:
            dispatchers[id(manager)] = dispatcher_like(manager)
        return dispatch_cg_and_sync_dp(dispatchers[id(manager)], *rest, **kw)

    return _full_graphs(dispatch)


@contextmanager
def _full_graphs(dispatch: Dispatch) -> Iterator[list[int]]:
    """Run the model eagerly in place of the FULL graphs that `dispatch` asks for.

    Engines without a connector run eagerly: they are a reference.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    steps: list[int] = []
    now: dict[str, Any] = {}
    """The present step's runner, batch, attention metadata and slot mappings."""
    captured: dict[tuple[int, str], int] = {}
    """Address of each runner's and layer's slot mapping."""
    eager = model_runner.dispatch_cg_and_sync_dp
    build_mappings = model_runner.build_slot_mappings_by_layer
    before_forward = ActiveKVConnector.pre_forward
    execute = model_runner.GPUModelRunner.execute_model

    def note_mappings(*arguments: Any) -> Any:
        now["mappings"] = build_mappings(*arguments)
        return now["mappings"]

    def note_batch(self: Any, output: Any, batch: Any = None, attn_metadata: Any = None) -> None:
        now.update(batch=batch, attention=attn_metadata)
        before_forward(self, output, batch, attn_metadata)

    def note_runner(self: Any, *arguments: Any, **kw: Any) -> Any:
        now["runner"] = self
        return execute(self, *arguments, **kw)

    def run_graph(self: Any, descriptor: Any) -> Any:
        batch, runner, mappings = now["batch"], now["runner"], now["mappings"]
        steps.append(batch.num_tokens_after_padding)
        for layer, mapping in mappings.items():
            key = id(runner), layer
            assert captured.setdefault(key, mapping.data_ptr()) == mapping.data_ptr()
        with (
            patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", None),
            set_forward_context(
                now["attention"],
                runner.vllm_config,
                num_tokens=batch.num_tokens_after_padding,
                slot_mapping=mappings,
                is_padding=batch.is_padding,
            ),
        ):
            return runner.model(
                input_ids=batch.input_ids,
                positions=batch.positions,
                inputs_embeds=None,
                intermediate_tensors=None,
            )

    def dispatch_with_connector(*arguments: Any, **kw: Any) -> tuple[Any, Any]:
        has_connector = isinstance(now["runner"].kv_connector, ActiveKVConnector)
        return (dispatch if has_connector else eager)(*arguments, **kw)

    with (
        patch.object(model_runner, "dispatch_cg_and_sync_dp", dispatch_with_connector),
        patch.object(model_runner, "build_slot_mappings_by_layer", note_mappings),
        patch.object(ActiveKVConnector, "pre_forward", note_batch),
        patch.object(model_runner.GPUModelRunner, "execute_model", note_runner),
        patch.object(model_runner.ModelCudaGraphManager, "run_fullgraph", run_graph),
    ):
        yield steps
