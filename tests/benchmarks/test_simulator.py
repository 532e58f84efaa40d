from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import measure, simulator


def test_the_benchmark_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    simulator.main(["--quick", "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"growth_ratio", "peak_gib", "simulator_decision_us_64"} <= figures.keys()
    assert all(value > 0 for value in figures.values())


def test_a_run_without_the_traces_replaces_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    for name in ("mooncake", "agents", "decisions", "growth"):
        monkeypatch.setattr(simulator, name, lambda *_: {"simulator_decision_us_64": 1.0})
    simulator.main(["--mooncake", "trace"])
    assert not (tmp_path / "results").exists()
    simulator.main(["--mooncake", "trace", "--sessions", "trace"])
    assert len([*(tmp_path / "results").iterdir()]) == 2
