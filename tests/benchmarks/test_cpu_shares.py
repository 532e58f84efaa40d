"""Control groups of the benchmarks: real ones where this user may make them."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.cpu_shares import CpuShare


def used_s(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


NOT_ALLOWED = (errno.EPERM, errno.EACCES, errno.EROFS)


def test_a_process_gets_its_share_and_no_more() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    share = None
    try:
        share = CpuShare("test")
        share.add(process.pid)
        share.limit(0.2)
        time.sleep(0.2)  # what it used before the limit
        before_s, began_s = used_s(process), time.perf_counter()
        time.sleep(1.0)
        used = (used_s(process) - before_s) / (time.perf_counter() - began_s)
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
        pytest.skip(f"this user may not make control groups: {error}")
    finally:
        process.kill()
        process.wait()
        if share is not None:
            share.close()
    assert 0.0 < used <= 0.3


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
