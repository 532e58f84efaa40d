"""Two checkouts of a benchmark, run by turns and compared."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import by_turns
from benchmarks.measure import WRITES_NOTHING


def checkout(root: Path, line: str) -> Path:
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "__init__.py").touch()
    (root / "benchmarks" / "made_up.py").write_text(f"print('a table')\nprint('{line}')\n")
    return root


def test_every_common_figure_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkout(tmp_path / "before", '{"wait_ms": 2.0, "same": 3, "gone": 1}')
    after = checkout(tmp_path / "after", '{"wait_ms": 3.0, "same": 3, "text": "x"}')
    monkeypatch.setattr(by_turns, "HERE", after)
    text, ratios = by_turns.compare(before, ["made_up"], turns=2)
    assert ratios == {"wait_ms": 1.5, "same": 1.0}
    assert "1.500" in text


def test_two_runs_without_a_common_figure_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkout(tmp_path / "before", '{"figures": {"wait_ms": 2.0}}')
    monkeypatch.setattr(by_turns, "HERE", checkout(tmp_path / "after", '{"wait_ms": 2.0}'))
    with pytest.raises(SystemExit, match="made_up --quick: the checkouts have no figure in common"):
        by_turns.compare(before, ["made_up", "--quick"], turns=1)


def test_a_benchmark_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkout(tmp_path / "before", "{}")
    (before / "benchmarks" / "made_up.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(by_turns, "HERE", before)
    with pytest.raises(subprocess.CalledProcessError):
        by_turns.compare(before, ["made_up"], turns=1)


def test_a_turn_is_no_result(tmp_path: Path) -> None:
    before = checkout(tmp_path / "before", "")
    (before / "benchmarks" / "made_up.py").write_text(
        f"import json, os\nprint(json.dumps({{'silent': int('{WRITES_NOTHING}' in os.environ)}}))\n"
    )
    assert by_turns.figures_of(before, ["made_up"]) == {"silent": 1.0}
