"""A profile is read as it was written; the error of a bad file names file and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import ConfigError
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    StepMix,
)
from hetero_connector.planner.cost_model import (
    CostModel,
    HandoffCost,
    RequestOverhead,
)
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.planner.profile import CopyEngines, CostProfile, FitError, ProfileSubject
from hetero_connector.spec import StateType

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA

DESCRIPTION = {
    "architecture": "TinyForCausalLM",
    "hf_config": {"hidden_size": 64, "rope": {"theta": 1e4}},
    "model_dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "tp_size": 1,
}
SUBJECT = ProfileSubject.of(DESCRIPTION, "a processor, 2 cores")

numbers = st.floats(0, 1e6)
errors = st.none() | st.builds(FitError, st.integers(1, 10**6), numbers, numbers)
tier_rates = st.builds(
    TierRates, numbers, st.dictionaries(st.sampled_from(list(StateType)), numbers), numbers
)


subjects = st.builds(
    ProfileSubject,
    st.text(),
    st.text(),
    st.text(),
    st.text(),
    st.text(),
    st.integers(1, 64),
    st.text(),
)
delays = st.none() | st.builds(InterferenceCoefficients, *[numbers] * 6)
overheads = st.none() | st.builds(RequestOverhead, *[numbers] * 4)
page_sizes = st.none() | st.integers(1, 1 << 40)
copy_engines = st.none() | st.builds(CopyEngines, page_sizes, page_sizes)


@st.composite
def profiles(draw: st.DrawFn) -> CostProfile:
    load = draw(st.dictionaries(st.sampled_from(list(Tier)), tier_rates))
    load_errors = {tier: draw(errors) for tier in load}
    return CostProfile(
        draw(st.text()),
        draw(subjects),
        ComputeCoefficients(draw(st.floats(1e-9, 1)), draw(numbers), draw(numbers)),
        draw(errors),
        load,
        {tier: error for tier, error in load_errors.items() if error},
        draw(delays),
        None,
        overhead := draw(overheads),
        draw(errors) if overhead else None,
        draw(st.none() | st.builds(HandoffCost, numbers, numbers)),
        draw(copy_engines),
        step_tokens=draw(st.integers(0, 1 << 20)),
    )


@given(profiles())
def test_a_profile_survives_json(profile: CostProfile) -> None:
    assert read(profile.as_json()) == profile


def read(content: dict[str, Any]) -> CostProfile:
    return CostProfile.from_json(json.dumps(content).encode())


def learned() -> CostModel:
    costs = CostModel(ComputeRegression(), LoadModel([KV, SWA]))
    for n in (1, 100, 2000) * 10:
        costs.compute.observe(n, n, 1e-3 + 2e-5 * n)
        costs.load.observe(Tier.SSD, {KV: n * 10_000}, 2e-3 + n * 1e-5)
        costs.interference.observe(StepMix(n, n * n, n, n * n), 2e-3 + n * 3e-5)
    costs.overhead = RequestOverhead(1e-3, 1e-7, 2e-3, 0.0)
    costs.handoff = HandoffCost(5e-2, 1e-6)
    return costs


def test_a_written_profile_starts_a_new_cost_model(tmp_path: Path) -> None:
    costs = learned()
    path = tmp_path / "profile.json"
    CostProfile.of(costs, "models/tiny", SUBJECT).write(path)
    profile = CostProfile.read(path)
    assert (profile.model, profile.subject) == ("models/tiny", SUBJECT)
    assert profile.compute_error is not None
    assert profile.compute_error.samples == 30
    assert profile.load.keys() == profile.load_errors.keys() == {Tier.SSD}
    again = profile.cost_model([KV, SWA], step_tokens=2048)
    assert again.compute.predict(500, 0) == pytest.approx(costs.compute.predict(500, 0))
    sizes = {KV: 10**7}
    assert profile.interference_error is not None
    assert profile.interference_error.samples == 30
    assert again.delays() == pytest.approx(costs.delays())
    assert (again.overhead, again.handoff) == (costs.overhead, costs.handoff)
    expected = costs.load.predict(Tier.SSD, sizes, 10**6)
    assert again.load.predict(Tier.SSD, sizes, 10**6) == pytest.approx(expected)
    assert again.step_tokens == 2048


def test_the_size_of_a_step_is_kept_unless_another_is_given() -> None:
    costs = CostModel(ComputeRegression(), LoadModel([KV]), step_tokens=2048)
    document = CostProfile.of(costs, "", SUBJECT).as_json()
    assert read(document).cost_model([KV]).step_tokens == 2048
    assert read(document).cost_model([KV], step_tokens=512).step_tokens == 512
    del document["step_tokens"]
    assert read(document).cost_model([KV]).step_tokens == 0, "not told"


def test_a_cost_model_without_samples_can_be_written() -> None:
    profile = CostProfile.of(CostModel(ComputeRegression(), LoadModel([KV])), "", SUBJECT)
    assert profile.compute_error is None
    assert profile.load == {}
    assert profile.interference is None
    assert profile.overhead is None


def test_before_interference_is_measured_it_is_guessed_from_compute() -> None:
    document = good()
    del document["interference"]
    costs = read(document).cost_model([KV, SWA])
    step_s, token_s, attention_s = costs.compute.coefficients
    assert costs.delays() == (step_s, token_s, attention_s, 0.0, token_s, attention_s)
    costs.interference.observe(StepMix(0, 0.0, 4, 4_000), 0.25)
    assert costs.delays().decode_step_s(4, 4_000) == pytest.approx(0.25, rel=0.1)


def test_a_profile_without_overhead_charges_none() -> None:
    document = good()
    del document["request"]
    assert read(document).cost_model([KV]).overhead == RequestOverhead()


def good() -> dict[str, Any]:
    return CostProfile.of(learned(), "model", SUBJECT).as_json()


def damaged(*path: str, value: Any = None, remove: bool = False) -> str:
    document = good()
    place = document
    for name in path[:-1]:
        place = place[name]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON"),
        ("[1, 2]", "no profile of 'heterocache calibrate': Expected `object`"),
        ("[" * 100_000, "Expected `object`"),
        (damaged("format", value=2), "format 2, this version reads 3"),
        (damaged("format", value=True), "`$.format`"),
        (damaged("format", remove=True), "`format`"),
        (damaged("model", value=3), "`$.model`"),
        (damaged("subject", remove=True), "`subject`"),
        (damaged("subject", "machine", value=None), "`$.subject.machine`"),
        (damaged("subject", "tp_size", value="2"), "`$.subject.tp_size`"),
        (damaged("compute", remove=True), "`compute`"),
        (damaged("compute", "token_s", remove=True), "`token_s` - at `$.compute`"),
        (damaged("compute", "token_s", value=-1e-9), ">= 0.0 - at `$.compute.token_s`"),
        (damaged("compute", "token_s", value="1"), "got `str` - at `$.compute.token_s`"),
        (damaged("compute", "token_s", value=True), "got `bool` - at `$.compute.token_s`"),
        (damaged("compute", "token_s", value=float("nan")), "it is not JSON"),
        (damaged("compute", "token_s", value=10**400), "out of range"),
        ("9" * 5_000, "out of range"),
        (damaged("compute", "fit", value=[]), "`$.compute.fit`"),
        (damaged("interference", value=[]), "`$.interference`"),
        (damaged("interference", "mixed_s", remove=True), "`mixed_s` - at `$.interference`"),
        (damaged("interference", "token_s", value=-1.0), "`$.interference.token_s`"),
        (damaged("request", value=[]), "`$.request`"),
        (damaged("step_tokens", value=-1), "`$.step_tokens`"),
        (damaged("request", "scheduling_s", remove=True), "`scheduling_s` - at `$.request`"),
        (damaged("load", value=[]), "`$.load`"),
        (damaged("copy_engines", value=[]), "`$.copy_engines`"),
        (damaged("copy_engines", value={"load_from_bytes": 0}), "`$.copy_engines.load_from_bytes`"),
        (damaged("load", "tape", value={}), "'tape'"),
        (damaged("load", "ssd", "latency_s", value=None), "`$.load[...].latency_s`"),
        (damaged("load", "ssd", "seconds_per_byte", "kv", value=1.0), "'kv'"),
        (damaged("load", "ssd", "seconds_per_byte", "dense_kv", value=[]), "seconds_per_byte"),
    ],
)
def test_a_bad_profile_is_refused_with_its_key_and_place(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        CostProfile.read(path)
    assert refused.value.key == "planner_profile"
    assert problem in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "machine", "difference"),
    [
        ({"hf_config": {"hidden_size": 64, "rope": {"theta": 1e6}}}, "", "config '"),
        ({"model_dtype": "float32"}, "", "model_dtype 'bfloat16' there, 'float32' here"),
        ({"quantization": "fp8"}, "", "quantization '' there, 'fp8' here"),
        ({"tp_size": 2}, "", "tp_size 1 there, 2 here"),
        ({}, "another, 4 cores", "machine 'a processor, 2 cores' there, 'another, 4 cores' here"),
    ],
)
def test_a_profile_of_another_model_or_machine_is_refused(
    tmp_path: Path, changed: dict[str, Any], machine: str, difference: str
) -> None:
    path = tmp_path / "profile.json"
    CostProfile.of(learned(), "models/tiny", SUBJECT).write(path)
    here = ProfileSubject.of(DESCRIPTION | changed, machine or SUBJECT.machine)
    with pytest.raises(ConfigError, match="heterocache calibrate") as refused:
        CostProfile.read(path, here)
    assert refused.value.key == "planner_profile"
    assert "measured for models/tiny: " + difference in str(refused.value)


@pytest.mark.parametrize("machine", [SUBJECT.machine, ""])
def test_a_profile_of_the_same_model_and_machine_is_taken(tmp_path: Path, machine: str) -> None:
    path = tmp_path / "profile.json"
    CostProfile.of(learned(), "models/tiny", SUBJECT).write(path)
    journaled = json.loads(json.dumps(DESCRIPTION, sort_keys=True))
    profile = CostProfile.read(path, ProfileSubject.of(journaled, machine))
    assert profile.subject == SUBJECT


def test_a_profile_of_a_cpu_does_not_mention_copy_engines() -> None:
    assert "copy_engines" not in good()


def test_copy_engines_are_described_in_words() -> None:
    assert str(CopyEngines(32768, None)) == "loads from 32768 bytes, no saves"


def test_a_profile_with_free_computing_is_refused() -> None:
    document = good()
    document["compute"] |= {"step_s": 0, "token_s": 0, "attention_s": 0}
    with pytest.raises(ValueError, match="computing cannot be free"):
        read(document)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        CostProfile.read(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not JSON"):
        CostProfile.read(tmp_path / "binary")
