import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hetero_connector import machine
from hetero_connector.units import GIB


@pytest.fixture(autouse=True)
def host_of_64_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_without_cgroups_the_host_counts(tmp_path: Path) -> None:
    assert machine.memory(tmp_path) == machine.Memory(64 * GIB, 48 * GIB)


def test_a_v2_limit_counts_and_reclaimable_cache_is_free(tmp_path: Path) -> None:
    files = {
        "cgroup.controllers": "memory",
        "memory.max": 8 * GIB,
        "memory.current": 6 * GIB,
        "memory.stat": f"anon 5\ninactive_file {2 * GIB}",
    }
    assert machine.memory(write(tmp_path, files)) == machine.Memory(8 * GIB, 4 * GIB)


def test_a_v2_parents_limit_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_own_cgroup", lambda controller: "pod/container")
    files = {
        "cgroup.controllers": "memory",
        "pod/memory.max": 4 * GIB,
        "pod/memory.current": 1 * GIB,
        "pod/container/memory.max": "max",
        "pod/container/memory.current": 1 * GIB,
    }
    assert machine.memory(write(tmp_path, files)) == machine.Memory(4 * GIB, 3 * GIB)


def test_a_v1_parents_limit_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_own_cgroup", lambda controller: "job/step")
    files = {
        "memory/job/memory.limit_in_bytes": 4 * GIB,
        "memory/job/memory.usage_in_bytes": 1 * GIB,
        "memory/job/step/memory.limit_in_bytes": 2**63 - 4096,
        "memory/job/step/memory.usage_in_bytes": 1 * GIB,
    }
    assert machine.memory(write(tmp_path, files)) == machine.Memory(4 * GIB, 3 * GIB)


def test_a_v1_limit_counts_and_no_limit_does_not(tmp_path: Path) -> None:
    limited = {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": 3 * GIB,
        "memory/memory.stat": "total_inactive_file 0",
    }
    assert machine.memory(write(tmp_path / "a", limited)) == machine.Memory(2 * GIB, 0)
    unlimited = {**limited, "memory/memory.limit_in_bytes": 2**63 - 4096}
    assert machine.memory(write(tmp_path / "b", unlimited)) == machine.Memory(64 * GIB, 48 * GIB)


def test_this_process_finds_its_own_cgroup() -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    v2 = [line[4:] for line in lines if line.startswith("0::/")]
    assert machine._own_cgroup("0::") == (v2[0] if v2 else "")
    assert machine._own_cgroup("no-such-controller") == ""


def test_disk_of_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    here = os.statvfs(tmp_path)
    found = machine.disk(tmp_path / "a" / "b")
    assert found.total_bytes == here.f_blocks * here.f_frsize
    assert 0 <= found.free_bytes <= found.total_bytes


def test_bytes_under_counts_blocks_not_holes(tmp_path: Path) -> None:
    assert machine.bytes_under(tmp_path / "nowhere") == 0
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    with open(tmp_path / "full", "wb") as file:
        file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    assert 1 << 20 <= machine.bytes_under(tmp_path) < 1 << 22


def test_bytes_under_leaves_out_what_a_running_engine_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(os.urandom(1 << 20))
    (tmp_path / "gone").write_bytes(b"")
    lstat = Path.lstat

    def remove_first(path: Path) -> os.stat_result:
        (tmp_path / "gone").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", remove_first)
    assert machine.bytes_under(tmp_path) >= 1 << 20


NODES: dict[str, object] = {
    "has_memory": "0-1,4",
    "node0/cpulist": "0-2,6",
    "node1/cpulist": "3-5,7",
    "node4/cpulist": "",
}


@pytest.mark.parametrize(
    ("usable", "nodes"),
    [
        ({0, 1, 2, 3, 6, 7}, [{0, 1, 2, 6}, {3, 7}]),
        ({0, 6}, [{0, 6}]),
        ({9}, [{9}]),
    ],
)
def test_nodes_are_those_whose_processors_may_be_used(
    usable: set[int], nodes: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    assert machine.processors_by_node(write(tmp_path, NODES)) == nodes


def test_unknown_nodes_are_one(tmp_path: Path) -> None:
    assert machine.processors_by_node(tmp_path) == [os.sched_getaffinity(0)]


def test_this_machine_has_nodes() -> None:
    assert set.union(*machine.processors_by_node()) <= os.sched_getaffinity(0)
