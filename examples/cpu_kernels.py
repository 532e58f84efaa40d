"""Which of the example models vLLM can run on this machine's CPU."""

from __future__ import annotations

from collections.abc import Iterable


def why_not(model: str) -> str:
    """Why vLLM cannot run a checkpoint of `examples.checkpoints` on this CPU; "" if it can.

    Its wheel for CPUs has three builds of its kernels (`vllm/platforms/cpu.py`, `import_kernels`);
    the one for CPUs without AVX-512 has none of DeepSeek-V4's.
    """
    import torch  # reads OMP_NUM_THREADS, which whoever imports this module may still set

    if model.split("-")[0] == "deepseek_v4" and not torch.cpu._is_avx512_supported():
        return "vLLM has kernels for DeepSeek-V4 on CPUs with AVX-512 only, and this one has none"
    return ""


def runnable(models: Iterable[str]) -> list[str]:
    """Those that can be run; of the others it is said why not."""
    left = []
    for model in models:
        if reason := why_not(model):
            print(f"{model}: left out, {reason}", flush=True)
        else:
            left.append(model)
    return left
