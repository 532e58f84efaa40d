"""Control groups of the benchmarks: real ones where this user may make them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.cpu_shares import CpuShare

_SPIN = "while True: pass"


def may_make_groups() -> bool:
    root = Path("/sys/fs/cgroup")
    folder = root if (root / "cgroup.controllers").exists() else root / "cpu"
    return os.access(folder, os.W_OK)


def test_a_process_gets_its_share_and_no_more() -> None:
    if not may_make_groups():
        with pytest.raises(OSError, match="cgroup"):
            CpuShare("test")
        return
    with CpuShare("test") as share, subprocess.Popen([sys.executable, "-c", _SPIN]) as process:
        share.add(process.pid)
        share.limit(0.2)
        time.sleep(0.2)  # what it used before the limit
        before, began = psutil.Process(process.pid).cpu_times(), time.perf_counter()
        time.sleep(1.0)
        after, seconds = psutil.Process(process.pid).cpu_times(), time.perf_counter() - began
        process.kill()
        used = after.user + after.system - before.user - before.system
        assert used <= 0.3 * seconds


@pytest.mark.parametrize(
    ("mounted", "parent", "files"),
    [
        ("cpu/", "cpu", {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "10000"}),
        ("cgroup.controllers", "", {"cpu.max": "10000 20000"}),
    ],
)
def test_limits_of_both_versions(
    tmp_path: Path, mounted: str, parent: str, files: dict[str, str]
) -> None:
    if mounted.endswith("/"):
        (tmp_path / mounted).mkdir()
    else:
        (tmp_path / mounted).touch()
    CpuShare("test", tmp_path).limit(0.5)
    (folder,) = (tmp_path / parent).glob("test-*")
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_without_control_groups_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cpu"):
        CpuShare("test", tmp_path)
