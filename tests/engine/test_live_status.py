"""An engine answers the live page at its socket; its scheduler side and store are real."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_connector.engine import api
from hetero_connector.engine.scheduler import status
from hetero_connector.engine.scheduler.status_socket import ask
from hetero_connector.engine.startup import rendezvous
from hetero_connector.metrics import Recorder
from tests.engine.fakes import FakeRequest
from tests.engine.socket_engine import SocketEngine
from tests.engine.stepped import tokens

ALERTS = yaml.safe_load((Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml").read_text())


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SocketEngine]:
    monkeypatch.setattr(rendezvous, "_directory", lambda: tmp_path)
    engine = SocketEngine(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 20)
    yield engine
    engine.close()


def live(engine: SocketEngine) -> dict[str, Any]:
    return ask(engine.path, {"get": "live"})


def test_it_has_what_was_restored_decided_and_stored(engine: SocketEngine) -> None:
    for number in range(3):
        engine.serve(FakeRequest(f"r{number}", tokens(200, seed=1), session_id="s"))
    told = live(engine)
    assert told["tokens"]["dram"] > 0
    assert sum(told["tokens"].values()) == 600
    assert told["counts"]["heterocache_decisions"] == [{"choice": "load", "count": 2}]
    assert [x["request_id"] for x in told["decisions"]] == ["r0", "r1", "r2"]
    (session,) = told["sessions"]
    assert session["turns"] == 3
    dram, ssd = told["tiers"]
    assert dram["bytes"].keys() == dram["max_artifacts"].keys() == ssd["artifacts"].keys()
    assert all(n <= dram["max_artifacts"][kind] for kind, n in dram["artifacts"].items())
    assert told["health"] == {
        "cache_alive": True,
        "io_alive": True,
        "ssd_writable": True,
        "ssd_readable": True,
        "ssd_quarantined_bytes": 0,
        "directory_joined": None,
        "shared": None,
    }


def test_it_has_what_the_page_reads_and_no_more(engine: SocketEngine) -> None:
    for number in range(status._LIVE_DECISIONS):
        request = FakeRequest(f"{number:045}", tokens(200, number // 2), session_id=f"{number}")
        engine.serve(request)
    told = live(engine)
    assert len(told["decisions"]) == status._LIVE_DECISIONS
    assert len(json.dumps(told, separators=(",", ":"))) < 30_000
    page = "".join(x.read_text() for x in (files(api) / "page").iterdir() if x.name in _SCRIPTS)
    for part in (told["engine"], told["sessions"][0], told["decisions"][0]):
        assert [name for name in part if not re.search(rf"\b{name}\b", page)] == []
    whole = ask(engine.path, {"get": "status"})
    assert "config" in whole["engine"]
    assert len(whole["decisions"][0]) > len(told["decisions"][0])


def test_the_page_says_of_what_does_not_work_what_its_alert_says(engine: SocketEngine) -> None:
    page = (files(api) / "page/page.js").read_text()
    for part in live(engine)["health"]:
        assert f'"{part}"' in page or f"health.{part}" in page, part
    rules = (rule for group in ALERTS["groups"] for rule in group["rules"])
    said = {rule["expr"]: rule["annotations"]["description"] for rule in rules}
    for part in ("cache_alive", "io_alive"):
        assert said[f"heterocache_{part} == 0"] in page


_SCRIPTS = ("page.js", "model.js", "charts.js")


def test_failures_are_summed_since_the_start_however_often_metrics_are_drained(
    engine: SocketEngine,
) -> None:
    recorder = engine.engine.recorder
    for _ in range(2):
        recorder.add("heterocache_failures", cause="checksum", tier="ssd")
        recorder.drain()
    recorder.add("heterocache_failures", cause="checksum", tier="ssd")
    recorder.add_reported({"heterocache_hook_errors{hook=start_load_kv}": 2.0, "other{}": 1.0})
    recorder.set("heterocache_directory_joined", 0.0)
    recorder.set("heterocache_shared", 0.0)
    recorder.drain()
    told = live(engine)
    failed = {"cause": "checksum", "tier": "ssd", "count": 3}
    assert told["counts"]["heterocache_failures"] == [failed]
    assert told["counts"]["heterocache_hook_errors"] == [{"hook": "start_load_kv", "count": 2}]
    assert told["health"]["directory_joined"] is False
    assert told["health"]["shared"] is False


def test_what_another_process_has_reported_is_not_reported_again() -> None:
    recorder = Recorder()
    recorder.add_reported({"heterocache_hook_errors{hook=x}": 1.0})
    assert recorder.drain() is None
    assert not recorder.has_news()


def test_it_is_bounded(engine: SocketEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_LIVE_SESSIONS", 2)
    monkeypatch.setattr(status, "_LIVE_DECISIONS", 3)
    pin = {"kv_transfer_params": {"heterocache": {"pin_s": 60}}}
    for number in range(5):
        prompt = tokens(70, seed=number)
        params = {} if number else pin
        engine.serve(FakeRequest(f"r{number}", prompt, session_id=f"s{number}", **params))
    told = live(engine)
    assert [x["request_id"] for x in told["decisions"]] == ["r2", "r3", "r4"]
    assert (told["pins"]["count"], told["pins"]["first_to_end"]) == (1, [])
    assert len(told["sessions"]) == 2
    monkeypatch.setattr(status, "_LIVE_CHUNKS", 0)
    assert live(engine)["sessions"] == []
