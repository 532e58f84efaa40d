"""The models that each CPU runs, and the CPU kernels on batches small enough to check by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.cpu_kernels import deepseek_v4_cpu as cpu
from examples.cpu_kernels import runnable, unsupported_reason
from examples.serving import engine_environment

MODELS = ["dense", "deepseek_v4", "qwen3_next"]
I32, I64 = torch.int32, torch.int64


@pytest.mark.parametrize("has_avx512", [True, False])
def test_only_models_without_kernels_are_skipped_and_reported(
    has_avx512: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    assert runnable(MODELS) == (MODELS if has_avx512 else ["dense", "qwen3_next"])
    reason = unsupported_reason("deepseek_v4")
    printed = capsys.readouterr().out
    assert printed == ("" if has_avx512 else f"deepseek_v4: skipped, {reason}\n")


def test_a_cpu_with_avx_512_runs_every_model() -> None:
    with open("/proc/cpuinfo") as info:
        flags = info.read().split()
    assert bool(unsupported_reason("deepseek_v4")) == ("avx512f" not in flags)


def test_a_process_with_the_engine_environment_finds_the_kernels(tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='vllm.general_plugins', name='deepseek_v4_cpu')\n"
        "print([point.load().__module__ for point in found])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=engine_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['deepseek_v4_cpu']\n"


def test_tokens_map_to_their_requests_and_padding_to_the_first() -> None:
    out = torch.full((6,), 9, dtype=I32)
    cpu._token_request_mapping(torch.tensor([0, 2, 5], dtype=I32), out, 2, 5, 6)
    assert out.tolist() == [0, 0, 1, 1, 1, 0]


def test_only_the_last_token_of_a_compression_block_has_a_slot() -> None:
    # One request at positions 6..9 of 10, ratio 4, blocks of 2 entries at 5 and 3.
    out = torch.zeros(4, dtype=I64)
    cpu._compressed_slot_mapping(
        out, torch.arange(4), torch.tensor([0, 4]), torch.tensor([10]),
        torch.tensor([[5, 3]], dtype=I32), 2, 2, 1, 1, 4, -1, 1024,
    )  # fmt: skip
    assert out.tolist() == [-1, 5 * 2 + 1, -1, -1]  # position 7 completes entry 1


def test_a_masked_token_completes_nothing() -> None:
    out = torch.zeros(4, dtype=I64)
    cpu._compressed_slot_mapping(
        out, torch.tensor([0, -1, 2, 3]), torch.tensor([0, 4]), torch.tensor([10]),
        torch.tensor([[5, 3]], dtype=I32), 2, 2, 1, 1, 4, -1, 1024,
    )  # fmt: skip
    assert out.tolist() == [-1, -1, -1, -1]


def test_a_prefill_gathers_its_tokens_and_at_most_a_window_before() -> None:
    out = torch.zeros(2, dtype=I32)
    cpu._prefill_metadata(
        out, torch.tensor([7, 3, 300]), torch.tensor([0, 1, 4, 14]),
        torch.zeros(3, dtype=I32), 2, 1, 128, 64,
    )  # fmt: skip
    assert out.tolist() == [3, 10 + 127]


def test_window_slots_are_the_last_positions_through_the_block_table() -> None:
    indices = torch.zeros(2, 1, 4, dtype=I32)
    lengths = torch.zeros(2, dtype=I32)
    cpu._window_indices_and_lengths(
        indices, 4, lengths, 3, 4, None, None, torch.tensor([0, 2]), torch.tensor([5]),
        torch.tensor([0, 0]), torch.tensor([True, False]), torch.tensor([[7, 8, 9]], dtype=I32),
        3, 2, torch.zeros(1, dtype=I32), 0, False, 1024,
    )  # fmt: skip
    # Token at position 3 sees 1, 2, 3: block 7 row 1, block 8 rows 0 and 1.
    assert indices[0, 0].tolist() == [15, 16, 17, -1]
    assert indices[1, 0].tolist() == [-1, -1, -1, -1]
    assert lengths.tolist() == [3, 0]


def test_images_and_context_parallelism_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="image"):
        cpu._window_indices_and_lengths(*[None] * 16, True, 0)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="context parallelism"):
        cpu._prefill_chunk_metadata(*[None] * 9, 0, 2, 1, 1, 4)  # type: ignore[arg-type]


def test_each_query_sees_the_entries_complete_before_it() -> None:
    # One request: 8 tokens computed, 5 new (13 in all), ratio 4, 3 entries.
    seen_from, seen_to = torch.zeros(5, dtype=I32), torch.zeros(5, dtype=I32)
    owner = torch.full((3,), 9, dtype=I32)
    cpu._prefill_chunk_metadata(
        torch.tensor([0, 5]), torch.tensor([13]), torch.tensor([0, 3]), torch.tensor([0, 3]),
        owner, seen_from, seen_to, 0, 5, 0, 1, 1, 1024, 4,
    )  # fmt: skip
    assert seen_from.tolist() == [0] * 5
    assert seen_to.tolist() == [2, 2, 2, 3, 3]
    assert owner.tolist() == [0, 0, 0]
