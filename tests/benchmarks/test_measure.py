"""References that benchmarks compare with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import measure
from benchmarks.measure import DirectDisk


def test_a_verified_limit_reads_the_whole_file_into_the_memory_given(tmp_path: Path) -> None:
    disk = DirectDisk(tmp_path, 5 << 20)
    memory = disk.memory()
    assert disk.verified_limit(memory) > 0
    assert memory.tobytes() == (tmp_path / "dd.reference").read_bytes()
    assert len(memory) == 8 << 20, "whole blocks of dd"
    disk.close()


def test_a_machine_whose_engines_run_on_a_gpu_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "_NVIDIA", tmp_path)
    assert " with " not in measure.machine_line().partition(",")[0]
    folder = tmp_path / "gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 64\n")
    assert measure.machine_line().startswith("NVIDIA H200 with ")
    torch.cuda.is_available = lambda: False
    assert not measure.machine_line().startswith("NVIDIA")


def test_a_file_that_was_written_again_is_still_random(tmp_path: Path) -> None:
    disk = DirectDisk(tmp_path, 5 << 20)
    content = (tmp_path / "dd.reference").read_bytes()
    assert disk.write_bandwidth() > 0
    assert (tmp_path / "dd.reference").read_bytes() == content
    disk.close()
