"""The script on a small study: every policy is compared with the oracle, and a run is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import simulated_fleets
from benchmarks.simulated_fleets import evictions, read_results, simulated, study_as_markdown
from benchmarks.simulated_studies import DENSE, STUDIES, Setting, Study
from tests.ownership.simulator.small_fleets import agents

STUDY = Study("small", "agents", DENSE, [Setting(2, 0.5, 4)], ("ownerserve", "oracle"))


def test_policies_are_compared_with_the_oracle() -> None:
    trace = replace(agents(4), starts_recorded=False)
    found = list(simulated([STUDY], {"agents": trace}, 1.0, {}))
    assert len(found) == 2 * 3
    lines = study_as_markdown(STUDY, found)
    cells = {line.split(" | ")[0]: line.split(" | ") for line in lines if " | " in line}
    assert float(cells["| ownerserve"][4].partition(" ")[0]) >= 1.0
    assert cells["| oracle"][4] == "1.000 ± 0.000"


def test_known_results_are_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = {"agents": replace(agents(4), starts_recorded=False)}
    found = list(simulated([STUDY], traces, 1.0, {}))
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(r)}\n" for r in found) + '{"study": "cut off')
    monkeypatch.delattr(simulated_fleets, "result_of")
    assert list(simulated([STUDY], traces, 1.0, read_results(path))) == found


def test_evictions_are_reported_as_a_share_of_the_optimum() -> None:
    rows = [line.split(" | ") for line in evictions({"agents": agents(8)}, 1.0) if "agents" in line]
    assert len(rows) == 3
    assert all(0.0 <= float(cell.strip(" |")) <= 1.0 for row in rows for cell in row[3:])


def test_every_study_has_points_and_an_oracle() -> None:
    assert len({study.name for study in STUDIES}) == len(STUDIES)
    for study in STUDIES:
        points = list(study.points(0.1))
        assert {point.seed for point in points} == {0, 1, 2}
        assert "oracle" in {point.policy for point in points}
