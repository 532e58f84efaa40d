"""The example as a user runs it. One prefiller and one decoder: `test_fleet.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.disaggregated_prefill.run"]


@pytest.mark.parametrize("model", ["gemma3", "deepseek_v4"])
def test_two_prefillers_and_a_decoder(model: str, tmp_path: Path) -> None:
    command = [*COMMAND, model, "--prefillers", "2", "--dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "duplicate factor" in ended.stdout
    rows = [line.split() for line in ended.stdout.splitlines() if line[:1] in set("1234")]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    # Prefillers take turns, so each restores what the other has computed in between.
    assert all(int(row[4].replace(",", "")) > 0 for row in rows[1:])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_running(how: signal.Signals, tmp_path: Path) -> None:
    run = subprocess.Popen([*COMMAND, "dense", "--dir", str(tmp_path)], cwd=ROOT)
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while len(started := psutil.Process(run.pid).children(recursive=True)) < 5:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        run.send_signal(how)
        assert run.wait(120) != 0
        _, left = psutil.wait_procs(started, timeout=10)
        assert left == []
    finally:
        for process in (run, *(p for p in started if p.is_running())):
            process.kill()
        run.wait()
