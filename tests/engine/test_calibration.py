"""`heterocache calibrate` on a real engine leaves a profile with all that was measured.

An engine of the same model accepts it whatever its own limits are, and so does `explain`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import engine_arguments, engine_environment
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.profile import CostProfile
from hetero_connector.tools import cli
from tests.engine.harness import engine, generate, prompt_tokens, scheduler_side

ROOT = Path(__file__).parents[2]


def calibrated(model: Path, out: Path, **arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetero_connector.tools.cli", "calibrate", str(model)]
    command += ["--out", str(out), "--engine-args", json.dumps(arguments)]
    serving = {
        "chunk_tokens": 64,
        "ssd_dir": str(out.parent / "served"),
        "ssd_gib": 1,
        "directory": "redis://127.0.0.1:1",
        "lease_s": 5,
        "planner_profile": str(out.parent / "none.json"),
    }
    command += ["--connector-args", json.dumps(serving)]
    return subprocess.run(
        command, env=engine_environment(), cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a profile of prompts longer than a step, with up to 16 requests that decode."""
    directory = tmp_path_factory.mktemp("calibration")
    sizes = {"max_model_len": 1024, "max_num_seqs": 24, "max_num_batched_tokens": 256}
    arguments = engine_arguments("dense") | sizes
    out = directory / "profile.json"
    done = calibrated(write_checkpoint("dense", directory), out, **arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.engine
def test_calibration_leaves_a_serving_engines_ssd_and_fleet_alone(out: Path) -> None:
    """The given SSD, fleet and profile do not exist, so using any of them would fail."""
    assert out.exists()
    assert not (out.parent / "served").exists()


@pytest.mark.engine
def test_a_profile_has_the_cost_of_prefills_for_decodes(out: Path) -> None:
    profile = CostProfile.read(out)
    assert profile.compute_error is not None
    assert Tier.DRAM in profile.load
    assert profile.interference is not None
    assert profile.interference_error is not None
    assert profile.interference_error.samples >= 50
    assert profile.overhead is not None
    assert 0.0 < profile.overhead.delay_s(64) < 1.0, "seconds of the front end"
    assert profile.overhead_error is not None
    assert profile.overhead_error.samples > 20
    # 256 tokens of a prompt hold up a decode for longer than one more decode would.
    assert profile.interference.delay_s(256, 256 * 128, 1) > profile.interference.decode_s


@pytest.mark.engine
def test_an_engine_of_the_model_starts_from_it_and_its_store_is_explained_by_it(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.1}
    extra |= {"planner": "cost", "planner_profile": str(out)}
    prompt = prompt_tokens(300)
    with engine("dense", extra, max_num_batched_tokens=512) as llm:
        learned = scheduler_side(llm).costs.compute.coefficients
        assert learned == pytest.approx(CostProfile.read(out).compute)
        generate(llm, prompt)
    (tmp_path / "prompt.json").write_text(json.dumps(prompt))
    command = ["explain", str(tmp_path / "ssd"), str(tmp_path / "prompt.json"), "--json"]
    capsys.readouterr()  # what the engine printed
    assert cli.main([*command, "--profile", str(out)]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert len(explained["candidates"]) > 1
    assert explained["assumed"] == {
        "planner": "cost",
        "step_tokens": 512,
        "layerwise": True,
        "load_deadline_s": 10.0,
        "settings_from": "recorded by its last engine",
        "costs_from": str(out),
    }


@pytest.mark.engine
def test_a_path_without_a_model_is_one_clear_error(tmp_path: Path) -> None:
    done = calibrated(tmp_path, tmp_path / "profile.json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"heterocache: vLLM starts no engine for {tmp_path}: " in done.stderr.splitlines()[-1]
