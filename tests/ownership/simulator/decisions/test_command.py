"""`heterocache trace decisions` as a user runs it."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_connector.tools import cli, command
from ownership.scheduling import POLICIES, Step, WorkerLoad, WorkerPrefix
from ownership.scheduling.fleet import Machine
from ownership.simulator.traces.decision_file import Decided, DecisionFile
from tests.ownership.simulator.decisions.logs import Log, changed

FLEET = """
model: llama-3.1-8b
workers: [{hardware: h200, count: 2, dram_gib: 10}]
"""


def report(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert cli.main(["trace", "decisions", str(path), "--json", *options]) == command.EXIT_OK
    return dict(json.loads(capsys.readouterr().out))


def test_errors_of_predictions_by_action_and_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(b=WorkerLoad(running_requests=9))
    for late_s in (0.0, 1.0, 2.0, 3.0, 4.0):
        told = log.decide(Step(1000))
        assert told.predicted_ttft_s == pytest.approx(1.0)  # 1 ms per token
        log.lines[-1] = changed(log.lines[-1], first_byte_s=1.0 + late_s)
    log.decide(Step(1000), failed=True)
    log.decide(Step(1000), events=None)
    log.decide(Step(2000, owner="b", session_id="s"))
    found = report(log.write(tmp_path / "log"), capsys)
    assert (found["decisions"], found["unobserved"]) == (8, 2)
    rows = {(row["kind"], row["name"]): row for row in found["predictions"]}
    assert list(rows) == [
        ("", ""), ("action", "colocated_prefill"), ("worker", "a"), ("worker", "b"),
    ]  # fmt: skip
    at_a = rows["worker", "a"]
    assert (at_a["decisions"], at_a["observed_p50_s"]) == (5, 3.0)
    assert at_a["predicted_p50_s"] == pytest.approx(1.0)
    assert at_a["error_s"] == pytest.approx([0.4, 2.0, 3.6])
    assert at_a["ratio"] == pytest.approx([1.4, 3.0, 4.6])
    assert rows["worker", "b"]["error_s"] == pytest.approx([0.0, 0.0, 0.0])


def test_other_policies_on_the_same_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a` has less to do, `b` has the prefix: colocated goes by load, prefix_aware by prefix."""
    log = Log(b=WorkerLoad(running_requests=1))
    log.decide(Step(1000, {"b": WorkerPrefix(0, 900, 900)}))
    log.decide(Step(1000))
    path = log.write(tmp_path / "log")
    names = ["colocated", "prefix_aware", "static_pd"]
    found = report(path, capsys, "--policies", ",".join(names))
    same, other, pooled = found["policies"]
    assert [x["policy"] for x in found["policies"]] == names
    assert (same["decisions"], same["equal_share"], same["better_share"]) == (2, 1.0, 0.0)
    assert same["ttft_change_s"] == pytest.approx([0.0, 0.0, 0.0])
    assert (other["decisions"], other["equal_share"], other["better_share"]) == (2, 0.5, 0.5)
    assert other["ttft_change_s"][1] == pytest.approx(-0.45, abs=0.01)  # 0.1 s in place of 1 s
    assert (pooled["decisions"], pooled["impossible"]) == (0, 2)
    assert any("Another policy would have left other state" in x for x in found["caveats"])
    assert report(path, capsys, "--every", "2")["policies"][0]["decisions"] == 1


def test_every_policy_is_asked_if_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    log.decide(Step(100))
    found = report(log.write(tmp_path / "log"), capsys)
    assert [x["policy"] for x in found["policies"]] == list(POLICIES)


def test_lines_that_cannot_be_used_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    for _ in range(4):
        log.decide(Step(100))
    fleet, one, two, three, four = log.lines
    old = changed(one, format=1, kind=None, fleet=None, loads=None)
    lost = changed(two, fleet="unknown")
    odd = changed(four, prompt_tokens=0)
    newer = changed(four, format=9, kind="something else")
    free = changed(fleet, fleet="free", figures={x: [0.0] * len(Machine._fields) for x in "ab"})
    log.lines = [old, fleet, lost, three[:40], b"", newer, odd, free, four]
    path = log.write(tmp_path / "log.gz")
    path.write_bytes(gzip.compress(path.read_bytes()))
    found = report(path, capsys)
    assert (found["decisions"], found["unreadable_lines"], found["newer_lines"]) == (3, 3, 1)
    assert found["decisions_without_view"] == 2
    assert found["policies"][0]["decisions"] == 1
    assert found["caveats"][0].startswith("3 lines left out: torn, or no decision (line 4: ")
    assert found["caveats"][1].startswith("1 line left out: written by a later version")
    assert found["caveats"][2].startswith("2 lines without the view")


def test_the_report_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    log.decide(Step(1000), events=None)
    log.decide(Step(1000))
    path = log.write(tmp_path / "log")
    assert cli.main(["trace", "decisions", str(path)]) == command.EXIT_OK
    text = capsys.readouterr().out
    assert f"# 2 decisions of {path}" in text
    assert "| all | 1 | 1000.0 ms | 1000.0 ms | 0.0 ms | 0.0 ms | 0.0 ms | 1.00 |" in text
    assert "Not observed: 1, failed or no stream." in text
    assert re.search(r"\| colocated \| 2 \| 100.0% \|", text)
    assert "Simulated" not in text


def test_the_whole_log_is_simulated_under_each_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, fleet = Log(), tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    for turn in range(6):
        chunks = [[0, 4 + turn]]
        step = Step(1024 + 256 * turn, session_id=f"s{turn % 2}")
        log.decide(step, 10.0 * turn, chunks=chunks, chunk_tokens=256)
    path = log.write(tmp_path / "log")
    found = report(path, capsys, "--fleet", str(fleet), "--policies", "colocated,static_pd")
    [simulated], [left_out] = found["simulated"], found["not_simulated"]
    assert left_out.startswith("Not simulated: policy 'static_pd': needs workers of two roles")
    assert simulated["policy"] == "colocated"
    assert simulated["figures"]["requests"] == 6
    assert simulated["figures"]["saved_tokens"] > 0
    options = ["--fleet", str(fleet), "--policies", "colocated"]
    assert cli.main(["trace", "decisions", str(path), *options]) == command.EXIT_OK
    text = capsys.readouterr().out
    assert "| colocated | 6 | 0 |" in text
    assert "Prefixes that requests of different router processes share are not recorded." in text


def test_a_policy_that_the_fleet_cannot_run_is_left_out_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Roles are there, but no DRAM for what is handed off."""
    log, fleet = Log(), tmp_path / "fleet.yaml"
    workers = (
        "{hardware: h200, name: p, role: prefill}",
        "{hardware: h200, name: d, role: decode}",
    )
    fleet.write_text(f"model: llama-3.1-8b\nworkers: [{', '.join(workers)}]")
    log.decide(Step(1024), 1.0)
    path = log.write(tmp_path / "log")
    options = ["--fleet", str(fleet), "--policies", "static_pd"]
    found = report(path, capsys, *options)
    assert (found["decisions"], found["simulated"]) == (1, [])
    assert "hands off what is in DRAM" in found["not_simulated"][0]
    assert cli.main(["trace", "decisions", str(path), *options]) == command.EXIT_OK
    assert "Not simulated: policy 'static_pd'" in capsys.readouterr().out


def test_the_log_is_read_once_for_all_simulations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    original = DecisionFile.__iter__

    def counted(self: DecisionFile) -> Iterator[Decided]:
        read.append(self.path)
        return original(self)

    log, fleet = Log(), tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    log.decide(Step(1024), 1.0)
    path = log.write(tmp_path / "log")
    monkeypatch.setattr(DecisionFile, "__iter__", counted)
    names = (["colocated"], ["colocated", "ownerserve", "dynamo"])
    counts = []
    for policies in names:
        read.clear()
        report(path, capsys, "--fleet", str(fleet), "--policies", ",".join(policies))
        counts.append(len(read))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--policies", "best"], "no scheduling policy 'best'"),
        (["--fleet", "/no/such/file"], "/no/such/file: No such file"),
    ],
)
def test_wrong_options(
    options: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log()
    log.decide(Step(10))
    path = log.write(tmp_path / "log")
    assert cli.main(["trace", "decisions", str(path), *options]) == command.EXIT_UNUSABLE
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "no log\n", '{"format": 9}\n'])
def test_a_file_without_decisions(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    assert cli.main(["trace", "decisions", str(path)]) == command.EXIT_UNUSABLE
    assert f"{path}: no decision in it." in capsys.readouterr().err


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Fleets come all the time, because workers learn; only the newest are kept."""
    log = Log()
    for _ in range(4_000):
        log.decide(Step(100))
        log.lines.append(changed(log.lines[0], fleet=f"{len(log.lines):016x}"))
    path = log.write(tmp_path / "log")
    tracemalloc.start()
    try:
        assert sum(1 for _ in DecisionFile(path)) == 4_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.8 * path.stat().st_size
