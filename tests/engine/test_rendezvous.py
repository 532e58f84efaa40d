"""Workers' geometry reaches the scheduler side of the same engine and no other."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig, VllmConfig

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.startup import rendezvous
from hetero_connector.engine.startup.rendezvous import (
    WorkerGeometry,
    collect_geometries,
    engine_name,
    find_arena,
    publish_arena,
    publish_geometry,
    withdraw_arena,
)
from hetero_connector.errors import StoreError, UnsupportedModelError
from hetero_connector.spec import ModelSpec
from hetero_connector.store.arena import ArenaHandle
from tests.engine.fakes import HYBRID
from tests.waiting import until

LAYOUT = ArtifactLayout(HYBRID, 64)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(rendezvous, "_published", set())
    return tmp_path


def geometry(rank: int = 0, model: ModelSpec = HYBRID) -> WorkerGeometry:
    return WorkerGeometry(rank, replace(model, tp_size=2), ("CPU_ATTN",), "cpu", os.getpid())


def test_published_geometries_are_collected_by_rank_and_removed(own_directory: Path) -> None:
    publish_geometry("engine", geometry(1))
    publish_geometry("engine", geometry(0))
    assert collect_geometries("engine", 2) == [geometry(0), geometry(1)]
    assert list(own_directory.rglob("*.json")) == []


def test_another_engine_s_geometry_is_left_alone() -> None:
    """vLLM makes one connector of workers per process: that of the first engine."""
    publish_geometry("other", geometry(0))
    with pytest.raises(StoreError, match=r"of another engine.*VLLM_ENABLE_V1_MULTIPROCESSING"):
        collect_geometries("engine", 1, patience_s=0)
    assert collect_geometries("other", 1) == [geometry(0)]


def test_workers_may_be_children_of_any_process(own_directory: Path) -> None:
    """Ray starts them, not the engine core."""
    publish_geometry("engine", geometry(0))
    (path,) = own_directory.rglob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 1}))
    assert collect_geometries("engine", 1, patience_s=0) == [geometry(0)]
    with pytest.raises(StoreError, match="uni, mp or ray on one node"):
        collect_geometries("engine", 1, patience_s=0)


def test_geometries_of_pipeline_stages_are_told_apart() -> None:
    ranks = [replace(geometry(rank), stage=stage) for stage in (0, 1) for rank in (0, 1)]
    ranks[2:] = [replace(x, model=replace(x.model, layers=x.model.layers[:1])) for x in ranks[2:]]
    for rank in reversed(ranks):
        publish_geometry("engine", rank)
    assert collect_geometries("engine", 4) == ranks
    for rank in (*ranks[:3], replace(ranks[0], rank=1, stage=1)):
        publish_geometry("engine", rank)
    with pytest.raises(UnsupportedModelError, match="ranks 0 and 1 have different KV geometry"):
        collect_geometries("engine", 4)


def test_an_engine_is_named_alike_in_all_its_processes() -> None:
    one, other = VllmConfig(), VllmConfig()
    for config in (one, other):
        config.kv_transfer_config = KVTransferConfig(engine_id="same", kv_role="kv_both")
    assert engine_name(one) != engine_name(other)
    assert engine_name(pickle.loads(pickle.dumps(one))) == engine_name(one)


def test_unequal_shards_are_refused() -> None:
    publish_geometry("engine", geometry(0))
    publish_geometry("engine", geometry(1, replace(HYBRID, alignment=32)))
    with pytest.raises(UnsupportedModelError, match="ranks 0 and 1"):
        collect_geometries("engine", 2)


def test_a_directory_of_another_user_is_not_trusted(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_geometry("engine", geometry(0))
    monkeypatch.setattr(rendezvous.os, "getuid", lambda: 12345)
    (own_directory / "heterocache-12345").mkdir()
    with pytest.raises(StoreError, match="another user"):
        publish_geometry("engine", geometry(0))


@pytest.mark.parametrize(
    ("put", "problem"),
    [
        (lambda path, elsewhere: path.symlink_to(elsewhere), "is not a directory"),
        (lambda path, elsewhere: path.symlink_to(elsewhere / "gone"), "is not a directory"),
        (lambda path, elsewhere: path.touch(), "is not a directory"),
        (lambda path, elsewhere: (path.mkdir(), path.chmod(0o730)), r"is open .*mode 730"),
    ],
    ids=["link", "broken link", "file", "open to the group"],
)
def test_what_another_user_may_have_put_there_is_not_used(
    own_directory: Path, put: Callable[[Path, Path], object], problem: str
) -> None:
    elsewhere = own_directory / "elsewhere"
    elsewhere.mkdir()
    old = elsewhere / "mine.json"
    old.write_text("{}")
    os.utime(old, (0, 0))
    put(own_directory / f"heterocache-{os.getuid()}", elsewhere)
    with pytest.raises(StoreError, match=f"{problem}.*; remove it or set TMPDIR"):
        collect_geometries("engine", 1, patience_s=0)
    assert old.exists()


def test_ranks_that_compute_differently_are_refused() -> None:
    publish_geometry("engine", replace(geometry(0), rounding={"machine": "H200", "threads": ""}))
    publish_geometry("engine", replace(geometry(1), rounding={"machine": "H100", "threads": ""}))
    with pytest.raises(UnsupportedModelError, match="differently: machine 'H200' and 'H100'"):
        collect_geometries("engine", 2)


def test_workers_find_their_own_engines_arena(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = ArenaHandle("/proc/5/fd/6", 4096)
    publish_arena("engine.1", arena, LAYOUT)
    parent = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        found = find_arena("engine.1")
    assert found is not None
    assert (found[0], found[1].model, found[1].chunk_tokens) == (arena, HYBRID, 64)
    assert find_arena("engine") is None
    withdraw_arena("engine.1")
    assert find_arena("engine.1") is None


def test_an_arena_that_a_killed_engine_named_is_cleared_away(own_directory: Path) -> None:
    publish_arena("engine", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
    (path,) = own_directory.rglob("*.arena")
    killed = path.rename(path.with_name(path.name.replace(f".{os.getpid()}.", ".999999999.")))
    publish_arena("other", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
    assert not killed.exists()


@pytest.mark.parametrize("content", ["", "[]", "5", "{}", '{"pid": 1}', "[" * 99_999, "\0"])
def test_a_file_that_is_no_announcement_is_ignored_and_removed_when_it_is_old(
    own_directory: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish_geometry("engine", geometry(0))
    folder = next(own_directory.rglob("*.json")).parent
    foreign = folder / "engine.0.1.json"
    foreign.write_text(content)
    assert collect_geometries("engine", 1) == [geometry(0)]
    assert foreign.exists(), "it may be written just now"
    with pytest.raises(StoreError, match="only 0 of 1 workers"):
        collect_geometries("engine", 1, patience_s=0.05)
    assert len(caplog.records) == 1
    os.utime(foreign, (1e9, 1e9))
    publish_geometry("engine", geometry(0))
    collect_geometries("engine", 1)
    assert not foreign.exists()


_OTHER_CONTAINER = """
import os, sys
from pathlib import Path
sys.path.insert(0, "")
from hetero_connector.engine.startup import rendezvous
from hetero_connector.store.arena import ArenaHandle
from tests.engine.test_rendezvous import LAYOUT, geometry
rendezvous.publish_geometry("other", geometry(0))
rendezvous.publish_arena("other", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
sys.stdin.read()
(found,) = rendezvous.collect_geometries("other", 1, patience_s=0)
assert found.pid == os.getpid()
assert rendezvous.find_arena("other") is not None
"""


def test_an_engine_in_another_pid_namespace_keeps_its_announcements(own_directory: Path) -> None:
    """Two containers share /tmp; the pids of each mean nothing in the other."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets us make no PID namespace")
    publish_geometry("engine", geometry(0))
    publish_arena("engine", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
    with subprocess.Popen(
        [*unshare, sys.executable, "-c", _OTHER_CONTAINER],
        stdin=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(own_directory)},
    ) as other:
        announced = own_directory.rglob
        until(
            lambda: list(announced("other.*.arena")) or other.poll() is not None, patience_s=200.0
        )
        assert other.poll() is None
        publish_arena("third", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
        assert collect_geometries("engine", 1) == [geometry(0)]
        assert find_arena("engine") is not None
        other.communicate()
    assert other.returncode == 0


def test_announcements_of_another_pid_namespace_are_not_judged_by_pid(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous, "_pid_namespace", lambda: "4026531836000")
        patch.setattr(os, "getpid", lambda: 999999999)
        publish_geometry("engine", replace(geometry(0), pid=999999999))
        publish_arena("engine", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
    before = sorted(own_directory.rglob("*.*"))
    publish_arena("ours", ArenaHandle("/proc/5/fd/6", 4096), LAYOUT)
    publish_geometry("ours", geometry(0))
    collect_geometries("ours", 1)
    withdraw_arena("ours")
    assert sorted(own_directory.rglob("*.*")) == before
