"""`make gpu-check` without a GPU: its logic on stand-ins, and that it notices what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heterocache_cuda.bounce import BounceBuffer
from heterocache_cuda.driver import CudaError
from heterocache_cuda.mover import LaunchSizes, Mode, Moves, PageMover, Part

from benchmarks.gpu_check import processes, running, speed, stand_ins
from benchmarks.gpu_check.__main__ import FAILED, NOTHING_TO_CHECK_ON, PASSED, main
from benchmarks.gpu_check.order import check_events, check_graph
from benchmarks.gpu_check.running import CHECKS, setting_of
from benchmarks.gpu_check.setting import FULL, SMALL, Setting, Sizes, Verdict
from benchmarks.gpu_check.speed import check_bandwidth, check_bounce, check_pinning

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setting() -> Iterator[Setting]:
    with setting_of(SMALL, dry_run=True) as made:
        yield made


@pytest.mark.long
def test_every_check_passes_on_stand_ins(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in CHECKS if name != "sanitizer"]
    assert main(["--dry-run", *(x for name in names for x in ("--only", name))]) == PASSED
    printed = capsys.readouterr().out
    assert printed.count("PASS ") == len(names), printed


def test_a_run_writes_one_dated_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.measure.RESULTS", tmp_path)
    running.run(["events", "copy-table"], SMALL, dry_run=True, as_json=True, write=True)
    (path,) = tmp_path.glob("gpu_check-*.json")
    written = json.loads(path.read_text())
    assert written["details"]["verdicts"] == {"events": "PASS", "copy-table": "PASS"}
    assert written["details"]["gpu"].startswith("stand-in, sm_00")
    assert written["figures"]["first_upload_waits"] == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written["figures"]
    assert "PASS    events" in path.with_suffix(".txt").read_text()


def test_without_a_gpu_it_says_so_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not torch.cuda.is_available()
    assert main([]) == NOTHING_TO_CHECK_ON
    assert capsys.readouterr().err.splitlines() == [
        f"gpu_check: no GPU: torch {torch.__version__}, without CUDA, finds none"
    ]


@pytest.mark.parametrize("name", ["check", "serve"])
def test_make_runs_it_with_the_python_of_the_gpu(name: str) -> None:
    command = ["make", "--no-print-directory", "--dry-run", f"gpu-{name}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.endswith(f"PYTHONPATH=.:cuda python3 -m benchmarks.gpu_{name}\n")


def test_it_needs_no_vllm() -> None:
    code = "import sys, benchmarks.gpu_check.running; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_wrong_bytes_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lossy(mover: PageMover, moves: Moves) -> torch.Tensor:
        """Leave a page out."""
        data = torch.from_numpy(moves.data.copy())
        data[moves.ids_at + 1] = 0
        return data

    monkeypatch.setattr(PageMover, "upload", lossy)
    assert main(["--dry-run", "--only", "layouts"]) == FAILED
    assert "WRONG" in capsys.readouterr().out


def test_a_missing_wait_is_noticed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins.Stream, "wait_event", lambda stream, event: None)
    result = check_events(setting)
    assert result.verdict is Verdict.FAIL
    assert "not so: the save came after the kernel" in result.summary


def test_a_replay_that_does_nothing_is_noticed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_graph(setting).verdict is Verdict.PASS
    monkeypatch.setattr(stand_ins.Graph, "replay", lambda graph: None)
    assert check_graph(setting).summary == "not so: the graph's products are right"


def test_a_cpu_that_waits_is_noticed(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    record = stand_ins.Stream.record_event

    def blocking(stream: stand_ins.Stream, event: Any = None) -> stand_ins.Event:
        made = record(stream, event)
        made.synchronize()
        return made

    monkeypatch.setattr(stand_ins.Stream, "record_event", blocking)
    assert "the CPU has gone on" in check_events(setting).summary.partition("not so: ")[2]


def test_a_slow_mover_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes as long as two copies: enough for small pieces, not for large ones."""
    issue = stand_ins.Gpu.issue

    def slow(gpu: stand_ins.Gpu, work: Callable[[], object]) -> None:
        issue(gpu, work)
        gpu.current.record_event()

    monkeypatch.setattr(stand_ins.Gpu, "issue", slow)
    result = check_bandwidth(setting)
    assert result.verdict is Verdict.FAIL
    assert result.summary == "slow: load_16K 0.50; slow: save_16K 0.50"


@pytest.mark.parametrize("sizes", [FULL, SMALL], ids=["full", "small"])
def test_a_launch_has_the_programs_that_its_column_names(sizes: Sizes) -> None:
    """Every layer is a job with the same number of programs, so a remainder is left out."""
    for programs in sizes.programs:
        launch = LaunchSizes(programs=programs, most_programs_per_job=programs)
        assert launch.programs_per_job(sizes.layers) * sizes.layers == programs


def test_the_first_move_through_the_buffer_is_not_timed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles the kernel."""
    moved: list[Mode] = []
    real = BounceBuffer.move

    def move(buffer: BounceBuffer, mode: Mode, part: Part) -> None:
        moved.append(mode)
        real(buffer, mode, part)

    def timed(job: Callable[[], object]) -> float:
        assert moved == [Mode.SAVE]
        job()
        return 1.0

    monkeypatch.setattr(BounceBuffer, "move", move)
    monkeypatch.setattr(speed, "timed", timed)
    assert check_bounce(setting).verdict is Verdict.PASS


def test_memory_that_cannot_be_pinned_is_an_error(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(driver: stand_ins.StandInDriver, address: int, size_bytes: int) -> None:
        raise CudaError("out of memory")

    monkeypatch.setattr(stand_ins.StandInDriver, "register", refuse)
    with pytest.raises(CudaError, match="an arena of 2 MiB cannot be pinned"):
        check_pinning(setting)


def test_a_check_that_raises_is_a_failure_of_that_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CHECKS, "events", lambda setting: 1 / 0)
    assert main(["--dry-run", "--only", "events", "--only", "pinned-edge"]) == FAILED
    printed = capsys.readouterr()
    assert "FAIL    events" in printed.out
    assert "ZeroDivisionError: division by zero" in printed.out
    assert "PASS    pinned-edge" in printed.out
    assert "Traceback" in printed.err


@pytest.mark.parametrize(
    ("script", "verdict", "summary"),
    [
        ("exit 0", Verdict.PASS, "memcheck and racecheck: clean"),
        (
            "echo '========= ERROR SUMMARY: 1 error'; exit 99",
            Verdict.FAIL,
            "memcheck: ERROR SUMMARY: 1 error; racecheck: ERROR SUMMARY: 1 error",
        ),
        ("exit 3", Verdict.FAIL, "memcheck: exit status 3; racecheck: exit status 3"),
    ],
)
def test_what_compute_sanitizer_finds(
    setting: Setting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    verdict: Verdict,
    summary: str,
) -> None:
    tool = tmp_path / "compute-sanitizer"
    arguments = tmp_path / "arguments"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {arguments}\n{script}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = processes.check_sanitizer(setting)
    assert (found.verdict, found.summary) == (verdict, summary)
    calls = arguments.read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["memcheck", "racecheck"]
    assert calls[0].endswith("--small --no-files --only layouts")


def test_the_second_process_s_error_is_told(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = processes.check_two_processes(setting)
    assert found.verdict is Verdict.FAIL
    assert "the second process failed" in found.summary
