"""Figures and tables of rows, environments, and the contestants' entries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import measure
from benchmarks.measure import Samples, error_of_median
from benchmarks.side_by_side import __main__ as command
from benchmarks.side_by_side import report, work
from benchmarks.side_by_side.contestants import CONTESTANTS, Contestant, Place
from benchmarks.side_by_side.environments import (
    Environment,
    EnvironmentFailedError,
    environment_of,
    run_command,
)
from benchmarks.side_by_side.processes import remove_left_memory
from benchmarks.side_by_side.rows import Outcome, Row
from benchmarks.side_by_side.work import (
    Arena,
    Case,
    References,
    _added_over_memcpy,
    cause,
    useful_bytes,
)
from examples.checkpoints import write_checkpoint
from examples.serving import Reply, Server


def row(contestant: str, model: str = "dense", added_s: float | None = 0.02, **fields: Any) -> Row:
    given: dict[str, Any] = {
        "useful_bytes": 200_000_000,
        "prompt_tokens": 8000,
        "seconds": {"cold save": 5.0, "local": 0.1, "memory": 0.12, "memcpy": 0.025}
        | {"restart limit": 0.05, "restart verified limit": 0.06},
        "added_s": added_s,
        "added_over_memcpy": None if added_s is None else added_s / 0.025,
        "after_s": {"restart": 0.07},
        "restored_tokens": {"memory": 8000, "restart": 8000},
        "power": 2.0,
        "distances": {"memory": 0.0},
    }
    return Row(contestant, "1.0", model, **(given | fields))


def test_ours_is_compared_with_the_best_of_the_others_in_the_worst_model() -> None:
    rows = [row("heterocache", added_s=0.01), row("lmcache", added_s=0.1), row("mooncake")]
    rows += [row("heterocache", "gemma3", 0.03), row("mooncake", "gemma3", 0.04)]
    assert report.figures(rows)["added_over_best_rival"] == 0.75


def test_a_rival_that_answers_wrong_or_restores_nothing_does_not_count() -> None:
    wrong = row("example", added_s=0.001, distances={"memory": 1.0})
    seconds = {"cold save": 5.0, "local": 0.1, "memory": 5.1, "memcpy": 0.025}
    nothing = row("lmcache", added_s=5.0, seconds=seconds, restored_tokens={"memory": 0})
    figures = report.figures([row("heterocache"), wrong, nothing, row("none", added_s=None)])
    assert "added_over_best_rival" not in figures
    assert figures["rivals_run"] == 0


def test_large_restores_are_compared_with_a_copy_and_small_ones_beyond_it() -> None:
    small = row("heterocache", "gemma3", 0.0275, useful_bytes=12_000_000)
    figures = report.figures([row("heterocache"), small])
    assert figures["dram_over_memcpy"] == 0.8
    assert figures["restore_fixed_ms"] == 2.5
    assert figures["ssd_over_limit"] == 1.0
    assert figures["ssd_over_verified_limit"] == 1.2


def test_a_copy_that_was_disturbed_is_no_reference() -> None:
    calm, disturbed = ({"memcpy": spread} for spread in (1.9, 29.1))
    assert report.figures([row("heterocache", spread=calm)])["dram_over_memcpy"] == 0.8
    other = row("heterocache", "second", spread=disturbed)
    assert "dram_over_memcpy" not in report.figures([row("heterocache", spread=calm), other])
    assert "memcpy varied 29-fold" in report.tables([other])


def test_what_a_restore_adds_is_compared_with_the_copy_of_its_turn() -> None:
    samples = Samples({"memory": [2.0, 3.0, 9.0], "local": [1.0] * 3, "memcpy": [2.0, 2.0, 8.0]})
    assert _added_over_memcpy(samples) == 1.0
    assert _added_over_memcpy(Samples({"local": [1.0]})) is None


def test_the_error_of_a_median_is_half_of_the_interval_between_two_of_the_values() -> None:
    assert error_of_median(float(x) for x in reversed(range(100))) == (60.0 - 39.0) / 2
    assert error_of_median([1.0, 2.0]) is None
    assert error_of_median([]) is None


def test_the_fixed_part_of_a_restore_is_shown_with_its_error() -> None:
    rows = [
        row("heterocache", model, added, useful_bytes=2_000_000, added_error_s=error)
        for model, added, error in (("gemma3", 0.030, 0.002), ("gptoss", 0.028, 0.009))
    ]
    figures = report.figures(rows)
    assert figures["restore_fixed_ms"] == pytest.approx(5.0)
    assert figures["restore_fixed_error_ms"] == 2.0
    assert "30.0 ± 2.0" in report.tables(rows)


@pytest.mark.parametrize(("ours", "theirs"), [(0.01, -0.01), (-0.01, 0.01), (0.01, 0.0)])
def test_times_within_the_noise_are_not_compared(ours: float, theirs: float) -> None:
    rows = [row("heterocache", added_s=ours), row("lmcache", added_s=theirs)]
    assert "added_over_best_rival" not in report.figures(rows)


def test_a_limit_that_was_not_measured_is_no_figure() -> None:
    """Rows of older runs have one limit."""
    older = row("heterocache", seconds={"memory": 0.12, "memcpy": 0.025, "restart limit": 0.05})
    figures = report.figures([older])
    assert figures["ssd_over_limit"] == 1.0
    assert "ssd_over_verified_limit" not in figures


def test_only_what_was_restored_from_files_has_a_bandwidth() -> None:
    def costs(contestant: str, restored: int) -> str:
        other = row(contestant, restored_tokens={"memory": 8000, "restart": restored})
        return report.tables([other]).split("costs")[1].split("\n\n")[0]

    assert "1.20" in costs("lmcache", 8000)
    assert "1.20" not in costs("lmcache", 0)
    assert "1.20" not in costs("pegaflow", 8000), "its server kept it in memory"


def test_wrong_answers_after_faults_count() -> None:
    faults = {"file-corrupted": Outcome.WRONG, "process-killed": Outcome.ERROR}
    assert report.figures([row("heterocache", faults=faults)])["wrong_answers_ours"] == 1
    far = {"memory": 0.19, "restart": 0.21}
    assert report.figures([row("heterocache", distances=far)])["wrong_answers_ours"] == 1


def test_an_error_a_hang_and_a_run_that_was_stopped_count() -> None:
    faults = {"process-killed": Outcome.ERROR, "disk-full": Outcome.HANG}
    faults |= {"other-weights": Outcome.COMPUTED, "file-corrupted": Outcome.NOT_RUN}
    rows = [row("heterocache", faults=faults), row("heterocache", "gemma3", error="restart: no")]
    assert report.figures(rows)["unanswered_ours"] == 3


def test_a_contestant_that_cannot_run_is_a_row_with_its_error() -> None:
    failed = Row("pegaflow", "0.25.1", "dense", error="start: no CUDA")
    text = report.tables([row("heterocache"), failed])
    assert "start: no CUDA" in text
    assert text.count("pegaflow") == 4, "in each table"


def test_the_reason_of_a_failure_is_the_first_error_of_the_process_that_had_it(
    tmp_path: Path,
) -> None:
    end = RuntimeError("no server:\nEngine core initialization failed. Failed core proc(s): {}")
    assert cause(tmp_path, end) == "Engine core initialization failed. Failed core proc(s): {}"
    (tmp_path / "server.log").write_text(
        "WARNING ImportError: harmless\n(Worker) ERROR Traceback (most recent call last):\n"
        "(Worker) ERROR   raise ValueError(x)\n(Worker) ERROR ValueError: CUDA only\n"
        "(Core) ERROR Traceback (most recent call last):\nRuntimeError: a worker failed\n"
    )
    assert cause(tmp_path, end) == "ValueError: CUDA only"
    (tmp_path / "server.log").write_text("thread 'main' panicked at lib.rs:1:2:\nno libcuda.so\n")
    assert cause(tmp_path, end) == "no libcuda.so"


def test_all_figures_that_are_promised_come_from_a_complete_run() -> None:
    small = row("heterocache", "gemma3", useful_bytes=12_000_000)
    assert report.figures([row("heterocache"), small, row("lmcache")]).keys() == {
        *("added_over_best_rival", "dram_over_memcpy", "restore_fixed_ms"),
        *("ssd_over_limit", "ssd_over_verified_limit", "rivals_run"),
        *("wrong_answers_ours", "unanswered_ours"),
    }


def test_the_table_says_which_answers_were_wrong() -> None:
    text = report.tables([row("example", distances={"memory": 0.0, "restart": 0.5})])
    assert "WRONG: restart" in text


@pytest.mark.parametrize("name", CONTESTANTS)
def test_every_contestant_names_a_connector_and_pins_what_it_installs(
    name: str, tmp_path: Path
) -> None:
    contestant = CONTESTANTS[name]
    place = Place(tmp_path / "files", Environment(tmp_path), [1, 2, 3, 4])
    transfer = contestant.transfer(place)
    assert transfer is None or transfer["kv_connector"].partition("Connector")[1]
    assert all("==" in pin for pin in contestant.pins)
    assert all(command.port in place.ports for command in contestant.services(place))


def test_an_environment_is_made_again_for_other_pins_only(tmp_path: Path) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str, cwd: Path | None = None) -> None:
        commands.append(command)
        if "venv" in command:
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            (Path(command[-1]) / "lib" / version / "site-packages").mkdir(parents=True)

    def make(*pins: str) -> Environment:
        return environment_of("one", pins, (), tmp_path, run)

    made = make("some==1")
    count = len(commands)
    assert "some==1" in commands[-1]
    assert make("some==1") == made
    assert len(commands) == count
    make("some==2")
    assert "some==2" in commands[-1]
    assert environment_of("none", (), (), tmp_path, run).bin == Path(sys.prefix) / "bin"


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(EnvironmentFailedError, match="is not installed"):
        run_command("no-such-command")
    with pytest.raises(EnvironmentFailedError, match="no such thing"):
        run_command(sys.executable, "-c", "raise SystemExit('no such thing')")


def test_useful_bytes_are_those_of_the_model(tmp_path: Path) -> None:
    dense = write_checkpoint("dense", tmp_path)
    per_token = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, elements, bytes
    assert useful_bytes(dense, 1000) == 768 * per_token
    gemma = write_checkpoint("gemma3", tmp_path)
    full, window = 3 * 512, 6 * 512 * 64
    assert useful_bytes(gemma, 1000) == pytest.approx(768 * full + window, rel=0.1)


def test_a_row_that_was_kept_is_the_same_row() -> None:
    kept = row("heterocache", faults={"other-weights": Outcome.NOTHING_KEPT}, stages=["restart"])
    assert Row.from_plain(json.loads(json.dumps(asdict(kept)))) == kept


def test_the_newest_rows_of_a_file_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = row("mooncake", "dense-bench", None, error="restart: it was stopped here")
    rows = [stopped, row("heterocache", "dense-bench"), row("mooncake", "dense-bench", 0.04)]
    rows.append(row("heterocache", "gemma3", 0.0275, useful_bytes=12_000_000))
    kept = tmp_path / "rows"
    kept.write_text("".join(json.dumps(asdict(x)) + "\n" for x in rows))
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "picture", lambda rows: tmp_path / "picture.png")
    monkeypatch.setattr(sys, "argv", ["side_by_side", "--report", str(kept), "--json"])
    command.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["added_over_best_rival"] == 0.5
    (written,) = (tmp_path / "results").glob("*.txt")
    lines = [line.split() for line in written.read_text().splitlines()]
    assert ["restore_fixed_ms", "2.5", "<=", "1.5", "missed"] in lines
    assert not any("stopped" in line for line in lines)


def whole_row(contestant: str, model: str = "dense-bench", **fields: Any) -> Row:
    """Return a row of a whole run."""
    case = command.CASES[model]
    stages = command._stages(case, command._STAGES, is_first=model == "dense-bench")
    given = {"rounds": case.rounds, "prompt_tokens": case.tokens, "stages": stages}
    return row(contestant, model, **(given | fields))


def test_a_report_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [whole_row(name, model) for name in CONTESTANTS for model in command.CASES]
    rows = [x for x in rows if (x.contestant, x.model) != ("nixl", "gptoss")]
    rows.append(whole_row("mooncake", rounds=3, prompt_tokens=4050))
    rows.append(whole_row("lmcache", "gemma3", stages=["streams"]))
    kept = tmp_path / "rows"
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "picture", lambda rows: tmp_path / "picture.png")
    monkeypatch.setattr(sys, "argv", ["side_by_side", "--report", str(kept)])
    kept.write_text("".join(json.dumps(asdict(x)) + "\n" for x in rows))
    command.main()
    _, _, missing = capsys.readouterr().out.partition("missing")
    lines = [" ".join(line.split()) for line in missing.split("\n\n")[0].splitlines()[2:]]
    assert lines == [
        "mooncake dense-bench 8100 tokens, not 4050; 5 rounds, not 3",
        "lmcache gemma3 restart",
        "nixl gptoss all",
    ]


def test_a_row_is_resumed_only_if_it_has_all_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        whole_row("heterocache"),
        whole_row("example", rounds=3),
        whole_row("lmcache", prompt_tokens=4050),
        whole_row("mooncake", stages=["streams", "restart"]),
        row("nixl", "dense-bench"),  # of an older version, which did not note it
        whole_row("pegaflow", error="rounds: no"),
    ]
    kept, measured = tmp_path / "rows", []

    def measure_one(contestant: Contestant, case: Case, *_: object) -> Row:
        measured.append(contestant.name)
        return whole_row(contestant.name, case.model)

    kept.write_text("".join(json.dumps(asdict(x)) + "\n" for x in rows))
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "stop_servers_on_sigterm", lambda: None)
    monkeypatch.setattr(command, "measure", measure_one)
    names = [x.contestant for x in rows]
    given = ["side_by_side", *names, "--models", "dense-bench", "--resume", str(kept)]
    monkeypatch.setattr(sys, "argv", [*given, "--stages", "restart"])
    command.main()
    assert measured == ["example", "lmcache", "nixl", "pegaflow"], "a row may have more stages"
    monkeypatch.setattr(sys, "argv", given)
    command.main()
    assert measured[4:] == ["mooncake"]


def test_stages_of_a_model_are_in_their_order() -> None:
    case = command.CASES["gemma3"]
    asked = ["kill9", "restart", "streams"]
    assert command._stages(case, asked, is_first=True) == ["streams", "restart", "kill9"]
    assert command._stages(case, asked, is_first=False) == ["streams", "restart"]
    assert command._stages(command._quick(case), asked, is_first=False) == ["restart"]


def test_no_windows_are_asked_for_of_a_connector_that_has_none(tmp_path: Path) -> None:
    """VLLM refuses it where all attention is full, as it is with ExampleConnector."""
    place = Place(tmp_path, Environment(tmp_path), [1, 2, 3, 4])
    example = CONTESTANTS["example"]
    server = Server(
        tmp_path / "gemma3", tmp_path / "log", example.transfer(place), example.engine_args
    )
    line = server.command()
    assert line[line.index("--prefix-cache-retention-interval") + 1] == "0"


def test_a_run_without_all_stages_writes_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "picture", lambda rows: tmp_path / "picture.png")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "stop_servers_on_sigterm", lambda: None)
    monkeypatch.setattr(command, "measure", lambda contestant, case, *_: row("heterocache"))
    monkeypatch.setattr(sys, "argv", ["side_by_side", "--stages", "streams", "restart"])
    command.main()
    assert not (tmp_path / "results").exists()
    monkeypatch.setattr(sys, "argv", ["side_by_side"])
    command.main()
    assert len([*(tmp_path / "results").iterdir()]) == 2


def test_a_reference_that_did_not_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlucky:
        made: ClassVar[list[Unlucky]] = []

        def __init__(self, *_: object) -> None:
            self.server, self.killed = self, 0
            self.made.append(self)

        def start(self) -> None:
            if len(self.made) == 1:
                raise RuntimeError("no /health")

        def kill(self) -> None:
            self.killed += 1

    monkeypatch.setattr(work, "Reference", Unlucky)
    contestant = CONTESTANTS["heterocache"]
    with References(command.CASES["dense-bench"], tmp_path) as references:
        with pytest.raises(RuntimeError, match="no /health"):
            references.of(contestant)
        second: Any = references.of(contestant)
        assert references.of(contestant) is second
    assert [x.killed for x in Unlucky.made] == [1, 1]
    assert Unlucky.made[1:] == [second]


def test_an_answer_is_judged_by_what_the_comparison_can_see() -> None:
    assert replace(row("x"), distances={"memory": 0.19}).wrong == ()
    assert replace(row("x"), distances={"memory": 0.21}).wrong == ("memory",)


class Strangers(Arena):
    """Two engines whose first handshakes time out. No process is started."""

    def __init__(self, failures: int) -> None:
        self.server = self  # type: ignore[assignment]
        self.attempts = self.resets = 0
        self._failures = failures

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def restored(self, prompt: Sequence[int], **request: Any) -> Reply:
        self.attempts += 1
        if self.attempts <= self._failures:
            raise TimeoutError("no handshake")
        return Reply([1], [], 0.1, len(prompt))


def test_engines_are_introduced_until_a_restore_succeeds() -> None:
    engines = Strangers(failures=2)
    engines._introduce()
    assert engines.attempts == engines.resets == 3


def test_engines_that_never_meet_end_in_their_own_error() -> None:
    engines = Strangers(failures=100)
    with pytest.raises(TimeoutError, match="no handshake"):
        engines._introduce()
    assert engines.attempts == 5


def test_tokens_from_a_prefiller_are_those_of_all_series() -> None:
    class Counted:
        def series(self, name: str) -> list[tuple[dict[str, str], float]]:
            assert name == "vllm:external_prefix_cache_hits_total"
            return [({"engine": "0"}, 512.0), ({"engine": "1"}, 256.0)]

    engines = Strangers(failures=0)
    engines.server = Counted()  # type: ignore[assignment]
    assert engines._received_tokens() == 768


def test_only_the_memory_of_processes_that_have_ended_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"lmcache_kv_{ended.pid}_0", f"lmcache_kv_{os.getpid()}_0", "lmcache_kv_x_0", "other"]
    for name in names:
        (tmp_path / name).touch()
    remove_left_memory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
