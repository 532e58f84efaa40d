"""Read the engine's `Fingerprint` from vLLM's configuration, and check that it is supported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import vllm
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform

from hetero_connector import __version__, machine
from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.identity import Fingerprint, canonical_config
from hetero_connector.artifacts.model_files import (
    DIGEST_BYTES,
    files_digest,
    locate_model,
    processor_digest,
    tokenizer_digest,
    weights_digest,
)
from hetero_connector.artifacts.tensor_parallel import whole_model
from hetero_connector.engine.startup.rendezvous import WorkerGeometry
from hetero_connector.engine.startup.rounding import SHARED
from hetero_connector.errors import IdentityError, UnsupportedModelError
from hetero_connector.metrics import Recorder
from hetero_connector.planner.profile import ProfileSubject
from hetero_connector.spec import StateType

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PLATFORMS = ("cpu", "cuda")
"""vLLM's names of the platforms that the connector works on."""
_UNFAITHFUL_BACKENDS = {
    "CPU_MLA": (
        "vLLM's CPU_MLA backend decodes with other results than it prefills, so state it "
        "wrote cannot be resumed from exactly"
    ),
}
"""Attention backends on which even the engine's own prefix hit changes the answer."""
_LOAD_FORMATS = (
    *("auto", "hf", "safetensors", "pt", "fastsafetensors", "instanttensor", "mistral", "dummy"),
    *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
)
"""Load formats that read the files whose digest is the identity. Not so `npcache`, which reads a
copy that it made of earlier files, and those that take weights from another process or place."""
_PART_REPOSITORIES = ("text_model_id", "audio_model_id")
"""Fields of a config that name repositories with weights of the model's parts (Ultravox)."""


def fingerprint(
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    geometry: WorkerGeometry,
    chunk_tokens: int,
    *,
    any_tp: bool = False,
) -> Fingerprint:
    """Return the identity of everything that can change stored bytes.

    `any_tp`: engines of all TP sizes get one fingerprint. It differs from that of an engine which
    uses only state of its own TP size, also at TP 1. Raises IdentityError if files are missing.
    """
    model = config.model_config
    source = locate_model(model.model, model.revision)
    return Fingerprint(
        architecture=str(model.architecture),
        hf_config=canonical_config(model.hf_config.to_dict()),
        weights=_weights(config.load_config, model.model, model.revision, source.path),
        tokenizer=_tokenizer(model, source.path),
        quantization=model.quantization,
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        model_dtype=_dtype(config),
        model_spec=whole_model(geometry.model) if any_tp else geometry.model,
        layout=str(kv_cache.kv_cache_layout),
        attention_backend=",".join(geometry.attention_backends),
        engine_version=engine_version(),
        chunk_tokens=chunk_tokens,
        extras=tuple(sorted(_extras(config, geometry, source.path, any_tp=any_tp).items())),
        model_name=model.model,
    )


def record_info(identity: Fingerprint, recorder: Recorder) -> None:
    """Record the versions, the model and the layout, for queries that join them."""
    recorder.set(
        "heterocache_info",
        1,
        version=__version__,
        vllm=identity.engine_version,
        fingerprint=identity.hex[:16],
        format=str(identity.format_version),
        layout=identity.layout,
        chunk_tokens=str(identity.chunk_tokens),
        tp_size=str(identity.model_spec.tp_size),
    )


def profile_subject(config: VllmConfig) -> ProfileSubject:
    """Return the model and machine that this engine's costs belong to, without reading files."""
    model = config.model_config
    fields = {
        "architecture": str(model.architecture),
        "hf_config": json.loads(canonical_config(model.hf_config.to_dict())),
        "model_dtype": _dtype(config),
        "quantization": model.quantization,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "tp_size": config.parallel_config.tensor_parallel_size,
    }
    on_cpu = config.device_config.device_type == "cpu"
    device = machine.processor() if on_cpu else str(current_platform.get_device_name())
    stages = config.parallel_config.pipeline_parallel_size
    return ProfileSubject.of(
        fields, device if stages == 1 else f"{device}, {stages} pipeline stages"
    )


def engine_version() -> str:
    """Return the version of the vLLM that runs here, whichever distribution it came with."""
    return str(vllm.__version__)


def unsupported_reason(geometry: WorkerGeometry, config: VllmConfig) -> str | None:
    """Return why nothing may be stored for this engine; None if it is supported."""
    for backend in geometry.attention_backends:
        if backend in _UNFAITHFUL_BACKENDS:
            return _UNFAITHFUL_BACKENDS[backend]
    model, max_tokens = geometry.model, config.model_config.max_model_len
    if not model.stored_layers:
        return "it keeps no state that a later request could use"
    if StateType.RECURRENT in model.state_types and model.alignment >= max_tokens:
        return (
            f"its recurrent state can be resumed every {model.alignment:,} tokens only, and a "
            f"request has at most {max_tokens:,}: switch vLLM's prefix cache on "
            "(--enable-prefix-caching), or raise --max-model-len"
        )
    return None


def check_supported(config: VllmConfig) -> None:
    """Raise UnsupportedModelError for settings under which a restore is not shown to be exact."""
    if (platform := current_platform.device_name) not in PLATFORMS:
        raise UnsupportedModelError(
            f"HeteroConnector works on {' and '.join(PLATFORMS)}, not on vLLM's platform "
            f"{platform!r}: drop --kv-transfer-config there"
        )
    role = None if config.kv_transfer_config is None else config.kv_transfer_config.kv_role
    if role not in (None, "kv_both"):
        raise UnsupportedModelError(
            f"kv_role {role!r}: HeteroConnector loads and saves in every engine, and vLLM orders "
            'its own writes against both for one role only; set "kv_role": "kv_both"'
        )
    parallel = config.parallel_config
    sizes = {
        "decode-context-parallel-size": parallel.decode_context_parallel_size,
        "prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size > 1:
            raise UnsupportedModelError(
                f"--{option} {size}: HeteroConnector stores equal shards of whole tokens; "
                f"set --{option} 1"
            )
    if config.model_config.is_moe and parallel.enable_elastic_ep:
        raise UnsupportedModelError(
            "--enable-elastic-ep: vLLM then changes the number of engines that the experts are on "
            "while it runs, and with it how results round: drop --enable-elastic-ep"
        )
    if config.attention_config.hisparse_config is not None:
        raise UnsupportedModelError(
            "HiSparse keeps part of the KV cache in host memory, in blocks of its own, which "
            "HeteroConnector cannot copy: set hisparse_config in --attention-config to null"
        )
    if config.model_config.model_weights:
        raise UnsupportedModelError(
            f"the weights are read from {config.model_config.model_weights}, not from the model's "
            "files, whose digest identifies what is stored: serve a local copy, without "
            "model_weights"
        )
    loads, dtypes = [config.load_config], [config.cache_config.cache_dtype]
    if (draft := config.speculative_config) is not None:
        loads += [draft.draft_load_config] if draft.draft_load_config is not None else []
        dtypes += [draft.kv_cache_dtype] if draft.kv_cache_dtype else []
    for load in loads:
        _check_files_are_read(load)
    for dtype in dtypes:
        if dtype not in get_args(CacheDType):
            raise UnsupportedModelError(
                f"--kv-cache-dtype {dtype}: a plugin of vLLM brings this format, which may keep "
                "part of its state outside the pages: set --kv-cache-dtype to auto or fp8"
            )


def _check_files_are_read(load: LoadConfig) -> None:
    """Raise UnsupportedModelError if vLLM may load other weights than those that are digested."""
    if load.load_format not in _LOAD_FORMATS:
        raise UnsupportedModelError(
            f"--load-format {load.load_format} loads other weights than the model's files, whose "
            "digest identifies what is stored: set --load-format auto, also in draft_load_config"
        )
    pattern = (load.model_loader_extra_config or {}).get("pattern")
    if pattern and ("/" in pattern or not pattern.endswith(".safetensors")):
        raise UnsupportedModelError(
            f"--model-loader-extra-config: files by the pattern {pattern!r} are no part of the "
            "digest that identifies what is stored: name them *.safetensors in the model's folder"
        )


def _dtype(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _weights(load: LoadConfig, model: str, revision: str | None, code: Path | None = None) -> bytes:
    """Return the digest of the files that vLLM has loaded.

    Dummy weights have none: they follow from the config and the seed. `code`: the model's files in
    Hugging Face's own cache, where code is read from also with `--download-dir`.
    """
    if load.load_format == "dummy":
        return b""
    return weights_digest(locate_model(model, revision, load.download_dir).path, code)


def _code(model: ModelConfig) -> str:
    """Return the commits of code that `trust_remote_code` runs from elsewhere than its files.

    It is in repositories that the config names, and at `--code-revision`. A folder has no commit,
    but a digest of its files. Of a snapshot each host has only the files that it has needed.
    """
    if not model.trust_remote_code:
        return ""
    named = (getattr(model.hf_config, "auto_map", None) or {}).items()
    references = [x for name, x in named if name.startswith(("AutoConfig", "AutoModel"))]
    repositories = {x.partition("--")[0] for x in references if "--" in x} - {model.model}
    if model.code_revision:
        repositories.add(model.model)
    versions = []
    for repository in sorted(repositories):
        try:
            code = locate_model(repository, model.code_revision)
        except IdentityError:  # what is not on this machine has not run
            continue
        versions.append(code.revision or files_digest(code.path, _is_python).hex())
    return " ".join(versions)


def _is_python(name: str) -> bool:
    return name.endswith(".py")


def _tokenizer(model: ModelConfig, source: Path) -> bytes:
    """Return the digest of the tokenizer's files.

    An engine may run where its tokenizer is not, if its API server is elsewhere or has none; then
    it is that of the tokenizer's name.
    """
    if not model.tokenizer:
        return tokenizer_digest(source)
    try:
        return tokenizer_digest(locate_model(model.tokenizer, model.tokenizer_revision).path)
    except IdentityError:
        name = encode(["tokenizer", model.tokenizer, model.tokenizer_revision])
        return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()


def _draft(speculative: Any, target_load: LoadConfig) -> dict[str, Any]:
    """Return the draft model's identity: its layers have KV among the cache layers.

    A draft without files (ngram, MTP) is identified by its method and settings.
    """
    draft = getattr(speculative, "draft_model_config", None)
    settings = f"{speculative.method} {speculative.num_speculative_tokens}"
    if draft is None or not getattr(draft, "model", None):
        return {"draft_model": settings}
    load = speculative.draft_load_config or target_load
    weights = _weights(load, draft.model, draft.revision)
    return {
        "draft_model": f"{settings} {weights.hex()}",
        "draft_config": canonical_config(draft.hf_config.to_dict()),
        "draft_code": _code(draft),
        "draft_load_format": load.load_format,
        "draft_seed": draft.seed if load.load_format == "dummy" else "",
        "draft_dtype": draft.dtype,
        "draft_quantization": draft.quantization,
    }


def _lora(lora: Any) -> dict[str, Any]:
    """Return the LoRA settings that change results, also of requests without an adapter."""
    return {
        "lora_dtype": lora.lora_dtype,
        "lora_rank": lora.max_lora_rank,
        "lora_sharded": lora.fully_sharded_loras,
        "lora_targets": sorted(lora.target_modules or ()),
        "lora_tower": lora.enable_tower_connector_lora,
        "lora_experts": (lora.enable_mixed_moe_lora_format, lora.enable_moe_shared_loras),
    }


def _media(model: Any, source: Path) -> dict[str, Any]:
    """Return the settings by which images, audio and video become tensors and embeddings."""
    media = model.multimodal_config
    names = (
        "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_tp_mode",
        "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
        "video_pruning_rate", "video_pruning_method", "language_model_only",
    )  # fmt: skip
    settings = canonical_config({name: getattr(media, name) for name in names})
    return {"media_processor": processor_digest(source).hex(), "media_settings": settings}


def _length(model: Any) -> int:
    """Return the model's maximum length, which LongRoPE and Llama 4's temperature depend on.

    With `--max-model-len auto` vLLM fits the length to the memory later, and to another value at
    each start; then this is the model's own maximum.
    """
    if model.original_max_model_len == -1:
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


def _extras(
    config: VllmConfig, geometry: WorkerGeometry, source: Path, *, any_tp: bool
) -> dict[str, str]:
    model, cache, load = config.model_config, config.cache_config, config.load_config
    extras: dict[str, Any] = {
        "device": geometry.device,
        "max_model_len": _length(model),
        "attention_temperature": model.override_generation_config.get("attn_temperature_tuning"),
        "code": _code(model),
        "load_format": load.load_format,
        "seed": model.seed if load.load_format == "dummy" else "",
        "quantization_config": repr(model.quantization_config),
        "mamba_cache_dtype": cache.mamba_cache_dtype,
        "mamba_ssm_cache_dtype": cache.mamba_ssm_cache_dtype,
        "expert_parallel": config.parallel_config.enable_expert_parallel,
    }
    if any_tp:
        extras["tp_sizes"] = "any"
    if config.parallel_config.pipeline_parallel_size > 1:  # compiled stages may round differently
        extras["pipeline_stages"] = config.parallel_config.pipeline_parallel_size
    if config.speculative_config is not None:
        extras |= _draft(config.speculative_config, load)
    for name in _PART_REPOSITORIES:
        if repository := getattr(model.hf_config, name, None):
            extras[name] = _weights(load, repository, None).hex()
    if config.lora_config is not None:
        extras |= _lora(config.lora_config)
    if model.multimodal_config is not None:
        extras |= _media(model, source)
    for name, value in geometry.rounding.items():
        if name in SHARED or not any_tp:
            extras[name] = value
    return {key: str(value) for key, value in extras.items()}
