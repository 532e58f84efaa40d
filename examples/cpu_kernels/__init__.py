"""Kernels that let vLLM's CPU build run the example models, and which of them this CPU can run.

This directory is a plugin of vLLM: an engine process loads the kernels (`deepseek_v4_cpu`) if the
directory is on its path, where vLLM finds the entry point in `cpu_kernels-0.dist-info`.
`examples.serving` puts it there. It is not part of the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PLUGIN_PATH = str(Path(__file__).resolve().parent)


def unsupported_reason(model: str) -> str:
    """Return why vLLM cannot run a checkpoint of `examples.checkpoints` on this CPU; "" if it can.

    vLLM's CPU build has three builds of its kernels (`vllm/platforms/cpu.py`, `import_kernels`);
    the one for CPUs without AVX-512 has none for DeepSeek-V4.
    """
    import torch  # reads OMP_NUM_THREADS, which whoever imports this module may still set

    if model.split("-")[0] == "deepseek_v4" and not torch.cpu._is_avx512_supported():
        return "vLLM's kernels for DeepSeek-V4 need a CPU with AVX-512"
    return ""


def runnable(models: Iterable[str]) -> list[str]:
    """Return the models that this CPU can run; print why the others are skipped."""
    supported = []
    for model in models:
        if reason := unsupported_reason(model):
            print(f"{model}: skipped, {reason}", flush=True)
        else:
            supported.append(model)
    return supported
