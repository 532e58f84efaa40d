from __future__ import annotations

from pathlib import Path

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import SimulationError
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec.presets import PRESETS
from ownership.scheduling.fleet import Link, Role
from ownership.simulator.fleet_file import read_fleet
from ownership.simulator.machine.costs import COMPUTE, HARDWARE
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.small_fleets import prompt, trace_of

GOOD = """
model: llama-3.1-8b
workers:
  - {hardware: h200, name: p, role: prefill, dram_gib: 64}
  - {hardware: a100, name: d, count: 2, role: decode, dram_gib: 64, ssd_gib: 100, hbm_gib: 20}
links:
  - {from: p, to: d-0, gbit_per_s: 80, latency_us: 5}
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "fleet.yaml"
    path.write_text(text)
    return path


def test_a_fleet(tmp_path: Path) -> None:
    fleet = read_fleet(written(tmp_path, GOOD))
    assert [worker.name for worker in fleet.workers] == ["p", "d-0", "d-1"]
    assert [worker.role for worker in fleet.workers] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    first, second, _ = fleet.workers
    # 141 GB, of which vLLM takes nine tenths, less 16 GB of weights.
    assert first.capacity.hbm == pytest.approx(0.9 * 141e9 - 16e9)
    assert (second.capacity.hbm, second.capacity.ssd) == (20 << 30, 100 << 30)
    assert fleet.links.keys() == {("p", "d-0")}
    assert fleet.links["p", "d-0"] == pytest.approx(Link(5e-6, 1e-10))
    # 2 operations for each of 8e9 parameters, at half of the peak; the line is fitted to steps.
    assert first.roofline is not None
    assert first.roofline.token_s == pytest.approx(16e9 / (0.5 * 989e12))
    token_s = first.costs.compute.coefficients.token_s
    assert token_s == pytest.approx(first.roofline.token_s, rel=0.05)
    assert first.costs.load.rates(Tier.DRAM).ahead_s_per_byte == pytest.approx(1 / (0.8 * 64e9))


def write_profile(folder: Path) -> None:
    """Write a profile that has measured computing and loads from DRAM."""
    types = PRESETS["llama-3.1-8b"]().state_types
    rates = TierRates(0.5, dict.fromkeys(types, 1e-9), 1e-9)
    subject = ProfileSubject("Tiny", "c0ffee", "bfloat16", "", "auto", 1, "a machine")
    compute = ComputeCoefficients(1.0, 2.0, 3.0)
    profile = CostProfile("measured", subject, compute, load={Tier.DRAM: rates})
    profile.write(folder / "profile.json")


def test_a_profile_is_read_from_the_folder_of_the_fleet(tmp_path: Path) -> None:
    write_profile(tmp_path)
    text = "model: llama-3.1-8b\nworkers: [{profile: profile.json, hbm_gib: 1}]"
    (worker,) = read_fleet(written(tmp_path, text)).workers
    assert worker.costs.compute.coefficients == pytest.approx((1.0, 2.0, 3.0))
    assert worker.costs.load.rates(Tier.DRAM).latency_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "policy", "guessed"),
    [
        ("dram_gib: 4", "colocated", ""),
        ("count: 2", "colocated", ""),
        ("dram_gib: 4, ssd_gib: 9", "colocated", "ssd"),
        ("dram_gib: 4, ssd_gib: 9, count: 2", "colocated", "ssd and peer"),
        ("dram_gib: 4, ssd_gib: 9, count: 2", "colocated+tiers=gpu", ""),
    ],
)
def test_a_tier_that_is_used_and_not_measured_is_a_caveat(
    tmp_path: Path, kind: str, policy: str, guessed: str
) -> None:
    write_profile(tmp_path)
    workers = f"workers: [{{profile: profile.json, hbm_gib: 40, {kind}}}]"
    fleet = read_fleet(written(tmp_path, f"model: llama-3.1-8b\n{workers}"))
    sent = trace_of(Session("a", (prompt(0, 512),), 0.0))
    problem = f"Profiles have not measured loads from {guessed}: speeds are guesses."
    model, *found = simulate(sent, fleet, parse_policy(policy)).caveats
    assert model == "Profiles are of measured; the state that is moved is of llama-3.1-8b."
    assert found == ([problem] if guessed else [])


def test_a_profile_of_another_layout_is_refused(tmp_path: Path) -> None:
    subject = ProfileSubject("Tiny", "c0ffee", "bfloat16", "", "auto", 1, "a machine")
    profile = CostProfile("measured", subject, ComputeCoefficients(1.0, 2.0, 3.0))
    profile.write(tmp_path / "profile.json")
    text = "model: llama-3.1-8b\nworkers: [{profile: profile.json, gpus: 2, hbm_gib: 1}]"
    with pytest.raises(SimulationError, match=r"profile: was measured with .* 1, not 2 \(gpus\)"):
        read_fleet(written(tmp_path, text))


def test_a_fleet_of_another_size(tmp_path: Path) -> None:
    text = "model: llama-3.1-8b\nworkers: [{hardware: h200}, {hardware: h20, name: x}]"
    fleet = read_fleet(written(tmp_path, text))
    assert [w.name for w in fleet.of_size(3).workers] == ["worker.0", "x.1", "worker.2"]
    assert len(fleet.of_size(1).workers) == 1
    with pytest.raises(SimulationError, match="without links"):
        read_fleet(written(tmp_path, GOOD)).of_size(2)


BAD = {
    "": r"the file is empty; docs/internals/simulator.md shows one",
    "model: [": r"fleet.yaml:2: not YAML",
    "model: a\nworkers:\n  - x: [1\n": r"fleet.yaml:\d: not YAML",
    "workers: [{hardware: h200}]": r"the key 'model' is missing",
    "model: gpt-9\nworkers: [{hardware: h200}]": r"model: no preset 'gpt-9'; there are",
    "model: llama-3.1-8b\nworkers: []": r"workers: Expected `array` of length >= 1",
    "model: llama-3.1-8b\nworkers: [{hardware: h300}]": r"workers\[0\].hardware: no 'h300'; there",
    "model: llama-3.1-8b\nworkers: [{}]": r"workers\[0\]: needs either hardware or profile",
    "model: llama-3.1-8b\nworkers: [{hardware: h200, hbm_gib: 0}]": r"workers\[0\].hbm_gib: Exp",
    "model: llama-3.1-8b\nworkers: [{hardware: h200, hbm_gib: 1.0e-10}]": r"hbm_gib: less than a",
    "model: llama-3.1-8b\nworkers: [{hardware: h200, dram_gib: -1}]": r"workers\[0\].dram_gib: E",
    "model: llama-3.1-8b\nworkers: [{hardware: h200, dram_gib: .nan}]": r"workers\[0\].dram_gib",
    "model: llama-3.1-8b\nworkers: [{hardware: h200, count: 0}]": r"workers\[0\].count: Expected",
    "model: llama-3.1-8b\nworkers: [{hardware: h200, dram: 5}]": (
        r"workers\[0\]: unknown key 'dram'; did you mean 'dram_gib'"
    ),
    "model: llama-3.1-8b\nworkers: [{hardware: h200, ssd_gib: 5}]": r"dram_gib: an SSD needs DRAM",
    "model: llama-3.1-70b\nworkers: [{hardware: a100}]": r"workers\[0\].gpus: .* does not fit",
    "model: llama-3.1-8b\nworkers: [{hardware: a100}, {hardware: a100}]": r"have the same name",
    "model: llama-3.1-8b\nworkers: [{hardware: a100}, {hardware: a100, gpus: 2, name: b}]": (
        r"workers: workers of \[1, 2\] accelerators"
    ),
    "model: llama-3.1-8b\nworkers: [{profile: none.json, hbm_gib: 1}]": r"workers\[0\].profile: .*",
    "model: llama-3.1-8b\nchunk_tokens: 100\nworkers: [{hardware: a100}]": r"chunk_tokens: 100 is",
    "model: llama-3.1-8b\nstep_tokens: 64\nworkers: [{hardware: a100}]": r"step_tokens: 64 leaves",
    "model: llama-3.1-8b\nworkers: [{hardware: a100}]\nlinks: [{from: a, to: b, gbit_per_s: 1}]": (
        r"links\[0\].from: no worker 'a'"
    ),
    "model: m\nworkers: [http://a:8000]": r"workers\[0\]: this is a router's configuration, .*",
    "model: m\nworkers: [{url: http://a}]": r"workers\[0\]: this is a router's configuration",
    "model: m\nworkers: [5]": r"workers\[0\]: Expected `object`, got `int`",
    "\x00": r"not YAML",
}


@pytest.mark.parametrize("text", BAD)
def test_an_error_names_what_is_wrong(text: str, tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=BAD[text]) as raised:
        read_fleet(written(tmp_path, text))
    assert str(raised.value).startswith(str(tmp_path / "fleet.yaml"))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="No such file"):
        read_fleet(tmp_path / "none.yaml")


@pytest.mark.parametrize("model", COMPUTE)
@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_preset_runs_on_every_hardware(model: str, hardware: str, tmp_path: Path) -> None:
    text = f"model: {model}\nworkers: [{{hardware: {hardware}, gpus: 16}}]"
    (worker,) = read_fleet(written(tmp_path, text)).workers
    step_s = worker.costs.delays().decode_step_s(1, 10_000)
    assert 1e-3 < step_s < 0.5
    assert float(worker.costs.compute.predict(8192.0, 0.0)) > step_s


def test_every_preset_of_the_package_has_its_compute() -> None:
    assert COMPUTE.keys() == PRESETS.keys()
