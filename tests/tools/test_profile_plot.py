"""A calibration as a picture, where there is matplotlib to draw it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from matplotlib import image

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine import calibration
from hetero_connector.engine.calibration import Calibration, Sample
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.profile import CostProfile, FitError, ProfileSubject
from hetero_connector.spec import StateType
from hetero_connector.tools import cli
from hetero_connector.tools.profile_plot import plot

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)
"""matplotlib's first two colours: prompts computed whole, and continued."""


def calibrated() -> Calibration:
    profile = CostProfile(
        "test",
        ProfileSubject("Model", "0", "bfloat16", "", "auto", 1, "some machine"),
        ComputeCoefficients(1e-3, 1e-4, 1e-9),
        FitError(100, 0.051, 0.2),
        {Tier.SSD: TierRates(1e-3, {StateType.DENSE_KV: 1e-9}, 1e-9)},
        {Tier.SSD: FitError(12, 0.034, 0.128)},
        overhead_error=FitError(40, 0.07, 0.3),
    )
    whole = [Sample(n, 0, 1e-4 * n, 1.1e-4 * n) for n in (64, 128, 256, 512)]
    return Calibration(profile, (*whole, Sample(64, 256, 0.01, 0.012)))


def test_prompts_are_drawn_by_what_they_took_and_were_predicted(tmp_path: Path) -> None:
    picture = plot(calibrated(), tmp_path / "profile.json.png")
    assert picture == tmp_path / "profile.json.png"
    pixels = (image.imread(picture)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape == (360, 450, 3)

    def span(colour: tuple[int, int, int]) -> int:
        """Pixels from the leftmost mark to the rightmost, the legend's included."""
        columns = (abs(pixels - colour).max(axis=2) < 8).any(axis=0).nonzero()[0]
        return int(columns[-1] - columns[0])

    assert span(BLUE) > 250, "from 64 to 512 tokens"
    assert 20 < span(ORANGE) < span(BLUE)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`calibrate` without an engine."""
    monkeypatch.setattr(calibration, "calibrate", lambda *_: calibrated())


@pytest.mark.usefixtures("measured")
def test_the_summary_lists_the_error_of_each_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", "model", "--out", str(tmp_path / "profile.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "time to first token: median error 7%, 95% within 30%",
        "steps: median error 5%, 95% within 20%",
        "loads from ssd: median error 3%, 95% within 13%",
    ]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_picture_that_cannot_be_drawn_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "profile.json"
    command = ["calibrate", "model", "--out", str(out), *(["--json"] if as_json else [])]
    assert cli.main(command) == 0
    error = capsys.readouterr().err
    assert error == (
        "heterocache: no plot, because matplotlib is missing: pip install 'heterocache[sim]'\n"
    )
    assert out.exists()
