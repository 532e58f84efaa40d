"""Steps of the second model runner as FULL CUDA graphs, where there are none.

    with full_steps() as steps:
        generate(llm, prompt)

A replayed graph calls no layer hook, and it reads the buffers that it was captured with. Here the
model runs eagerly instead, while the hooks cannot find the connector; it gets the slot mappings of
the step, which must lie at the addresses of the first such step. vLLM's runner does the rest: it
calls `pre_forward` outside a forward context, as before each FULL graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch


@contextmanager
def full_steps(
    is_full: Callable[[int, int], bool] = lambda num_tokens, num_requests: True,
) -> Iterator[list[int]]:
    """Run the steps of `is_full` as FULL graphs; yields the tokens of each."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    steps: list[int] = []
    now: dict[str, Any] = {}
    """Of the present step: its runner, batch, attention metadata and slot mappings."""
    captured: dict[str, int] = {}
    """Address of each layer's slot mapping."""
    dispatch = model_runner.dispatch_cg_and_sync_dp
    build_mappings = model_runner.build_slot_mappings_by_layer
    before_forward = ActiveKVConnector.pre_forward
    execute = model_runner.GPUModelRunner.execute_model

    def dispatch_full(
        manager: Any, num_requests: int, num_tokens: int, *rest: Any, **kw: Any
    ) -> Any:
        batch, sync = dispatch(manager, num_requests, num_tokens, *rest, **kw)
        if is_full(num_tokens, num_requests):
            batch = replace(batch, cg_mode=CUDAGraphMode.FULL, num_reqs=num_requests)
        return batch, sync

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
        steps.append(batch.num_tokens)
        for layer, mapping in mappings.items():
            assert captured.setdefault(layer, mapping.data_ptr()) == mapping.data_ptr()
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

    with (
        patch.object(model_runner, "dispatch_cg_and_sync_dp", dispatch_full),
        patch.object(model_runner, "build_slot_mappings_by_layer", note_mappings),
        patch.object(ActiveKVConnector, "pre_forward", note_batch),
        patch.object(model_runner.GPUModelRunner, "execute_model", note_runner),
        patch.object(model_runner.ModelCudaGraphManager, "run_fullgraph", run_graph),
    ):
        yield steps
