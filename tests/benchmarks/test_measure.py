"""References that benchmarks compare with."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import measure
from benchmarks.measure import DirectDisk, cpu_name, is_default, options, percentile


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


def test_a_processor_without_avx512_has_another_name() -> None:
    epyc = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2{}\n\n"
    assert cpu_name(2 * epyc.format(" avx512f avx512dq")) == "AMD EPYC"
    assert cpu_name(2 * epyc.format("")) == "AMD EPYC without AVX-512"
    assert cpu_name("processor\t: 0\nFeatures\t: fp asimd\n") == "unknown CPU"


def test_only_free_options_may_differ_from_their_defaults() -> None:
    parser = ArgumentParser()
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--result", type=Path)

    def is_published(*arguments: str) -> bool:
        return is_default(parser, parser.parse_args(arguments), free=("result",))

    assert is_published()
    assert is_published("--number", "30", "--result", "there.json")
    assert not is_published("--number", "31")
    assert options(parser.parse_args(["--result", "x"])) == {"number": 30, "result": "x"}


def test_a_file_that_was_written_again_is_still_random(tmp_path: Path) -> None:
    disk = DirectDisk(tmp_path, 5 << 20)
    content = (tmp_path / "dd.reference").read_bytes()
    assert disk.write_bandwidth() > 0
    assert (tmp_path / "dd.reference").read_bytes() == content
    disk.close()


def test_a_percentile_is_a_sample_that_so_many_do_not_exceed() -> None:
    samples = [4.0, 1.0, 3.0, 2.0]
    shares = (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)
    assert [percentile(samples, x) for x in shares] == [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert percentile([], 0.5) == 0.0
