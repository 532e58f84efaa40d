"""`make gpu-serve` without a GPU: its arguments, the steps it starts, and what it measures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from benchmarks import gpu_serve
from benchmarks.engine_process import Timing

ROOT = Path(__file__).parents[2]


class FakeEngine:
    """Computes in two seconds, restores in one; `tier` is where it restores from."""

    def __init__(self, model: str, extra: dict[str, Any], kind: type, tier: str = "dram") -> None:
        assert kind is gpu_serve.PublicEngine
        self.started = (model, extra["dram_gib"])
        self._tier = tier

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def complete(self, prompt: list[int], recompute: bool = False) -> Timing:
        return Timing(2.0 if recompute else 1.0, 0.0, 0 if recompute else len(prompt))

    def reset_prefix_cache(self) -> None: ...

    def restored(self) -> dict[str, int]:
        return {self._tier: 1}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_serve, "missing", lambda: None)
    monkeypatch.setattr(gpu_serve, "gpu_name", lambda: "stand-in")


def test_without_a_gpu_it_says_so_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_serve.main([]) == gpu_serve.NOTHING_TO_CHECK_ON
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_serve: no GPU: torch")


def test_a_wrong_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_serve.main(["--only", "everything"])
    assert "invalid choice: 'everything'" in capsys.readouterr().err


def test_what_the_steps_start_exists() -> None:
    for module, *arguments in gpu_serve.STEPS.values():
        if module != "pytest":
            assert "--no-files" in arguments, "its figures are in this one's results"
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        for name in arguments:
            assert name.startswith("-") or (ROOT / name).is_file()


def test_steps_and_the_public_setup(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def run(command: list[str], **options: Any) -> Any:
        started.append(command[2])
        broken = command[2] == "pytest"
        return SimpleNamespace(
            returncode=int(broken), stdout="1 failed\n" if broken else 'a table\n{"worst": 2.5}\n'
        )

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(gpu_serve.measure_public, "__defaults__", (FakeEngine,))
    arguments = ["--model", "/models/gpt-oss-120b", "--lengths", "2048", "100"]
    assert gpu_serve.main([*arguments, "--json", "--no-files"]) == gpu_serve.FAILED
    assert started == ["pytest", "benchmarks.layerwise_transfer", "benchmarks.restore"]
    printed = capsys.readouterr().out
    assert [x.split()[:2] for x in printed.splitlines() if x.startswith(("PASS", "FAIL"))] == [
        ["FAIL", "exactness"],
        ["PASS", "layerwise"],
        ["PASS", "restore"],
        ["PASS", "public"],
    ]
    figures = json.loads(printed.splitlines()[-1])
    assert figures["restore_worst"] == 2.5
    assert figures["public_computed_2048_ms"] == 2000
    assert figures["public_dram_100_ms"] == 1000
    (row,) = [x for x in printed.splitlines() if x.startswith("2048 tokens")]
    assert row.split()[-2:] == ["71", "49"]


def test_a_public_setup_that_fails_costs_no_other_step_its_figures(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_model(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no such model")

    monkeypatch.setattr(gpu_serve, "run_step", lambda name: (True, {"worst": 2.5}, "said"))
    monkeypatch.setattr(gpu_serve.measure_public, "__defaults__", (no_model,))
    arguments = ["--only", "restore", "--only", "public", "--model", "x", "--json", "--no-files"]
    assert gpu_serve.main(arguments) == gpu_serve.FAILED
    printed = capsys.readouterr().out
    assert "no such model" in printed
    assert json.loads(printed.splitlines()[-1]) == {"worst": 2.5}


def test_a_step_without_an_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert gpu_serve.run_step("restore") == (False, {}, "no end after 3600 s")


def test_a_restore_from_another_tier_is_an_error() -> None:
    def from_ssd(*arguments: Any, **options: Any) -> Any:
        return FakeEngine(*arguments, **options, tier="ssd")

    with pytest.raises(RuntimeError, match="100 tokens were restored from"):
        gpu_serve.measure_public("model", 1.0, [100], from_ssd)
