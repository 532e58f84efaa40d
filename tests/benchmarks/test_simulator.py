from __future__ import annotations

import json

import pytest

from benchmarks import simulator


def test_the_benchmark_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    simulator.main(["--quick", "--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"growth_ratio", "peak_gib", "decision_us_64"} <= figures.keys()
    assert all(value > 0 for value in figures.values())
