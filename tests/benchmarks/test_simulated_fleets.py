"""The campaign on a small study: policies are compared, and a run is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import simulated_fleets
from benchmarks.simulated_fleets import (
    BY_NAME,
    evictions,
    fleet_for,
    main,
    rank_correlation,
    rankings,
    report,
    result_of,
    with_costs,
)
from benchmarks.simulated_studies import COSTS, DENSE, STUDIES, Setting, Study, StudyPoint
from hetero_connector.artifacts.record import Tier
from ownership.simulator.sweeps.report import Row
from tests.ownership.simulator.small_fleets import agents

STUDY = Study(
    "small", "mooncake", DENSE, [Setting(2, 5.0, 60)], ("ownerserve", "colocated", "oracle")
)


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of chat, and a directory for results; the only study is a small one."""
    lines = [
        {"timestamp": 100 * i, "input_length": 3_000, "output_length": 20,
         "hash_ids": [i % 3, *range(100 * i, 100 * i + 5)]}
        for i in range(60)
    ]  # fmt: skip
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(simulated_fleets, "RESULTS", tmp_path)
    monkeypatch.setattr(simulated_fleets, "BY_NAME", {"small": STUDY})
    return path


def test_policies_are_compared_with_the_oracle_and_the_first(
    mooncake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--mooncake", str(mooncake)])
    cells = {
        line.split(" | ")[0]: line.strip(" |").split(" | ")[1:]
        for line in capsys.readouterr().out.splitlines()
    }
    ours, others, bound = (float(x) for x in cells["| task waiting over the bound"])
    assert min(ours, others) >= 1.0
    assert bound == 1.0
    ratio = cells["| task waiting over ownerserve"]
    assert [x == "-" for x in ratio] == [True, False, True]
    assert float(ratio[1].strip("*").split("*")[0].split(" ")[0]) == pytest.approx(
        others / ours, abs=0.002
    )


def test_recorded_arrivals_and_a_population_are_simulated(
    mooncake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [Setting(2, speed=2.0, begin_s=1.0), Setting(2, population=2, end_s=20.0)]
    study = Study("loads", "mooncake", DENSE, settings, ("dynamo", "static_pd"), seeds=(0,))
    monkeypatch.setattr(simulated_fleets, "BY_NAME", {"loads": study})
    main(["--mooncake", str(mooncake), "--quick"])
    table = capsys.readouterr().out
    assert "static_pd+prefillers=1" in table
    assert "Sessions start 2 times as fast as recorded." in table
    assert "A session that ends is followed by another one." in table


def test_an_interrupted_campaign_goes_on(mooncake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["--mooncake", str(mooncake)])
    (results,) = mooncake.parent.glob("simulated_fleets-*.jsonl")
    whole, table = results.read_text(), results.with_suffix(".md").read_text()
    results.write_text("".join(whole.splitlines(keepends=True)[:-1]) + '{"study": "cut off')
    simulated, ran = simulated_fleets.result_of, []

    def counted(*arguments: object) -> dict[str, object]:
        ran.append(arguments)
        return simulated(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(simulated_fleets, "result_of", counted)
    main(["--mooncake", str(mooncake), "--from", str(results)])
    assert len(ran) == 1
    assert results.read_text() == whole
    assert results.with_suffix(".md").read_text() == table


def test_a_campaign_without_a_trace_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--studies", "agents-rate"])
    assert "give a trace, and studies out of agents-rate" in capsys.readouterr().err


def test_evictions_are_reported_as_a_share_of_the_optimum() -> None:
    rows = [line.split(" | ") for line in evictions({"agents": agents(8)}, 1.0) if "agents" in line]
    assert len(rows) == 3
    assert all(0.0 <= float(cell.strip(" |")) <= 1.0 for row in rows for cell in row[3:])


def test_every_study_has_points_and_a_reference() -> None:
    assert len(BY_NAME) == len(STUDIES)
    for study in STUDIES:
        points = list(study.points(0.1))
        assert len({point.key for point in points}) == len(points)
        assert {point.seed for point in points} == set(study.seeds)
        for point in points:
            assert point.policy != "oracle" or (point.population, point.begin_s) == (None, None)


def test_the_report_says_how_it_was_made() -> None:
    point = {"study": "small", "policy": "colocated", "seed": 0, "workers": 2}
    result = {"point": point, "model": DENSE, "inputs": "abc", "caveats": ["Invented."],
              "figures": {"refused": 0, "ttft_mean_s": 0.5}}  # fmt: skip
    text = report([result], "python -m benchmarks.simulated_fleets --studies small")
    assert "--studies small`" in text
    assert "- Invented." in text
    assert "| TTFT mean, s | 0.500 |" in text


def test_the_most_sessions_of_a_gpu_are_searched_for() -> None:
    study = Study("capacity", "agents", DENSE, (), first_population=32)
    point = StudyPoint("colocated", workers=1, begin_s=15.0, end_s=30.0, study="capacity")
    found = result_of(study, agents(12), point)["figures"]
    assert 0 < found["sessions_per_gpu_99"] <= found["sessions_per_gpu_90"] < 1_024
    late = result_of(study, agents(12), replace(point, costs="weights_s=8"))["figures"]
    assert late["sessions_per_gpu_90"] < found["sessions_per_gpu_90"]


@pytest.mark.parametrize("name", COSTS)
def test_each_coefficient_can_be_changed(name: str) -> None:
    fleet = fleet_for(STUDY, 1)
    same, other = (with_costs(fleet, f"{name}={x}") for x in (1.0, 1.5))
    tiers = [
        [costs.load.rates(tier).ahead_s_per_byte for tier in Tier]
        for costs in (x.workers[0].costs for x in (fleet, same, other))
    ]
    assert (same.workers[0].roofline, tiers[1]) == (fleet.workers[0].roofline, tiers[0])
    assert (other.workers[0].roofline, tiers[2]) != (fleet.workers[0].roofline, tiers[0])


def test_the_order_of_policies_is_compared_under_other_costs() -> None:
    def row(policy: str, wait_s: float, **setting: str) -> Row:
        return Row(policy, tuple(setting.items()), (0,), {"task_wait_mean_s": wait_s}, {}, None)

    base = [row(name, wait_s) for name, wait_s in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    same = [row(x.policy, 2 * x.figures["task_wait_mean_s"], costs="token_s=1.5") for x in base]
    other = [row(x.policy, -x.figures["task_wait_mean_s"], costs="rdma=0.5") for x in base]
    lines = rankings([*base, *same, *other])
    assert "| token_s=1.5 | 1.000 | a |" in lines
    assert "| rdma=0.5 | -1.000 | c |" in lines
    assert rankings(base) == []
    assert rank_correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)
