"""A worker with which vLLM's CPU build runs pipeline stages.

A stage after the first needs a buffer for the output of the one before. The first model runner of
vLLM 0.32 makes it in a warm-up, which the CPU build leaves out without compilation. Only the
engine's worker processes import this module: vLLM's worker puts stand-ins for CUDA into torch.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """Makes the buffer when the model is loaded."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
