"""`heterocache calibrate` on a real engine leaves a profile with all that was measured.

An engine of the same model accepts it whatever its own limits are, and so does `explain`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from heterocache_cuda import batched
from heterocache_cuda.mover import Mode

from examples.checkpoints import write_checkpoint
from examples.serving import engine_arguments, engine_environment
from hetero_connector.artifacts.record import Tier
from hetero_connector.config import KEYS, HeteroConfig
from hetero_connector.engine import calibration
from hetero_connector.engine.calibration import _Computed
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.profile import CopyEngines, CostProfile, ProfileSubject
from hetero_connector.spec import StateType
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
    assert profile.copy_engines is None, "a CPU has none"
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
    origin = CostProfile.read(out).origin
    assert len(explained["candidates"]) > 1
    assert explained["assumed"] == {
        "planner": "cost",
        "step_tokens": 512,
        "layerwise": True,
        "parking": "never",
        "load_deadline_s": 10.0,
        "settings_from": "recorded by its last engine",
        "costs_from": f"{origin}, from {out}",
        "tier": "ssd",
    }


@pytest.mark.engine
def test_a_path_without_a_model_is_one_clear_error(tmp_path: Path) -> None:
    done = calibrated(tmp_path, tmp_path / "profile.json")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"heterocache: vLLM starts no engine for {tmp_path}: " in done.stderr.splitlines()[-1]


class FakeEngine:
    """An engine that has learned something, on a CPU or on a GPU."""

    is_on_cuda = True
    subject = ProfileSubject("A", "config", "bfloat16", "", "auto", 1, "a machine")

    def __init__(self, *_: object) -> None:
        self.costs = CostModel(ComputeRegression(), LoadModel([StateType.DENSE_KV]))

    def teach(self, on_ssd: bool) -> Iterator[_Computed]:
        return (_Computed(n, 0, 1e-3, 1e-3 + 1e-5 * n) for n in (64, 128, 256))

    def teach_interference(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_on_cuda", [True, False])
def test_copy_engines_are_measured_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, is_on_cuda: bool
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as calibrating does itself
    monkeypatch.setattr(calibration, "_Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "is_on_cuda", is_on_cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    measured = []

    def measure(device: torch.device) -> dict[Mode, int]:
        measured.append(device)
        return {Mode.SAVE: 65536}

    monkeypatch.setattr(batched, "measure_copy_table", measure)
    found = calibration.calibrate("a-model", {}, None, 1.0).profile.copy_engines
    assert found == (CopyEngines(None, 65536) if is_on_cuda else None)
    assert measured == ([torch.device("cuda", 3)] if is_on_cuda else [])


def test_it_takes_the_keys_that_the_engine_will_be_served_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as calibrating does itself
    monkeypatch.setattr(FakeEngine, "is_on_cuda", False)
    taken: list[HeteroConfig] = []

    def start(model: str, arguments: object, extra: dict[str, object]) -> FakeEngine:
        taken.append(HeteroConfig.from_extra_config(extra))
        return FakeEngine()

    monkeypatch.setattr(calibration, "_Engine", start)
    served = {key.name: getattr(HeteroConfig(), key.name) for key in KEYS}
    served |= {"directory": "memory://", "worker_name": "w", "peer_host": "127.0.0.1"}
    served |= {"ssd_dir": str(tmp_path), "ssd_gib": 0.1, "ssd_write_gib_per_day": 1.0}
    served |= {"dram_gib": 0.5, "chunk_tokens": 512, "adopt_from": str(tmp_path)}
    served |= {"planner_profile": __file__, "eviction": "value", "exact_handoffs": True}
    assert HeteroConfig.from_extra_config(served).directory == "memory://"
    for ssd_dir in (None, tmp_path):
        calibration.calibrate("a-model", {}, ssd_dir, 0.25, served)
    in_dram, on_ssd = taken
    assert (in_dram.chunk_tokens, in_dram.eviction, in_dram.exact_handoffs) == (512, "value", True)
    assert (in_dram.directory, in_dram.ssd_dir, in_dram.planner_profile) == ("", None, None)
    assert on_ssd.ssd_dir is not None
    assert (on_ssd.ssd_dir.parent, on_ssd.ssd_write_gib_per_day) == (tmp_path, None)


@pytest.mark.parametrize(
    ("dram_gib", "served", "taken"), [(0.25, 0.5, 0.25), (None, 0.5, 0.5), (None, None, 1.0)]
)
def test_the_dram_tier_is_the_connector_s_unless_another_size_is_given(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dram_gib: float | None,
    served: float | None,
    taken: float,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as calibrating does itself
    monkeypatch.setattr(FakeEngine, "is_on_cuda", False)
    start = Mock(side_effect=FakeEngine)
    monkeypatch.setattr(calibration, "_Engine", start)
    keys = {"planner": "never_load"} | ({"dram_gib": served} if served else {})
    calibration.calibrate("a-model", {}, tmp_path, dram_gib, keys)
    extra = start.call_args.args[2]
    assert (extra["dram_gib"], extra["ssd_gib"]) == (taken, dram_gib or 1.0)
    assert extra["planner"] == "always_load"


def test_a_gpu_that_cannot_be_measured_does_not_cost_the_profile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    error = RuntimeError("out of memory")
    monkeypatch.setattr(batched, "measure_copy_table", Mock(side_effect=error))
    assert calibration.measured_copy_engines() is None
    assert "out of memory" in caplog.text
