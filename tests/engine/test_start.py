"""Settings that are allowed but probably not intended bring a warning at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1 import kv_cache_interface as kvi

from examples.serving import kv_transfer_config
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.config import HeteroConfig
from hetero_connector.engine.startup.geometry import merge_stages, model_spec
from hetero_connector.engine.startup.heads import DeltaNetHeads, ModelHeads
from hetero_connector.engine.startup.policies import (
    checkpoint_policy,
    first_costs,
    restore_planner,
)
from hetero_connector.engine.startup.rendezvous import WorkerGeometry
from hetero_connector.engine.startup.start import (
    _copy_engines,
    _heads,
    _parking,
    _recovers,
    _store_config,
    _uses_any_tp,
    _warnings,
    _whole_geometry,
    _window_replay,
)
from hetero_connector.errors import ConfigError, UnsupportedModelError
from hetero_connector.planner.checkpoints import (
    NEVER,
    Adaptive,
    CheckpointRates,
    Full,
    Reuse,
    Zero,
)
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.profile import CopyEngines, CostProfile, ProfileSubject
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.spec.presets import PRESETS
from hetero_connector.store.base import StoreConfig
from hetero_connector.units import GIB
from tests.engine.fakes import DENSE, HYBRID, layer

LAYOUT = ArtifactLayout(HYBRID, 64)
RECURRENT = ModelSpec((layer("linear", 0, StateType.RECURRENT),), alignment=16)


def geometry_of(model: ModelSpec, refusal: str | None) -> WorkerGeometry:
    return WorkerGeometry(0, model, ("CPU_ATTN",), "cpu", 1, replay_refusal=refusal)


def test_copy_engines_come_from_the_profile_on_cuda_only(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    subject = ProfileSubject("A", "config", "bfloat16", "", "auto", 1, "one GPU")
    measured, compute = CopyEngines(load_from_bytes=4096), ComputeCoefficients(1e-3, 1e-6, 0.0)
    CostProfile("m", subject, compute, copy_engines=measured).write(path)
    cpu, cuda = (
        SimpleNamespace(device_config=SimpleNamespace(device_type=x)) for x in ("cpu", "cuda")
    )
    config = HeteroConfig(dram_gib=1.0, planner_profile=path)
    assert _copy_engines(config, cuda) == measured
    assert _copy_engines(config, cpu) is None
    assert _copy_engines(HeteroConfig(dram_gib=1.0), cuda) is None
    CostProfile("m", subject, compute).write(path)
    assert _copy_engines(config, cuda) is None


@pytest.mark.parametrize(
    ("replay", "refusal", "level", "line"),
    [
        ("auto", None, "INFO", "window replay: a boundary whose windows are not stored costs 32"),
        ("auto", "it is odd", "INFO", "no window replay: it is odd"),
        ("on", "it is odd", "WARNING", "no window replay: it is odd"),
    ],
)
def test_the_decision_about_replays_is_one_line(
    replay: Any, refusal: str | None, level: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.heterocache")
    made = _window_replay(geometry_of(HYBRID, refusal), HeteroConfig(dram_gib=1.0, replay=replay))
    assert (made is None) == (refusal is not None)
    (record,) = caplog.records
    assert (record.levelname, line in record.message) == (level, True)


def test_a_model_without_windows_has_no_line_about_replays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "vllm.heterocache")
    config = HeteroConfig(dram_gib=1.0, replay="on")
    assert _window_replay(geometry_of(DENSE, "no windows"), config) is None
    assert not caplog.records


@pytest.mark.parametrize(("device", "parking"), [("cpu", "never"), ("cuda", "long")])
def test_loads_park_where_others_can_go_on(device: str, parking: str) -> None:
    assert _parking(replace(geometry_of(DENSE, None), device=device)) == parking


def test_sensible_settings_bring_no_warning() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1})
    assert _warnings(LAYOUT, config, max_model_len=4096) == []


def test_an_engine_that_other_hosts_cannot_read_from_brings_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    there = HeteroConfig(dram_gib=1.0, directory="redis://:pw@cache.example:6379?fleet=a")
    (warning,) = _warnings(LAYOUT, there, max_model_len=4096)
    assert "on cache.example" in warning
    assert "set peer_host" in warning
    here = replace(there, directory="redis://localhost:6379")
    given = replace(there, peer_host="127.0.0.1")
    assert _warnings(LAYOUT, here, 4096) == _warnings(LAYOUT, given, 4096) == []
    monkeypatch.setenv("UCX_NET_DEVICES", "eth1")
    assert _warnings(LAYOUT, there, max_model_len=4096) == []


def test_a_dram_tier_smaller_than_one_request_brings_a_warning() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.0001})
    (warning,) = _warnings(LAYOUT, config, max_model_len=4096)
    assert "dram_gib=0.0001 holds 1,600 tokens, fewer than the 4,096" in warning
    raised = HeteroConfig(dram_gib=float(warning.split("Raise it to ")[1].split(",")[0]))
    assert _warnings(LAYOUT, raised, max_model_len=4096) == []


def test_a_chunk_longer_than_any_request_brings_a_warning() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1})
    (warning,) = _warnings(LAYOUT, config, max_model_len=32)
    assert "chunk_tokens=64 exceeds the 32 tokens" in warning


def test_a_layer_that_cannot_be_cut_for_other_tp_sizes_is_named() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1, "tp_sizes": "any"})
    (warning,) = _warnings(LAYOUT, config, max_model_len=4096)
    assert "tp_sizes='any' has the effect of 'own'" in warning
    assert "dense_kv state of full" in warning
    assert not _uses_any_tp(config, HYBRID)
    cut = tuple(replace(x, runs=(x.page_bytes,)) for x in HYBRID.layers)
    model = replace(HYBRID, layers=cut)
    assert _warnings(ArtifactLayout(model, 64), config, max_model_len=4096) == []
    assert _uses_any_tp(config, model)
    assert not _uses_any_tp(replace(config, tp_sizes="own"), model)


QWEN3_30B = {"num_key_value_heads": 4}
QWEN3_NEXT = {
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def engine_with(
    text: dict[str, int], quantization: str | None = None, *, is_stored_so: bool = False
) -> Any:
    """Return the part of a `VllmConfig` that has the model's heads and quantisation."""
    arch = SimpleNamespace(per_layer_overrides=None)
    model = SimpleNamespace(
        quantization=quantization,
        is_quantized=is_stored_so,
        quantization_config=None,
        hf_text_config=SimpleNamespace(to_dict=lambda: text),
        get_total_num_kv_heads=lambda: text["num_key_value_heads"],
        model_arch_config=arch,
    )
    return SimpleNamespace(model_config=model, speculative_config=None)


@pytest.mark.parametrize(
    ("tp_sizes", "platform"), [("own", "cuda"), ("any", "cuda"), ("any", "cpu")]
)
def test_a_head_that_several_ranks_have_is_stored_once(tp_sizes: Any, platform: str) -> None:
    """Eight ranks with four KV heads store what one rank stores, as the presets say."""
    spec = kvi.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    groups = [kvi.KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn" for i in range(48)], spec)]
    kv_cache = kvi.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    heads = _heads(engine_with(QWEN3_30B), HeteroConfig(dram_gib=1.0, tp_sizes=tp_sizes), platform)
    model = model_spec(kv_cache, 8, heads)
    assert model.layers == PRESETS["qwen3-coder-30b-a3b"](tp_size=8).layers
    eight = ArtifactLayout(model, 256)
    assert eight.max_bytes == ArtifactLayout(PRESETS["qwen3-coder-30b-a3b"](), 256).max_bytes
    writers = [
        [rank for rank in range(8) if eight.is_writer(model.layers[0], rank, chunk)]
        for chunk in range(3)
    ]
    assert writers == [[0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 4, 6]]
    places = [eight.page_runs(model.layers[0], rank)[0].whole_start for rank in range(8)]
    assert places == [rank // 2 * spec.page_size_bytes for rank in range(8)]


@pytest.mark.parametrize(
    ("config", "platform", "kv"),
    [
        (engine_with(QWEN3_30B, "fp8", is_stored_so=True), "cuda", 4),
        (engine_with(QWEN3_30B, "fp8"), "cuda", None),
        (engine_with(QWEN3_30B), "cpu", None),
    ],
    ids=["quantised in the checkpoint", "quantised by each rank", "a sum of each rank's own"],
)
def test_heads_whose_bits_ranks_may_not_share_are_stored_by_each(
    config: Any, platform: str, kv: int | None
) -> None:
    assert _heads(config, HeteroConfig(dram_gib=1.0), platform) == ModelHeads(kv)


def test_recurrent_pages_are_cut_by_heads_for_other_tp_sizes_only() -> None:
    own = _heads(engine_with(QWEN3_NEXT), HeteroConfig(dram_gib=1.0), "cuda")
    for_all = _heads(engine_with(QWEN3_NEXT), HeteroConfig(dram_gib=1.0, tp_sizes="any"), "cuda")
    assert (own.kv, own.delta_net) == (2, None)
    assert (for_all.kv, for_all.delta_net) == (2, DeltaNetHeads(16, 32, 128, 128))


def test_a_write_budget_smaller_than_a_chunk_brings_a_warning() -> None:
    config = HeteroConfig(dram_gib=0.1, ssd_write_gib_per_day=1e-6)
    (warning,) = _warnings(LAYOUT, config, max_model_len=4096)
    assert "ssd_write_gib_per_day=1e-06 allows bursts of 134 bytes" in warning


@pytest.mark.parametrize(
    ("groups", "batches", "policy", "model", "recovers"),
    [
        (1, 1, "recompute", DENSE, True),
        (2, 1, "fail", DENSE, False),
        (1, 2, "recompute", DENSE, False),
        (1, 2, "fail", DENSE, True),
        (1, 1, "recompute", RECURRENT, False),
        (1, 1, "fail", RECURRENT, True),
    ],
)
def test_vllm_recovers_from_a_lost_load_of_one_group_and_one_step_at_a_time(
    groups: int, batches: int, policy: str, model: ModelSpec, recovers: bool
) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    config: Any = SimpleNamespace(kv_transfer_config=transfer, max_concurrent_batches=batches)
    kv_cache: Any = SimpleNamespace(kv_cache_groups=[None] * groups)
    assert _recovers(config, kv_cache, model) is recovers


def test_the_load_failure_policy_is_that_of_a_multi_connector_not_of_its_child() -> None:
    """vLLM's scheduler reads the former, and its children have configurations of their own."""
    child = kv_transfer_config({}, kv_connector_module_path="hetero_connector.connector")
    engine = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": [child]},
        )
    )
    engine.scheduler_config.async_scheduling = True
    ((_, config),) = MultiConnector._get_connector_classes_and_configs(engine)
    kv_cache: Any = SimpleNamespace(kv_cache_groups=[None])
    with set_current_vllm_config(engine):
        assert not _recovers(config, kv_cache, DENSE)
    engine.scheduler_config.async_scheduling = False
    with set_current_vllm_config(engine):
        assert _recovers(config, kv_cache, DENSE)


def test_pipeline_stages_together_have_the_geometry_of_one_stage() -> None:
    full, swa = HYBRID.layers
    first = replace(geometry_of(replace(HYBRID, layers=(swa,)), None), attention_backends=("B",))
    second = replace(geometry_of(replace(HYBRID, layers=(full,)), None), stage=1)
    ranks = [replace(x, rank=rank) for x in (first, second) for rank in (0, 1)]
    whole = _whole_geometry(ranks)
    assert (whole.model, whole.attention_backends) == (HYBRID, ("B", "CPU_ATTN"))
    assert whole.replay_refusal is None, "though no stage has both kinds of layers"
    ranks[2:] = [replace(x, replay_refusal="no") for x in ranks[2:]]
    assert _whole_geometry(ranks).replay_refusal == "no"


def test_a_pipeline_stage_without_stored_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="stage 1 has no layer"):
        merge_stages([DENSE, replace(DENSE, layers=())])


def engine_of(
    engine_id: str, size: int = 1, index: int = 0, *, local: int = 1, external_lb: bool = False
) -> Any:
    """Return the part of a `VllmConfig` that places the engine among data-parallel ones."""
    parallel = SimpleNamespace(
        data_parallel_size=size,
        data_parallel_index=index,
        data_parallel_size_local=local,
        data_parallel_external_lb=external_lb,
        local_world_size=1,
    )
    return SimpleNamespace(
        parallel_config=parallel, kv_transfer_config=SimpleNamespace(engine_id=engine_id)
    )


def test_data_parallel_engines_share_the_ssd_and_its_write_budget(tmp_path: Path) -> None:
    config = HeteroConfig(
        dram_gib=1, ssd_dir=tmp_path, ssd_gib=8, ssd_write_gib_per_day=40, eviction="value"
    )
    made = _store_config(config, engine_of("x", 4, 2, local=4), shared=False)
    assert made == StoreConfig(
        dram_bytes=GIB,
        ssd_dir=tmp_path / "dp2",
        ssd_bytes=2 * GIB,
        ssd_write_bytes_per_day=10 * GIB,
        eviction="value",
        verify="sample",
        shared=False,
    )


@pytest.mark.parametrize(
    ("local", "gpus", "external_lb", "share"),
    [
        (2, 0, False, 4),
        (1, 1, False, 8),
        (1, 2, False, 4),  # both were started by hand, with vLLM's environment variables
        (1, 8, False, 2),
        (1, 1, True, 2),  # as many as four may be on this host
    ],
)
def test_an_ssd_is_shared_by_the_engines_of_its_host(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local: int,
    gpus: int,
    external_lb: bool,
    share: int,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    config = HeteroConfig(dram_gib=1, ssd_dir=tmp_path, ssd_gib=8, ssd_write_gib_per_day=8)
    engine = engine_of("x", 4, 2, local=local, external_lb=external_lb)
    made = _store_config(config, engine, shared=False)
    assert (made.ssd_bytes, made.ssd_write_bytes_per_day) == (share * GIB, share * GIB)


def test_data_parallel_engines_that_vllm_tells_they_are_alone_share_no_directory(
    tmp_path: Path,
) -> None:
    """For models without experts only the engine's id and index show that there are others."""
    config = HeteroConfig(dram_gib=1, ssd_dir=tmp_path, ssd_gib=8)
    for rank in range(2):
        made = _store_config(config, engine_of(f"x_dp{rank}", 1, rank), shared=False)
        assert (made.ssd_dir, made.ssd_bytes) == (tmp_path / f"dp{rank}", 8 * GIB)


def test_a_longer_load_deadline_gives_peers_more_time() -> None:
    config = HeteroConfig(dram_gib=1, load_deadline_s=100.0)
    made = _store_config(config, engine_of("x"), shared=False)
    assert (made.load_deadline_s, made.peer_deadline_s) == (100.0, 20.0)


def costs() -> CostModel:
    return CostModel(ComputeRegression(), LoadModel(HYBRID.state_types), step_tokens=512)


def test_the_checkpoint_policy_is_the_configured_one() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1, "checkpoints": "zero"})
    assert isinstance(checkpoint_policy(config, LAYOUT, costs()), Zero)
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1})
    assert isinstance(checkpoint_policy(config, LAYOUT, costs()), Adaptive)


def test_a_model_with_windows_only_keeps_every_checkpoint() -> None:
    windows = ModelSpec((layer("swa", 0, StateType.WINDOW_SWA, window=32),), alignment=16)
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1, "checkpoints": "zero"})
    assert isinstance(checkpoint_policy(config, ArtifactLayout(windows, 64), costs()), Full)


def test_the_adaptive_policy_uses_the_planners_learned_speeds(tmp_path: Path) -> None:
    """Slower loads and faster computing make checkpoints rarer."""
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path), "ssd_gib": 0.1}
    learned = costs()
    policy = checkpoint_policy(HeteroConfig.from_extra_config(extra), LAYOUT, learned)
    assert isinstance(policy, Adaptive)
    assert policy.period == 1
    for size_bytes in range(1000, 51_000, 1000):
        learned.compute.observe(512, 0, 512e-6)
        learned.load.observe(Tier.SSD, {StateType.DENSE_KV: size_bytes}, size_bytes * 1e-3)
        policy.observe(Reuse(matched=0))
    assert policy.period == NEVER


def test_without_an_ssd_a_checkpoint_costs_a_copy() -> None:
    dram, ssd = (CheckpointRates.learned(costs(), has_ssd=has_ssd) for has_ssd in (False, True))
    assert dram.write_s_per_byte == dram.load_s_per_byte < ssd.load_s_per_byte
    assert ssd.write_s_per_byte == pytest.approx(CheckpointRates.write_s_per_byte)
    assert dram.recompute_s_per_token == pytest.approx(5e-3 / 512 + 1e-4)


def test_the_planner_starts_from_the_profile(tmp_path: Path) -> None:
    coefficients = ComputeCoefficients(1e-3, 1e-5, 1e-9)
    subject = ProfileSubject("Tiny", "c0ffee", "bfloat16", "", "auto", 1, "a machine")
    CostProfile("measured", subject, coefficients).write(tmp_path / "profile.json")
    extra = {"dram_gib": 0.1, "planner_profile": str(tmp_path / "profile.json")}
    layout = ArtifactLayout(HYBRID, 64)
    config = HeteroConfig.from_extra_config(extra)
    kept = CostProfile("kept", subject, ComputeCoefficients(1.0, 1.0, 1.0))
    first = first_costs(config, subject, kept)
    assert first is not None
    assert first.model == "measured", "the configured profile comes first"
    planner = restore_planner(config, layout, 2048, None, first)
    assert planner.mode == "cost"
    assert planner.costs.compute.coefficients == pytest.approx(coefficients)
    assert planner.costs.step_tokens == 2048
    assert planner.costs.staging_delay_steps == 1.0
    elsewhere = replace(subject, machine="another")
    with pytest.raises(ConfigError, match=r"planner_profile.*'a machine' there, 'another' here"):
        first_costs(config, elsewhere, None)
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(ConfigError, match=r"planner_profile.*not JSON"):
        first_costs(config, subject, kept)
    unset = HeteroConfig.from_extra_config({"dram_gib": 0.1})
    assert first_costs(unset, subject, kept) is kept
    assert first_costs(unset, subject, None) is None
