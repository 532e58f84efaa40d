"""The default of `dram_gib` follows the host and the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_connector import machine
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.config import HeteroConfig
from hetero_connector.engine.startup.dram_tier import (
    bytes_of_prompt,
    size_with_gpus,
    size_without_gpu,
    tokens_in,
    with_dram,
)
from hetero_connector.machine import Memory
from hetero_connector.spec.presets import PRESETS
from hetero_connector.store.catalog.slot_geometry import dram_geometry
from hetero_connector.units import GIB
from tests.engine.fakes import HYBRID

LAYOUT = ArtifactLayout(HYBRID, 64)


def engine(device: str, max_model_len: int = 4096, dp: int = 1, ranks: int = 1) -> Any:
    """Return the parts of a `VllmConfig` that the default depends on."""
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(data_parallel_size_local=dp, local_world_size=ranks),
    )


def layout_of(name: str, **arguments: object) -> ArtifactLayout:
    model = PRESETS[name](**arguments)  # type: ignore[operator]
    return ArtifactLayout(model, model.default_chunk_tokens())


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: Memory(2048 * GIB, 1600 * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.parametrize(("free_gib", "dram_gib"), [(48, 12), (400, 32), (2, 0.5), (0, 1 / 16)])
def test_without_a_gpu_it_is_a_quarter_of_free_memory(free_gib: int, dram_gib: float) -> None:
    assert size_without_gpu(free_gib * GIB) == dram_gib * GIB


@pytest.mark.parametrize(
    ("free_gib", "longest_gib", "engines", "dram_gib"),
    [
        (1600, 40, 8, 100),
        (1600, 40, 1, 256),  # more must be asked for
        (1600, 300, 1, 300),
        (64, 40, 1, 40),  # more than half, for one request
        (64, 60, 1, 48),  # the host does not have it
        (64, 40, 2, 24),
        (0, 40, 1, 1 / 16),
    ],
)
def test_with_gpus_it_is_the_engines_part_of_half_or_the_longest_request(
    free_gib: int, longest_gib: int, engines: int, dram_gib: float
) -> None:
    assert size_with_gpus(free_gib * GIB, longest_gib * GIB, engines) == dram_gib * GIB


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("device", "dp", "ranks", "dram_gib"),
    [("cpu", 1, 1, 32), ("cuda", 1, 8, 256), ("cuda", 1, 2, 200), ("cuda", 8, 4, 100)],
)
def test_engines_share_the_host(device: str, dp: int, ranks: int, dram_gib: float) -> None:
    made = with_dram(HeteroConfig(), LAYOUT, engine(device, dp=dp, ranks=ranks))
    assert made == HeteroConfig(dram_gib=dram_gib)


@pytest.mark.usefixtures("free")
def test_what_is_given_stays() -> None:
    given = HeteroConfig(dram_gib=3.0)
    assert with_dram(given, LAYOUT, engine("cuda")) is given


def test_the_longest_prompt_fits_where_the_host_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 131,072 tokens of Llama-3.1-70B at TP 8 takes 40 GiB."""
    monkeypatch.setattr(machine, "memory", lambda: Memory(96 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    layout = layout_of("llama-3.1-70b", tp_size=8)
    made = with_dram(HeteroConfig(), layout, engine("cuda", 131_072, ranks=8))
    assert made.dram_gib == pytest.approx(40, abs=0.1)
    assert tokens_in(layout, made.dram_bytes) >= 131_072


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        layout_of("gemma-3-27b"),
        layout_of("deepseek-v4-flash", kv_dtype="fp8_ds_mla"),
        layout_of("qwen3-next-80b-a3b"),
        layout_of("llama-3.1-70b", tp_size=8),
    ],
    ids=["hybrid", "gemma-3-27b", "deepseek-v4-flash", "qwen3-next-80b", "llama-3.1-70b"],
)
@pytest.mark.parametrize("tokens", [1, 4_096, 131_072, 1_000_000])
def test_the_bytes_of_a_prompt_hold_it_and_little_more(layout: ArtifactLayout, tokens: int) -> None:
    size_bytes = bytes_of_prompt(layout, tokens)
    assert tokens_in(layout, size_bytes) >= tokens
    geometry = dram_geometry(layout.max_bytes, size_bytes)
    least = -(-tokens // layout.chunk_tokens) * sum(
        geometry.stride_bytes[t] for t in layout.model.prefix_types
    )
    assert size_bytes <= 1.06 * least + geometry.chunk_bytes + geometry.zone_bytes
