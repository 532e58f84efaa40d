"""Tests on the real engine are where `make test-engine` looks for them."""

import subprocess
import sys
from pathlib import Path

import pytest

_TEST = """
import pytest

@pytest.mark.engine
def test_nothing():
    pass
"""
_ROOT = Path(__file__).parents[1]


def test_an_engine_test_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_elsewhere.py").write_text(_TEST)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-m", "engine"]
    command += ["-c", str(_ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(tmp_path)]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR, ended.stdout
    assert "test_elsewhere.py::test_nothing: it needs an engine" in ended.stderr
