"""Checkpoints are complete or absent, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.checkpoints import NAMES, write_checkpoint


def test_there_is_one_of_each_attention_type() -> None:
    assert {"dense", "gemma3", "gptoss", "deepseek_v4", "qwen3_next", "mla"} <= set(NAMES)


def test_a_second_call_writes_nothing(tmp_path: Path) -> None:
    first = write_checkpoint("dense", tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in first.iterdir()}
    assert write_checkpoint("dense", tmp_path) == first
    assert {file.name: file.stat().st_mtime_ns for file in first.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize("name", ["dense", "gemma3", "deepseek_v4"])
def test_weights_are_the_same_every_time(name: str, tmp_path: Path) -> None:
    one = write_checkpoint(name, tmp_path / "one")
    two = write_checkpoint(name, tmp_path / "two")
    weights = "model.safetensors"
    assert (one / weights).read_bytes() == (two / weights).read_bytes()


def test_a_directory_without_a_stamp_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "model.safetensors").write_bytes(b"torn")
    written = write_checkpoint("dense", tmp_path)
    assert (written / "model.safetensors").stat().st_size > 1_000_000
    assert json.loads((written / "config.json").read_text())["model_type"] == "llama"


def test_the_benchmark_model_keeps_24576_bytes_per_token(tmp_path: Path) -> None:
    config = json.loads((write_checkpoint("dense-bench", tmp_path) / "config.json").read_text())
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    assert config["num_hidden_layers"] * per_layer == 24_576
    assert config["max_position_embeddings"] == 16_384


def test_an_unknown_name_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="deepseek_v4"):
        write_checkpoint("llama-405b", tmp_path)
    assert list(tmp_path.iterdir()) == []
