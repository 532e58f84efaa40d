"""What the engine is told at start about settings that are allowed but hardly meant."""

from __future__ import annotations

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.config import HeteroConfig
from hetero_connector.engine.start import _warnings
from tests.engine.fakes import HYBRID

LAYOUT = ArtifactLayout(HYBRID, 64)


def test_sensible_settings_bring_no_warning() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1})
    assert _warnings(LAYOUT, config, max_model_len=4096) == []


def test_a_dram_tier_smaller_than_one_request_is_pointed_out() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.0001})
    (warning,) = _warnings(LAYOUT, config, max_model_len=4096)
    assert "holds 13 chunks, fewer than the 64" in warning


def test_a_chunk_longer_than_any_request_is_pointed_out() -> None:
    config = HeteroConfig.from_extra_config({"dram_gib": 0.1})
    (warning,) = _warnings(LAYOUT, config, max_model_len=32)
    assert "chunk_tokens=64 exceeds the 32 tokens" in warning


def test_a_write_budget_smaller_than_a_chunk_is_pointed_out() -> None:
    config = HeteroConfig(dram_gib=0.1, ssd_write_gib_per_day=1e-6)
    (warning,) = _warnings(LAYOUT, config, max_model_len=4096)
    assert "ssd_write_gib_per_day=1e-06 lets 134 bytes be written at once" in warning
