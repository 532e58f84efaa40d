"""`make demo` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.cpu_kernels import unsupported_reason

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demo_runs_and_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--dir", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    third = unsupported_reason("deepseek_v4") or "compressed_csa_main"
    for shown in ("restored from SSD after kill -9", "window_swa", third):
        assert shown in demo.stdout
