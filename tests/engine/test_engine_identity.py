"""An engine's fingerprint has everything that changes stored bytes, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from vllm import envs
from vllm.config import KVTransferConfig, LoadConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs

from examples.checkpoints import write_checkpoint
from examples.serving import engine_arguments
from hetero_connector import machine
from hetero_connector.artifacts.identity import Fingerprint
from hetero_connector.artifacts.model_files import tokenizer_digest
from hetero_connector.engine.startup import rounding as rounding_module
from hetero_connector.engine.startup.engine_identity import (
    check_supported,
    fingerprint,
    unsupported_reason,
)
from hetero_connector.engine.startup.heads import equal_on_all_ranks
from hetero_connector.engine.startup.rendezvous import WorkerGeometry
from hetero_connector.engine.startup.rounding import SHARED, rounding
from hetero_connector.errors import IdentityError, UnsupportedModelError
from hetero_connector.spec import LayerSpec, ModelSpec, StateType
from tests.engine.fakes import HYBRID, layer
from tests.engine.harness import CHECKPOINTS

pytestmark = pytest.mark.engine


def engine_config(**arguments: Any) -> Any:
    arguments = {
        "model": str(write_checkpoint("dense", CHECKPOINTS)),
        "skip_tokenizer_init": True,
        **engine_arguments("dense"),
        **arguments,
    }
    return EngineArgs(**arguments).create_engine_config()


@pytest.fixture(scope="module")
def shared_config() -> Any:
    return engine_config()


@pytest.fixture
def config(shared_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's configuration, which tests change with `monkeypatch`."""
    return shared_config


def identity(config: Any, *, any_tp: bool = False, **changed: Any) -> Fingerprint:
    geometry = WorkerGeometry(
        rank=0,
        model=HYBRID,
        attention_backends=("CPU_ATTN",),
        device="cpu",
        pid=os.getpid(),
        rounding=rounding(config),
    )
    kv_cache: Any = SimpleNamespace(kv_cache_layout="LBHNC")
    return fingerprint(config, kv_cache, replace(geometry, **changed), 64, any_tp=any_tp)


def test_an_engine_that_is_started_again_has_its_identity(config: Any) -> None:
    """Process, port, worker, memory and log are no part of the identity."""
    again = engine_config(
        kv_cache_memory_bytes=1 << 28, max_num_seqs=4, served_model_name=["another"]
    )
    assert identity(again) == identity(config)
    assert identity(again).digest == identity(config, pid=1).digest


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "max_model_len", 8192),
        ("model_config", "quantization", "fp8"),
        ("model_config", "quantization_config", QuantizationConfigArgs(ignore=["*mlp*"])),
        ("model_config", "disable_cascade_attn", False),
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "mamba_cache_dtype", "float16"),
        ("cache_config", "mamba_ssm_cache_dtype", "float16"),
        ("load_config", "load_format", "dummy"),
        ("parallel_config", "enable_expert_parallel", True),
        ("parallel_config", "all2all_backend", "deepep_low_latency"),
        ("parallel_config", "disable_custom_all_reduce", False),
        ("compilation_config", "mode", 3),
        ("compilation_config", "custom_ops", ["none"]),
        ("attention_config", "flash_attn_version", 2),
        ("mamba_config", "ssu_algorithm", "simple"),
        ("additional_config", None, {"gdn_prefill_backend": "triton"}),
        ("additional_config", None, SimpleNamespace(compute_hash=lambda: "another")),
        ("kernel_config", "moe_backend", "triton"),
        ("kernel_config", "enable_flashinfer_autotune", None),
        ("lora_config", None, SimpleNamespace(
            lora_dtype="float16", max_lora_rank=8, fully_sharded_loras=False, target_modules=None,
            enable_tower_connector_lora=False, enable_mixed_moe_lora_format=False,
            enable_moe_shared_loras=False,
        )),
    ],
)  # fmt: skip
def test_what_changes_the_bytes_changes_the_identity(
    config: Any, monkeypatch: pytest.MonkeyPatch, part: str, name: str | None, value: object
) -> None:
    before = identity(config).digest
    if name is None:
        monkeypatch.setattr(config, part, value)
    else:
        monkeypatch.setattr(getattr(config, part), name, value)
    assert identity(config).digest != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_dtype", "bfloat16"), ("fully_sharded_loras", True), ("target_modules", ["q_proj"]),
        ("max_lora_rank", 16), ("enable_tower_connector_lora", True),
    ],
)  # fmt: skip
def test_how_adapters_are_applied_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    lora = SimpleNamespace(
        lora_dtype="float16", max_lora_rank=8, fully_sharded_loras=False, target_modules=None,
        enable_tower_connector_lora=False, enable_mixed_moe_lora_format=False,
        enable_moe_shared_loras=False,
    )  # fmt: skip
    monkeypatch.setattr(config, "lora_config", lora)
    before = identity(config).digest
    monkeypatch.setattr(lora, name, value)
    assert identity(config).digest != before


def draft_model(folder: Path) -> SimpleNamespace:
    (folder / "model.bin").write_bytes(b"weights")
    return SimpleNamespace(
        model=str(folder), revision=None, code_revision=None, dtype="bfloat16", quantization=None,
        trust_remote_code=False, seed=0,
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 64}),
    )  # fmt: skip


def drafting_by(draft: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        method="eagle", num_speculative_tokens=3, draft_model_config=draft, draft_load_config=None
    )


@pytest.mark.parametrize("part", ["weights", "hidden_size", "dtype", "method"])
def test_a_draft_model_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    draft = draft_model(tmp_path)
    speculative = drafting_by(draft)
    without = identity(config).digest
    monkeypatch.setattr(config, "speculative_config", speculative)
    before = identity(config).digest
    if part == "weights":
        (tmp_path / "model.bin").write_bytes(b"another")
    elif part == "hidden_size":
        draft.hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 128})
    elif part == "dtype":
        draft.dtype = "float16"
    else:
        speculative.method = "eagle3"
    assert len({without, before, identity(config).digest}) == 3


def test_how_a_draft_is_loaded_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dummy weights are their seed, also those of a draft alone."""
    draft = draft_model(tmp_path)
    speculative = drafting_by(draft)
    monkeypatch.setattr(config, "speculative_config", speculative)
    digests = [identity(config).digest]
    for load_format, seed in (("auto", 1), ("sharded_state", 0), ("dummy", 0), ("dummy", 1)):
        speculative.draft_load_config = LoadConfig(load_format=load_format)
        draft.seed = seed
        digests.append(identity(config).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_what_is_quantised_and_how_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    monkeypatch.setattr(config.model_config, "quantization", "online")
    for activation in (None, "fp8_per_token", "fp8_per_tensor_dynamic"):
        how = {"linear": {"weight": "fp8_per_channel_static", "activation": activation}}
        resolved = QuantizationConfigArgs(**how)  # type: ignore[arg-type]
        monkeypatch.setattr(config.model_config, "quantization_config", resolved)
        digests.add(identity(config).digest)
    assert len(digests) == 3


@pytest.mark.parametrize("field", ["text_model_id", "audio_model_id"])
def test_weights_in_repositories_that_the_config_names_are_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str
) -> None:
    monkeypatch.setattr(config.model_config.hf_config, field, str(tmp_path), raising=False)
    digests = set()
    for content in (b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(identity(config).digest)
    assert len(digests) == 2


def test_dummy_weights_need_no_files_and_are_their_seed(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config.model_config, "model", str(tmp_path))
    with pytest.raises(IdentityError, match="contains no weights"):
        identity(config)
    monkeypatch.setattr(config.load_config, "load_format", "dummy")
    before = identity(config).digest
    monkeypatch.setattr(config.model_config, "seed", 7)
    assert identity(config).digest != before


def hub(
    root: Path, repository: str, files: dict[str, bytes], commit: str = "0123456789" * 4
) -> Path:
    """Write the newest snapshot of a repository into a Hugging Face cache; return its folder."""
    folder = root / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    return snapshot


def test_weights_may_be_in_a_download_dir(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM keeps a model's config, tokenizer and code in Hugging Face's own cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    files = {"tokenizer.json": b"{}", "modeling_x.py": b"1"}
    code = hub(tmp_path / "home", "org/m", files) / "modeling_x.py"
    weights = hub(tmp_path / "else", "org/m", {"model.safetensors": b"w"}) / "model.safetensors"
    for name in ("model", "tokenizer"):
        monkeypatch.setattr(config.model_config, name, "org/m")
    with pytest.raises(IdentityError, match="contains no weights"):
        identity(config)
    monkeypatch.setattr(config.load_config, "download_dir", str(tmp_path / "else"))
    made = [identity(config)]
    weights.write_bytes(b"v")
    made.append(identity(config))
    code.write_bytes(b"2")
    made.append(identity(config))
    assert len({x.weights for x in made}) == 3
    assert {x.tokenizer for x in made} == {tokenizer_digest(code.parent)}


@pytest.mark.parametrize("place", ["repository", "revision", "folder", "draft"])
def test_code_that_is_not_among_the_models_files_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model, base = config.model_config, "org/base"
    if place == "draft":
        model = draft_model(tmp_path)
        monkeypatch.setattr(config, "speculative_config", drafting_by(model))
    if place == "folder":
        base = str(tmp_path)
    if place == "revision":
        monkeypatch.setattr(model, "model", "org/m")
    else:
        names = {"AutoModel": f"{base}--modeling_x.X", "AutoConfig": "org/absent--config_x.X"}
        monkeypatch.setattr(model.hf_config, "auto_map", names, raising=False)

    def update(commit: str) -> None:
        if place == "folder":
            (tmp_path / "modeling_x.py").write_text(commit)
        elif place == "revision":
            hub(tmp_path, "org/m", {}, commit)
            hub(tmp_path, "org/m", {"model.bin": b"w"})
            monkeypatch.setattr(model, "code_revision", commit)
        else:
            hub(tmp_path, base, {}, commit)

    for is_trusted in (False, True):
        monkeypatch.setattr(model, "trust_remote_code", is_trusted)
        digests = set()
        for commit in ("a" * 40, "b" * 40):
            update(commit)
            digests.add(identity(config).digest)
        assert len(digests) == (2 if is_trusted else 1)


def test_code_that_a_host_has_not_needed_yet_is_no_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers fetches the files of a repository with code one by one."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model, names = config.model_config, {"AutoModel": "org/base--modeling_x.X"}
    monkeypatch.setattr(model.hf_config, "auto_map", names, raising=False)
    monkeypatch.setattr(model, "trust_remote_code", True)
    digests = set()
    for name in ("modeling_x.py", "tokenization_x.py"):
        hub(tmp_path, "org/base", {name: b"1"})
        digests.add(identity(config).digest)
    assert len(digests) == 1


def test_a_tokenizer_of_another_repository_is_that_repositorys(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    own = identity(config).tokenizer
    here = hub(tmp_path, "org/here", {"tokenizer.json": b"another"})
    monkeypatch.setattr(config.model_config, "tokenizer", "org/here")
    assert identity(config).tokenizer == tokenizer_digest(here)
    named = set()
    for absent in ("org/one", "org/two"):  # an engine may run where its tokenizer is not
        monkeypatch.setattr(config.model_config, "tokenizer", absent)
        named.add(identity(config).tokenizer)
    assert len(named | {own, tokenizer_digest(here)}) == 4


def geometry_of(*layers: LayerSpec, alignment: int = 16) -> WorkerGeometry:
    return WorkerGeometry(
        rank=0, model=ModelSpec(layers, alignment), attention_backends=(), device="cpu", pid=1
    )


def test_recurrent_state_that_no_request_can_resume_is_not_stored(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its prefix cache vLLM has blocks of recurrent state as long as a request."""
    full, recurrent = layer("full", 0), layer("mamba", 1, StateType.RECURRENT)
    monkeypatch.setattr(config.model_config, "max_model_len", 4096)
    assert unsupported_reason(geometry_of(full, recurrent, alignment=2048), config) is None
    assert unsupported_reason(geometry_of(full, alignment=4096), config) is None
    reason = unsupported_reason(geometry_of(full, recurrent, alignment=33 * 4096), config)
    assert reason is not None
    assert "--enable-prefix-caching" in reason


def test_a_model_without_state_is_served_without_a_store(config: Any) -> None:
    assert unsupported_reason(geometry_of(), config) is not None


def media_config() -> SimpleNamespace:
    return SimpleNamespace(
        mm_processor_kwargs=None, media_io_kwargs={}, mm_device_do_normalize=True,
        mm_encoder_tp_mode="weights", mm_encoder_attn_backend=None, mm_encoder_attn_dtype=None,
        mm_encoder_fp8_scale_path=None, video_pruning_rate=None, video_pruning_method="evs",
        language_model_only=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_processor_kwargs", {"do_rescale": False}),
        ("media_io_kwargs", {"video": {"num_frames": 8}}),
        ("mm_encoder_attn_backend", "TORCH_SDPA"),
        ("video_pruning_rate", 0.5),
    ],
)
def test_how_images_are_prepared_is_part_of_a_multi_modal_model(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    media = media_config()
    monkeypatch.setattr(config.model_config, "multimodal_config", media)
    before = identity(config).digest
    monkeypatch.setattr(media, name, value)
    assert identity(config).digest != before


def test_the_model_s_own_processor_files_are_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config.model_config, "multimodal_config", media_config())
    model = tmp_path / "model"
    shutil.copytree(config.model_config.model, model)
    monkeypatch.setattr(config.model_config, "model", str(model))
    without = identity(config).digest
    processor = model / "preprocessor_config.json"
    processor.write_text(json.dumps({"image_mean": [0.5]}))
    with_mean = identity(config).digest
    processor.write_text(json.dumps({"image_mean": [0.48]}))
    assert len({without, with_mean, identity(config).digest}) == 3


def test_a_length_fitted_to_free_memory_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM fits the length after the model was built, to the memory that is free at that moment."""
    config = engine_config(max_model_len=-1)
    digests = set()
    for fitted in (3000, 2999, 16384):
        monkeypatch.setattr(config.model_config, "max_model_len", fitted)
        digests.add(identity(config).digest)
    assert len(digests) == 1
    assert digests == {identity(engine_config(max_model_len=16384)).digest}
    assert digests != {identity(engine_config(max_model_len=3000)).digest}


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(machine, "processor_name", lambda: "AnotherCPU"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024"),
        lambda patch: patch.setattr(
            torch.cpu, "get_capabilities", lambda: {"amx_tile": True, "num_sockets": 1}
        ),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 48),
        lambda patch: patch.setattr(rounding_module, "_version", lambda name: "3.0"),
        lambda patch: patch.setenv("VLLM_BATCH_INVARIANT", "1"),
        lambda patch: patch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda patch: patch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0"),
    ],
)
def test_what_changes_rounding_changes_the_identity(
    config: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = identity(config).digest
    change(monkeypatch)
    assert identity(config).digest != before


@pytest.mark.parametrize("library", ["torch", "torchao", "transformers"])
def test_a_library_that_computes_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    before, version = identity(config).digest, rounding_module._version
    monkeypatch.setattr(
        rounding_module, "_version", lambda name: "0.1" if name == library else version(name)
    )
    assert identity(config).digest != before


def use_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(rounding_module.current_platform, "get_device_name", lambda: name)


@pytest.mark.parametrize(
    ("device", "file"),
    [
        ("NVIDIA A100-SXM4-80GB", "E=8,N=64,device_name=NVIDIA_A100-SXM4-80GB,dtype=fp8_w8a8.json"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100_SXM4_80GB_EXPAND_TRUE.json"),
        ("NVIDIA H200 NVL", "E=8,N=64,device_name=NVIDIA_H200.json"),
        ("A100-SXM4-40GB", "E=8,N=64,device_name=A100-SXM4-40GB.json"),
    ],
)
def test_tuned_kernels_are_part_of_it_by_their_content(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, file: str
) -> None:
    use_device(monkeypatch, device)
    digests = [identity(config).digest]
    for folder, content in (("a", "{}"), ("b", "{}"), ("c", '{"16": {}}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(content)
        monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path / folder))
        digests.append(identity(config).digest)
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3
    monkeypatch.chdir(tmp_path / "c")
    for here in (".", ""):
        monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", here)
        assert identity(config).digest == digests[3]


def test_tuned_kernels_of_other_devices_do_not_count(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_device(monkeypatch, "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    before = identity(config).digest
    for name in ("E=8,N=64,device_name=NVIDIA_B200.json", "NVIDIA_B200_SHRINK.json", "README.md"):
        (tmp_path / name).write_text("{}")
    assert identity(config).digest == before
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER")
    assert identity(config).digest != before, "set, it chooses other kernels for adapters"


@pytest.mark.parametrize(("name", "value"), [("data_parallel_size", 2), ("enable_eplb", True)])
def test_engines_that_share_experts_out_add_them_up_differently(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    for is_moe in (False, True):
        monkeypatch.setattr(type(config.model_config), "is_moe", is_moe)
        own, shared = identity(config).digest, identity(config, any_tp=True).digest
        with monkeypatch.context() as patch:
            patch.setattr(config.parallel_config, name, value)
            assert (identity(config).digest != own) == is_moe
            assert identity(config, any_tp=True).digest == shared


def test_two_hosts_of_one_kind_share(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(config).digest
    capabilities = torch.cpu.get_capabilities()
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: capabilities | {"num_logical_cores": 999}
    )
    for name, value in {
        "VLLM_HOST_IP": "10.0.0.7", "VLLM_PORT": "5555", "VLLM_DP_RANK": "3",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "VLLM_CACHE_ROOT": "/elsewhere",
        "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_OMP_THREADS_BIND": "4-7", "HOSTNAME": "b",
        "VLLM_CPU_KVCACHE_SPACE": "4", "CUDA_VISIBLE_DEVICES": "6", "VLLM_API_KEY": "secret",
        "VLLM_RAY_BUNDLE_INDICES": "1,2", "VLLM_GPU_NIC_PCIE_MAPPING": "x",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_ENABLE_RESPONSES_API_STORE": "1", "VLLM_MAX_COMPLETION_PROMPTS": "8",
        "VLLM_NVTX_SCOPES_FOR_PROFILING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "container", "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": "9", "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert identity(config).digest == before
    assert "secret" not in str(identity(config).describe())


def test_vllm_still_lists_its_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's list, which `rounding` uses, has the best known switches."""
    assert {"VLLM_BATCH_INVARIANT", "VLLM_USE_DEEP_GEMM"} <= set(envs.compile_factors())


def test_a_gpu_is_its_name_and_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda_alike=lambda: True)
    monkeypatch.setattr(rounding_module, "current_platform", platform)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert rounding_module._machine("cuda") == "NVIDIA H200, 9.0"


def test_engines_of_any_tp_size_may_round_differently(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared = identity(config), identity(config, any_tp=True)
    assert dict(own.extras).keys() - dict(shared.extras).keys() == rounding(config).keys() - SHARED
    assert dict(shared.extras)["tp_sizes"] == "any"
    monkeypatch.setattr(config.parallel_config, "all2all_backend", "deepep_low_latency")
    assert identity(config, any_tp=True).digest == shared.digest
    monkeypatch.setattr(machine, "processor_name", lambda: "AnotherCPU")
    assert identity(config, any_tp=True).digest != shared.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "eager"), ("custom_ops", ["none"]),
        ("inductor_compile_config", {"max_autotune": True}),
    ],
)  # fmt: skip
def test_what_is_compiled_and_fused_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    compilation = config.compilation_config
    monkeypatch.setattr(compilation, "mode", 3)
    before = identity(config).digest
    monkeypatch.setattr(compilation, "cudagraph_capture_sizes", [1, 2, 4])
    assert identity(config).digest == before  # a decoder captures what a prefiller does not
    with monkeypatch.context() as patch:
        patch.setattr(compilation, name, value)
        assert identity(config).digest != before
    passes = compilation.pass_config
    monkeypatch.setattr(passes, "eliminate_noops", not passes.eliminate_noops)
    assert identity(config).digest != before


@pytest.mark.parametrize("option", ["decode_context", "prefill_context"])
def test_ranks_that_hold_parts_of_the_tokens_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(config.parallel_config, f"{option}_parallel_size", 2)
    with pytest.raises(
        UnsupportedModelError, match=f"set --{option}-parallel-size 1".replace("_", "-")
    ):
        check_supported(config)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_half_a_role_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """A producer loads, too, and vLLM would free pages that a step still writes."""
    for given in ("kv_both", role):
        transfer = KVTransferConfig(kv_connector="HeteroConnector", kv_role=given)
        monkeypatch.setattr(config, "kv_transfer_config", transfer)
        if given == "kv_both":
            check_supported(config)
    with pytest.raises(UnsupportedModelError, match=f'\'{role}\'.*set "kv_role": "kv_both"'):
        check_supported(config)


def test_weights_that_each_rank_quantises_differ_between_ranks(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert equal_on_all_ranks(config, "cuda")
    monkeypatch.setattr(config.model_config, "quantization", "fp8")
    assert not equal_on_all_ranks(config, "cuda")
    stored = {"quant_method": "fp8"}
    monkeypatch.setattr(config.model_config.hf_config, "quantization_config", stored, raising=False)
    assert equal_on_all_ranks(config, "cuda")
    assert not equal_on_all_ranks(config, "cpu")
    rest = QuantizationConfigArgs(ignore=["*mlp*"])  # what the checkpoint has left unquantised
    monkeypatch.setattr(config.model_config, "quantization_config", rest)
    assert not equal_on_all_ranks(config, "cuda")


def test_experts_that_move_to_other_engines_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, "enable_elastic_ep", True)
    check_supported(config)
    monkeypatch.setattr(type(config.model_config), "is_moe", True)
    with pytest.raises(UnsupportedModelError, match="drop --enable-elastic-ep"):
        check_supported(config)


def test_hisparse_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_supported(config)
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(UnsupportedModelError, match="hisparse_config"):
        check_supported(config)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    "load_format", ["tensorizer", "ipc_cache", "modelexpress", "npcache", "of_a_plugin"]
)
def test_weights_that_are_not_among_the_models_files_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, load_format: str, drafted: bool
) -> None:
    draft = SimpleNamespace(kv_cache_dtype=None, draft_load_config=LoadConfig())
    monkeypatch.setattr(config, "speculative_config", draft)
    for name in ("auto", "safetensors", "sharded_state", "runai_streamer"):
        monkeypatch.setattr(config.load_config, "load_format", name)
        check_supported(config)
    changed = draft.draft_load_config if drafted else config.load_config
    monkeypatch.setattr(changed, "load_format", load_format)
    with pytest.raises(UnsupportedModelError, match=f"{load_format} .*set --load-format auto"):
        check_supported(config)


@pytest.mark.parametrize("pattern", ["../other/rank-{rank}-{part}.safetensors", "r{rank}.{part}"])
def test_shards_that_are_not_digested_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    extra = {"pattern": "rank-{rank}-{part}.safetensors"}
    monkeypatch.setattr(config.load_config, "load_format", "sharded_state")
    monkeypatch.setattr(config.load_config, "model_loader_extra_config", extra)
    check_supported(config)
    monkeypatch.setattr(config.load_config, "model_loader_extra_config", None)
    check_supported(config)
    monkeypatch.setattr(config.load_config, "model_loader_extra_config", extra)
    extra["pattern"] = pattern
    with pytest.raises(UnsupportedModelError, match="--model-loader-extra-config"):
        check_supported(config)


def test_weights_of_another_place_than_the_models_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.model_config, "model_weights", "s3://bucket/model")
    with pytest.raises(UnsupportedModelError, match=r"from s3://bucket/model.*local copy"):
        check_supported(config)


@pytest.mark.parametrize("drafted", [False, True])
def test_kv_formats_of_plugins_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    """vLLM 0.33 lets a platform's plugin name a KV dtype of its own."""
    monkeypatch.setattr(config.cache_config, "cache_dtype", "auto" if drafted else "plugin_2bit")
    draft = SimpleNamespace(
        kv_cache_dtype="plugin_2bit" if drafted else None, draft_load_config=None
    )
    monkeypatch.setattr(config, "speculative_config", draft)
    with pytest.raises(UnsupportedModelError, match="--kv-cache-dtype plugin_2bit"):
        check_supported(config)
    monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8")
    monkeypatch.setattr(draft, "kv_cache_dtype", None)
    check_supported(config)
