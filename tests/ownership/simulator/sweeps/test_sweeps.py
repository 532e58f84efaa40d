"""`heterocache simulate`, from its arguments to its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

from hetero_connector.errors import SimulationError
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.tools.cli import main
from hetero_connector.tools.command import EXIT_OK, EXIT_UNUSABLE
from hetero_connector.tools.simulation_commands import simulate
from ownership.simulator.sweeps import command, running
from ownership.simulator.sweeps.report import rows
from ownership.simulator.sweeps.running import (
    SWEPT,
    Inputs,
    Point,
    ResultFile,
    parse_sweep,
    points,
)
from tests.chrome_trace import read_trace

FLEET = "model: llama-3.1-8b\nworkers: [{hardware: h200, count: 2, dram_gib: 8, ssd_gib: 32}]\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with a small trace of chat and one of agents, and a fleet."""
    lines = [
        {"timestamp": 400 * i, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, i + 9]}
        for i in range(12)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    turns = [
        {"t": 9.0 * i, "type": "s", "in": 640 * (i + 1), "out": 9, "runs": [[0, 10 * (i + 1)]],
         "think_time": 3.0, "input_types": ["tool_result"]}
        for i in range(4)
    ]  # fmt: skip
    session = {"id": "a", "block_size": 64, "system_tokens": 256, "requests": turns}
    (tmp_path / "agents.jsonl").write_text("\n".join([json.dumps(session)] * 3))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path


def simulated(files: Path, *more: str, trace: str = "chat.jsonl", out: str = "out") -> int:
    given = ["--trace", str(files / trace), "--fleet", str(files / "fleet.yaml")]
    return main(["simulate", *given, "--out", str(files / out), *more])


def lines(files: Path, out: str = "out") -> list[dict[str, object]]:
    """Results, but for what is measured."""
    found = [json.loads(line) for line in (files / out / "results.jsonl").read_text().splitlines()]
    for line in found:
        del line["overhead"]
    return found


def test_a_trace_a_fleet_and_two_policies(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(files, "--policies", "ownerserve,colocated+tiers=gpu") == EXIT_OK
    printed = capsys.readouterr().out
    assert "| figure | ownerserve | colocated+tiers=gpu |" in printed
    assert "Sessions are not recorded" in printed
    assert printed.strip() == (files / "out" / "report.md").read_text().strip()
    found = lines(files)
    assert [x["point"]["policy"] for x in found] == ["ownerserve", "colocated+tiers=gpu"]  # type: ignore[index]
    assert all(x["figures"]["requests"] == 12 for x in found)  # type: ignore[index]


def test_the_same_command_gives_the_same_numbers_in_any_number_of_processes(files: Path) -> None:
    given = ["--policies", "ownerserve,dynamo_kv", "--sweep", "rate=0.5,2", "--sweep", "seed=0,1"]
    for out, processes in (("one", "1"), ("two", "2")):
        code = simulated(files, *given, "--processes", processes, trace="agents.jsonl", out=out)
        assert code == EXIT_OK
    assert lines(files, "one") == lines(files, "two")
    assert len(lines(files, "one")) == 8
    table = (files / "one" / "report.md").read_text()
    assert "## rate 0.5" in table
    tables = [(files / out / "report.md").read_text().splitlines() for out in ("one", "two")]
    repeated = [[line for line in table if "measured" not in line] for table in tables]
    assert repeated[0] == repeated[1]


def test_finished_points_are_not_simulated_again(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(files, "--policies", "colocated", "--sweep", "rate=1,2")
    results = files / "out" / "results.jsonl"
    before = results.read_text()
    results.write_text(before + '{"inputs": "torn')  # as a kill leaves it
    ran: list[Point] = []
    original = command.simulate_point

    def counted(inputs: Inputs, point: Point) -> dict[str, object]:
        ran.append(point)
        return original(inputs, point)

    monkeypatch.setattr(command, "simulate_point", counted)
    assert simulated(files, "--policies", "colocated", "--sweep", "rate=1,2,4") == EXIT_OK
    assert [point.rate for point in ran] == [4.0]
    assert results.read_text().startswith(before)
    assert len(lines(files)) == 3


def test_results_of_other_inputs_are_not_mixed(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(files, "--policies", "colocated")
    (files / "fleet.yaml").write_text(FLEET.replace("h200", "h20"))
    assert simulated(files, "--policies", "colocated") == EXIT_UNUSABLE
    assert "results.jsonl:1: of another trace, fleet or version" in capsys.readouterr().err
    (files / "out" / "results.jsonl").write_text("{}\n")
    assert simulated(files, "--policies", "colocated") == EXIT_UNUSABLE
    assert "results.jsonl:1: no line of results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--policies", "best"], "no scheduling policy 'best'"),
        (["--sweep", "size=1"], "--sweep: no 'size'; there are workers, rate"),
        (["--sweep", "seed=0,1"], "--sweep: seed: 0 and 1 send the same sessions"),
        (["--sweep", "seed=0,1", "--sweep", "sessions=5,12"], "seed: 0 and 1 send the same"),
        (["--sweep", "seed=0,1,2", "--sweep", "sessions=11"], "send the same sessions at the same"),
        (["--sweep", "sessions=13"], "sessions: the trace has 12, not 13: give fewer"),
        (["--sweep", "sessions=7", "--sweep", "half=first"], "sessions: the trace has 6, not 7"),
        (["--sweep", "speed=0"], "--sweep: speed: '0' is no number"),
        (["--sweep", "population=0"], "--sweep: population: '0' is no whole number"),
        (["--sweep", "population=3"], "population: sessions follow each other without end"),
        (["--sweep", "rate=0"], "--sweep: rate: '0' is no number"),
        (["--sweep", "sharing=2"], "--sweep: sharing: '2' is no number"),
        (["--sweep", "seed=0.5"], "--sweep: seed: '0.5' is no whole number"),
        (["--sweep", "rate=1", "--sweep", "rate=2"], "--sweep: rate: given twice"),
        (["--sweep", "half=third"], "half: 'third' is not first, second or first,second"),
        (["--sweep", "end_s=0"], "--sweep: end_s: '0' is no number"),
        (["--sweep", "sharing=0.5"], "sessions are drawn: say when they start, with --sweep rate="),
        (["--sweep", "seed=0,1,0"], "--sweep: seed: a value is given twice: 0,1,0"),
        (["--sweep", "rate=1,1.0"], "--sweep: rate: a value is given twice"),
        (["--sweep", "workers=1e6"], "--sweep: workers: '1e6' is no whole number"),
        (["--policies", ","], "--policies: names none"),
        (["--policies", "colocated,colocated"], "--policies: one is given twice"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(
    files: Path, more: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated(files, *more) == EXIT_UNUSABLE
    assert problem in capsys.readouterr().err
    assert not (files / "out").exists()


def test_chunks_that_do_not_fit_the_trace_are_named_before_anything_runs(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "fleet.yaml").write_text(f"chunk_tokens: 256\n{FLEET}")
    assert simulated(files) == EXIT_UNUSABLE
    assert "chunk_tokens: 256 is no multiple of the 512-token" in capsys.readouterr().err
    assert not (files / "out").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_damaged_trace_is_named(
    files: Path, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (files / "chat.jsonl").read_text()
    (files / "chat.jsonl").write_text(text[:-30])
    more = ["--policies", "colocated,dynamo_kv", "--processes", str(processes)]
    assert simulated(files, *more) == EXIT_UNUSABLE
    assert "chat.jsonl:12: not JSON" in capsys.readouterr().err


def test_the_help_names_everything_that_can_be_swept() -> None:
    (option,) = (x for x in get_type_hints(simulate, include_extras=True)["sweep"].__metadata__)
    *names, last = SWEPT
    assert option.help == f"Values of {', '.join(names)} or {last}. May be repeated."


def test_results_of_other_code_or_profiles_are_not_mixed(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that is not read makes no difference, wherever its name stands."""
    subject = ProfileSubject("Tiny", "c0ffee", "bfloat16", "", "auto", 1, "a machine")
    (files / "deep").mkdir()
    for name, step_s in (("used", 1.0), ("other", 2.0)):
        profile = CostProfile("tiny", subject, ComputeCoefficients(step_s, 2.0, 3.0))
        profile.write(files / "deep" / f"{name}.json")
    (files / "fleet.yaml").write_text(
        "model: llama-3.1-8b\nworkers: [{profile: deep/used.json, hbm_gib: 1}] # not other.json\n"
    )
    inputs = Inputs(files / "chat.jsonl", None, files / "fleet.yaml")
    digests = [inputs.digest(), inputs.digest()]
    (files / "deep" / "other.json").write_text("{}")
    digests.append(inputs.digest())
    assert len(set(digests)) == 1
    changed = CostProfile("tiny", subject, ComputeCoefficients(9.0, 2.0, 3.0))
    changed.write(files / "deep" / "used.json")
    digests.append(inputs.digest())
    package = ModuleType("code")
    package.__path__ = [str(files / "code")]
    (files / "code" / "inner").mkdir(parents=True)
    monkeypatch.setattr(running, "_CODE", (*running._CODE, package))
    for text in ("a = 1", "a = 2"):
        (files / "code" / "inner" / "module.py").write_text(text)
        digests.append(inputs.digest())
    assert len(set(digests)) == 4


def test_points_are_all_combinations() -> None:
    name, values = parse_sweep("workers=1,2")
    found = list(points(["colocated", "ownerserve"], {name: values, "seed": [7]}))
    assert [(p.policy, p.workers, p.seed) for p in found] == [
        ("colocated", 1, 7), ("ownerserve", 1, 7), ("colocated", 2, 7), ("ownerserve", 2, 7),
    ]  # fmt: skip
    assert len({p.key for p in found}) == 4


def test_figures_are_means_over_seeds() -> None:
    results = [
        {"point": {"policy": "a", "seed": seed, "rate": 1.0}, "figures": {"x": seed},
         "overhead": {"decision_p50_us": 5.0}}
        for seed in (1, 3)
    ]  # fmt: skip
    (row,) = rows(results)
    assert (row.seeds, row.setting, row.figures["x"]) == ((1, 3), (("rate", 1.0),), 2.0)


def test_policies_are_compared_with_the_first_on_the_same_sessions(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = [
        {"timestamp": 50 * i, "input_length": 4_000, "output_length": 40,
         "hash_ids": [i % 5, *range(100 * i, 100 * i + 7)]}
        for i in range(90)
    ]  # fmt: skip
    # Half of the model's layers have windows: with pages of all tokens this one fits no worker.
    text.append({"timestamp": 5_000, "input_length": 100_000, "output_length": 40,
                 "hash_ids": list(range(10**6, 10**6 + 196))})  # fmt: skip
    (files / "chat.jsonl").write_text("\n".join(map(json.dumps, text)))
    kind = "{hardware: h200, count: 2, hbm_gib: 5, dram_gib: 8}"
    (files / "fleet.yaml").write_text(f"model: gpt-oss-120b\nworkers: [{kind}]\n")
    policies = "colocated,ownerserve,colocated+state=paged"
    assert simulated(files, "--policies", policies) == EXIT_OK
    table = capsys.readouterr().out.splitlines()
    (cells,) = [line.split(" | ") for line in table if line.startswith("| task waiting over")]
    assert cells[1] == "-"  # the reference itself
    assert re.fullmatch(r"\**[01]\.\d+\**  ?\[\d\.\d+, \d\.\d+\]", cells[2].replace("] ", "]"))
    assert cells[3] == "refused others |"


def test_the_second_half_and_a_window_are_simulated(files: Path) -> None:
    for out, more in (("whole", []), ("half", ["half=second"]), ("late", ["begin_s=2"])):
        sweeps = [word for text in more for word in ("--sweep", text)]
        assert simulated(files, "--policies", "colocated", *sweeps, out=out) == EXIT_OK
    requests = [lines(files, out)[0]["figures"]["requests"] for out in ("whole", "half", "late")]  # type: ignore[index]
    assert requests == [12, 6, 7]


def test_a_file_of_results_keeps_what_others_asked_for(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "results.jsonl", "abc")
    for policy in "bacfed":
        file.add(Point(policy), {"figures": {}})
    (found,) = file.ordered([Point("a")])
    assert found["point"]["policy"] == "a"
    kept = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert "".join(line["point"]["policy"] for line in kept) == "abcfed"
    again = ResultFile(tmp_path / "results.jsonl", "abc")
    assert Point("b") in again
    with pytest.raises(SimulationError, match="another trace"):
        ResultFile(tmp_path / "results.jsonl", "xyz")


def test_the_only_simulation_can_be_recorded(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = files / "timeline.json"
    for _ in range(2):  # the second time there is a result already
        timeline.unlink(missing_ok=True)
        more = ("--policies", "colocated", "--timeline", str(timeline))
        assert simulated(files, *more) == EXIT_OK
        assert len(lines(files)) == 1
        assert {x.process for x in read_trace(timeline)} == {"worker-0"}
    capsys.readouterr()
    more = ("--policies", "colocated,ownerserve", "--timeline", str(timeline))
    assert simulated(files, *more) == EXIT_UNUSABLE
    assert "one policy and no sweep" in capsys.readouterr().err
