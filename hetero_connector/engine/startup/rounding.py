"""Describe everything, besides model and shapes, that decides how an engine's results round.

Two engines that differ in any of it compute state that differs in the last digits, so they do not
share state. Names of places (hosts, ports, directories) are left out, so that two equal hosts
share. This runs in a worker's process, where the device and the number of threads are known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.platforms import current_platform

from hetero_connector import machine
from hetero_connector.artifacts.identity import canonical_config
from hetero_connector.artifacts.model_files import files_digest

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.kernel import KernelConfig

SHARED = frozenset({"machine", "libraries", "switches"})
"""Parts that engines of different tensor-parallel sizes must have in common to share state. They
round differently anyway, so the other parts do not count."""

_LIBRARIES = (
    *("torch", "torchao", "triton", "flashinfer-python", "flash-attn", "zentorch"),
    "transformers",  # vLLM runs many models, text models too, by its code
)
_OTHER_SWITCHES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO",
    "VLLM_ZENTORCH_WEIGHT_PREPACK", "VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS",
)  # fmt: skip
_PLACES = frozenset(
    (
        *("HOST", "HOSTNAME", "PORT", "IP", "IPS", "RANK", "LOCAL", "DP", "RAY", "NIC", "NIXL"),
        *("MOONCAKE", "P2P", "INDICES", "BIND", "NUM", "THREADS", "PATH", "DIR", "HOME", "CACHE"),
        *("PREFIX", "REPO", "URL", "BUILD", "DOCKER", "COMMIT", "TAG", "DATE", "USAGE", "PLUGINS"),
        *("TIMEOUT", "LOG", "LOGO", "LOGGING", "DEBUG", "PROFILING"),
        *("API", "COMPLETION", "EVENTS", "ID", "INSECURE", "INSTRUCTIONS", "SEQUENCES", "STRINGS"),
        *("TOOL", "UPDATING", "WORDS", "PARSER", "FRONTEND"),
    )
)
"""Words in the names of vLLM's variables that are of a place, a person, the log or the server's
API, not of a computation."""


def rounding(config: VllmConfig) -> dict[str, str]:
    """Return the identity's parts that only change how results round, by name."""
    return {
        "machine": _machine(config.device_config.device_type),
        "threads": str(torch.get_num_threads()) if current_platform.is_cpu() else "",
        "libraries": ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES),
        "compilation": _compilation(config.compilation_config),
        "kernels": _kernels(config.kernel_config),
        "attention": config.attention_config.compute_hash(),
        "recurrent": canonical_config(asdict(config.mamba_config)),
        "additional": _additional(config.additional_config),
        "switches": _switches(),
        "cascade_attention": str(not config.model_config.disable_cascade_attn),
        "all_reduce": str(not config.parallel_config.disable_custom_all_reduce),
        "all_to_all": str(config.parallel_config.all2all_backend),
        "experts": _experts(config),
    }


def _machine(device_type: str) -> str:
    """Return a GPU's name and compute capability, or a CPU's name, instruction sets and caches.

    The instruction sets choose the kernels of torch, oneDNN and vLLM. oneDNN divides matrices by
    the sizes of the caches, and MKL depends on the vendor, which is part of the name. The number of
    cores is no part of it; the number of threads is.
    """
    if device_type == "cpu":
        known = torch.cpu.get_capabilities()
        sets = sorted(name for name, value in known.items() if value is True)
        caches = [f"{name} {known.get(name)}" for name in ("l1d_cache_size", "l2_cache_size")]
        chosen = f"torch {torch.backends.cpu.get_cpu_capability()}"
        return f"{machine.processor_name()}; {chosen}; {', '.join(caches)}; {' '.join(sets)}"
    if current_platform.is_cuda_alike():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()}, {major}.{minor}"
    return str(current_platform.get_device_name())


def _compilation(config: CompilationConfig) -> str:
    """Return what is compiled and fused. CUDA graphs do not count: they replay the same kernels."""
    if not config.mode:
        return f"none, custom ops {sorted(config.custom_ops)}"
    inductor = {
        name: value
        for name, value in config.inductor_compile_config.items()
        if isinstance(value, (bool, int, str))
    }
    return (
        f"{config.mode} {config.backend}, custom ops {sorted(config.custom_ops)}, "
        f"{sorted(inductor.items())}, passes {config.pass_config.compute_hash()}"
    )


def _kernels(config: KernelConfig) -> str:
    """Return vLLM's hash of the kernels, and whether FlashInfer is tuned, which is not in it."""
    return f"{config.compute_hash()}, tuned {config.enable_flashinfer_autotune}"


def _experts(config: VllmConfig) -> str:
    """Return the number of engines that the model's experts are on, and whether they move.

    Each engine adds up its own experts first, so sums round differently.
    """
    if not config.model_config.is_moe:
        return ""
    parallel = config.parallel_config
    return f"over {parallel.data_parallel_size} engines, balanced {parallel.enable_eplb}"


def _additional(config: Any) -> str:
    """Return `--additional-config`, in which vLLM also keeps the kernels of delta nets."""
    return canonical_config(config) if isinstance(config, Mapping) else str(config.compute_hash())


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "-"


def _switches() -> str:
    """Return the variables that choose kernels and are set, by vLLM's list for compiled graphs."""
    names = [x for x in envs.compile_factors() if not _PLACES & set(x.split("_"))]
    chosen = sorted(name for name in (*names, *_OTHER_SWITCHES) if name in os.environ)
    shown = [f"{name}={os.environ[name]}" for name in chosen]
    if (folder := os.environ.get("VLLM_TUNED_CONFIG_FOLDER")) is not None:
        shown.append(f"tuned kernels {_tuned_kernels(Path(folder))}")
    return " ".join(shown)


def _tuned_kernels(folder: Path) -> str:
    """Return the digest of the files that vLLM may choose, which it does by the device's name.

    They are told by its first two words: for some devices vLLM looks for no more of the name.
    """
    if not folder.is_dir():
        return ""
    device = "_".join(current_platform.get_device_name().replace("-", " ").split()[:2])
    return files_digest(
        folder, lambda name: name.endswith(".json") and device in name.replace("-", "_")
    ).hex()
