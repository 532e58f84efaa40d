"""Long runs find bookkeeping that grows, slow syncs, disks that come and go."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.generation import Generation
from hetero_connector.errors import StoreError
from hetero_connector.metrics import Recorder
from hetero_connector.store import io_thread
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.health import WriteHealth
from hetero_connector.store.ssd.space import model_directories
from tests.clock import Clock
from tests.store.filling import DENSE, Bench, Disk, begin, chain, ids_of, intact, put, stored, wait
from tests.waiting import until


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "ssd", Disk())


def test_eviction_s_bookkeeping_does_not_grow_with_what_has_passed_through(bench: Bench) -> None:
    store = bench.open(dram_chunks=8, ssd_chunks=24)
    for i in range(150):
        put(store, chain(f"c{i}", 4))
        assert store.flush(60)
    tracked = sum(
        len(policy._backed) + len(policy._leaves)  # type: ignore[attr-defined]
        for both in store.catalog.tiers._policies.values()
        for policy in (both._first, both._last)
    )
    assert len(list(store.catalog.tiers.index.artifacts())) <= 64
    assert tracked < 600, "150 sessions of 8 artifacts went by"
    store.close()


def test_a_slow_sync_does_not_hold_up_a_restore(bench: Bench) -> None:
    store = bench.open()
    put(store, chain("a", 2))
    store.close()
    store = bench.open(load_deadline_s=60.0)
    syncing, go = threading.Event(), threading.Event()

    def slow(self: SsdDirectory) -> None:
        syncing.set()
        assert go.wait(300)

    with patch.object(SsdDirectory, "sync", slow):
        put(store, chain("b", 1))
        assert syncing.wait(60)
        restore = wait(begin(store, ids_of(chain("a", 2))))
        assert not restore.failed
        assert intact(store, restore)
        assert bench.counts("heterocache_ssd_written_bytes") == {}, "not known before it is synced"
        go.set()
        assert store.flush(60)
    restore.release()
    store.close()


def test_a_store_deleted_under_the_engine_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(io_thread, "_HOUSEKEEPING_S", 0.02)
    store = bench.open()
    put(store, chain("a", 2))
    assert store.flush(60)
    assert bench.root is not None
    with caplog.at_level(logging.ERROR, logger="vllm.heterocache"):
        shutil.rmtree(bench.root)
        until(lambda: "deleted under this engine" in caplog.text)
    assert not store.catalog.writes.is_writable
    put(store, chain("b", 1))
    assert stored(store, chain("b", 1)) == 1, "DRAM goes on"
    store.close()


def test_writing_pauses_after_three_failures_and_is_tried_again_after_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(0.0)
    geometry = SlotGeometry.fit({DENSE: 4096}, 8192)
    tiers = Tiers(256, geometry, geometry, Recorder())
    catalog = Catalog(tiers, StoreConfig(0, tmp_path), Recorder(), clock, Generation())
    health = WriteHealth(catalog, tmp_path)
    with caplog.at_level(logging.ERROR, logger="vllm.heterocache"):
        for _ in range(2):
            health.on_failure(StoreError("full"))
        assert catalog.writes.is_writable
        health.on_failure(StoreError("full"))
        assert not catalog.writes.is_writable
        clock.now_s = 59.0
        health.probe()
        assert not catalog.writes.is_writable
        clock.now_s = 60.0
        health.probe()
        assert catalog.writes.is_writable
        health.on_failure(StoreError("still full"))
        assert not catalog.writes.is_writable, "one failure is enough now"
        clock.now_s = 121.0
        health.probe()
        health.on_success()
        health.on_failure(StoreError("a hiccup"))
        assert catalog.writes.is_writable
        health.give_up("gone")
        clock.now_s = 1e9
        health.probe()
        assert not catalog.writes.is_writable
    assert len(caplog.records) == 2, "one line for the pause, however often it is tried again"


def test_a_directory_that_goes_away_while_it_is_listed_is_left_out(tmp_path: Path) -> None:
    for name in ("0" * 16, "1" * 16):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    found = model_directories(tmp_path)
    first = next(found)
    (other,) = {tmp_path / ("0" * 16), tmp_path / ("1" * 16)} - {first.path}
    shutil.rmtree(other)
    assert list(found) == []
