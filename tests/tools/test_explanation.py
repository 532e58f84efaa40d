"""`heterocache explain` on a directory with a known chain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hetero_connector import machine
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import EngineSettings
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec import Family, ModelSpec
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.generation_file import GENERATION_NAME, GenerationFile
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.tools import cli
from hetero_connector.tools.explanation import decide
from tests.engine.fakes import DENSE, HYBRID

CHUNK = 64
FINGERPRINT = b"e" * 32
TOKENS = [i * 31 % 251 for i in range(300)]
CHECKPOINT = 64
"""The only boundary with one; the hybrid model's replays begin 32 tokens before a boundary."""


MODEL = {
    "architecture": "TinyForCausalLM",
    "hf_config": {"hidden_size": 64},
    "model_dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "tp_size": 1,
}
SUBJECT = ProfileSubject.of(MODEL, "some machine")


def store(root: Path, model: ModelSpec, **recorded: object) -> Path:
    """Three full chunks and a tail of 32 tokens of `TOKENS`; `recorded`: of the description."""
    layout = ArtifactLayout(model, CHUNK)
    description = {
        **MODEL,
        "fingerprint": FINGERPRINT.hex(),
        "chunk_tokens": CHUNK,
        "model_spec": json.loads(json.dumps(model.as_plain())),
        "model_name": "no/such-model",
    }
    opened = SsdDirectory.open(
        root, FINGERPRINT, dict.fromkeys(layout.max_bytes, 4096), 4 << 20, description | recorded
    )
    chain = RequestChain(ChainHasher(FINGERPRINT, CHUNK))
    chain.extend(TOKENS)
    chunks = [*list(chain.chunks())[:3], chain.tail(3 * CHUNK + 32)]
    opened.journal.record(
        JournalRow(c, kind, slot, 1, layout.artifact_bytes(kind, c.start, c.end), b"c" * 16, 1e9)
        for slot, c in enumerate(chunks)
        for kind in model.state_types
        if kind.family is Family.PREFIX or c.end == CHECKPOINT
    )
    path = opened.path
    opened.close()
    return path


@pytest.mark.parametrize(
    ("num_tokens", "boundary"), [(225, 224), (224, 208), (192, 176), (191, 128), (64, 48)]
)
def test_a_prompt_that_ends_with_a_chunk_resumes_within_it(
    directory: Path, num_tokens: int, boundary: int
) -> None:
    plan = decide(directory, TOKENS[:num_tokens], None, in_dram=True).decision.plan
    assert plan is not None
    assert plan.boundary == boundary


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return store(tmp_path / "ssd", DENSE)


def profile(path: Path, token_s: float, model: ModelSpec = DENSE) -> Path:
    rates = TierRates(1e-4, dict.fromkeys(model.state_types, 1e-9), 1e-9)
    coefficients = ComputeCoefficients(1e-4, token_s, 0.0)
    CostProfile("test", SUBJECT, coefficients, load=dict.fromkeys(Tier, rates)).write(path)
    return path


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return path


@pytest.mark.parametrize(("token_s", "boundary"), [(1e-3, 224), (1e-9, 0)])
def test_the_choice_follows_the_costs(
    directory: Path,
    prompt: Path,
    tmp_path: Path,
    token_s: float,
    boundary: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    costs = profile(tmp_path / "profile.json", token_s)
    assert (
        cli.main(["explain", str(directory), str(prompt), "--profile", str(costs), "--json"]) == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["boundary"] == boundary
    boundaries = [c["boundary"] for c in shown["candidates"]]
    assert boundaries == [0, 64, 128, 192, 224]
    (chosen,) = [c for c in shown["candidates"] if c["chosen"]]
    assert chosen["total_s"] == min(c["total_s"] for c in shown["candidates"])
    assert chosen["boundary"] == boundary


@pytest.mark.parametrize(
    ("recorded", "ways"),
    [
        (
            {"window_replay": "exact"},
            [(0, 0), (64, 64), (64, 32), (128, 96), (192, 160), (224, 192)],
        ),
        ({"window_replay": "microbatches have slot mappings"}, [(0, 0), (64, 64)]),
        ({}, [(0, 0), (64, 64)]),  # written by a release that recorded none
    ],
)
def test_replays_are_offered_where_the_engine_recorded_that_they_are_exact(
    tmp_path: Path,
    prompt: Path,
    recorded: dict[str, str],
    ways: list[tuple[int, int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert WindowReplay.of(HYBRID).tokens == 32
    directory = store(tmp_path / "ssd", HYBRID, **recorded)
    costs = profile(tmp_path / "profile.json", 1e-3, HYBRID)
    command = ["explain", str(directory), str(prompt), "--profile", str(costs)]
    assert cli.main([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(c["boundary"], c["resume_tokens"]) for c in shown["candidates"]] == ways
    assert shown["boundary"] == ways[-1][0]
    (chosen,) = [c for c in shown["candidates"] if c["chosen"]]
    assert (chosen["resume_tokens"] < chosen["boundary"]) == (len(ways) > 2)
    assert cli.main(command) == 0
    assert ("compute 32 of them again" in capsys.readouterr().out) == (len(ways) > 2)


def test_explain_uses_the_settings_of_the_stores_engine(
    tmp_path: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each setting shows in the price or the choice; without any the defaults are stated."""
    costs = profile(tmp_path / "profile.json", 1e-3, HYBRID)

    def shown(
        name: str, settings: EngineSettings | None, model: ModelSpec = DENSE
    ) -> tuple[dict[str, Any], str]:
        recorded = settings.described() if settings else {}
        command = ["explain", str(store(tmp_path / name, model, **recorded)), str(prompt)]
        command += ["--profile", str(costs)]
        assert cli.main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert cli.main(command) == 0
        return found, " ".join(capsys.readouterr().out.split("\n\n")[-1].split())

    silent, line = shown("silent", None)
    assert silent["boundary"] == 224
    assert silent["assumed"]["settings_from"] == "defaults: its last engine recorded none"
    assert (
        "an idle engine, planner=cost, one step, loads layer by layer, load_deadline_s=10" in line
    )
    assert line.endswith(f"Costs: calibrated on some machine, from {costs}.")

    steps, line = shown("steps", EngineSettings(step_tokens=64))
    more_steps = 1e-4 * (5 - 1)
    assert compute_s(steps) == pytest.approx(compute_s(silent) + more_steps)
    assert "steps of 64 tokens" in line
    assert "(recorded by its last engine)" in line

    layerwise, _ = shown("layer by layer", EngineSettings(), HYBRID)
    parked, line = shown("parked", EngineSettings(parking="always"), HYBRID)
    assert parked["predicted"]["load_s"] > layerwise["predicted"]["load_s"]
    assert "loads between steps" in line
    _, line = shown("may park", EngineSettings(parking="long"), HYBRID)
    assert "loads layer by layer or between steps" in line
    _, line = shown("at once", EngineSettings(layerwise=False), HYBRID)
    assert "loads before the forward" in line
    late, _ = shown("late", EngineSettings(load_deadline_s=1e-9))
    assert late["boundary"] == 0
    never, _ = shown("never", EngineSettings(planner="never_load"))
    assert never["boundary"] == 0


def test_a_cheaper_candidate_that_misses_the_deadline_is_marked(
    tmp_path: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = profile(tmp_path / "profile.json", 1e-3)
    late = store(tmp_path / "late", DENSE, **EngineSettings(load_deadline_s=1e-9).described())
    command = ["explain", str(late), str(prompt), "--profile", str(costs), "--json"]
    assert cli.main(command) == 0
    nothing, *restores = json.loads(capsys.readouterr().out)["candidates"]
    assert nothing["chosen"]
    assert nothing["in_time"]
    assert [c["boundary"] for c in restores] == [64, 128, 192, 224]
    assert all(c["total_s"] < nothing["total_s"] for c in restores)
    assert not any(c["in_time"] for c in restores)


def test_all_candidates_are_printed_when_asked_for(
    directory: Path,
    prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "hetero_connector.planner.explain.explain",
        lambda decision, max_rows: f"at most {max_rows}",
    )
    command = ["explain", str(directory), str(prompt)]
    for option, expected in (([], 12), (["--rows", "7"], 7), (["--all"], None)):
        assert cli.main([*command, *option]) == 0
        assert capsys.readouterr().out.startswith(f"at most {expected}\n")
    assert cli.main([*command, "--rows", "7", "--all"]) == 2
    for rows in ("0", "-3"):
        assert cli.main([*command, "--rows", rows]) == 2


def compute_s(shown: dict[str, Any]) -> float:
    """Return the compute seconds of restoring nothing."""
    seconds = shown["candidates"][0]["terms"]["compute_s"]
    assert isinstance(seconds, float)
    return seconds


def test_a_profile_of_another_model_is_refused(
    directory: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = profile(tmp_path / "profile.json", 1e-3)
    other = store(tmp_path / "other", DENSE, architecture="OtherForCausalLM")
    assert cli.main(["explain", str(directory), str(prompt), "--profile", str(costs)]) == 0
    capsys.readouterr()
    assert cli.main(["explain", str(other), str(prompt), "--profile", str(costs)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"heterocache: --profile: {costs} was measured for test: ")
    assert "architecture 'TinyForCausalLM' there, 'OtherForCausalLM' here" in error
    costs.write_text('{"a": 1}')
    assert cli.main(["explain", str(other), str(prompt), "--profile", str(costs)]) == 2
    assert "it is no profile of 'heterocache calibrate'" in capsys.readouterr().err


def test_a_table_for_people_from_the_ssd_dir_itself(
    directory: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(directory.parent), str(prompt), "--in-dram"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Load 224 of 300 tokens from DRAM")
    assert "load dram" in out
    assert "load ssd" not in out


@pytest.mark.parametrize(
    ("options", "tier", "words"), [([], "ssd", "on SSD"), (["--in-dram"], "dram", "in DRAM")]
)
def test_the_assumed_tier_is_named(
    directory: Path,
    prompt: Path,
    options: list[str],
    tier: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["explain", str(directory), str(prompt), *options]
    assert cli.main(command) == 0
    assert f"Assumed: all state {words}, an idle engine" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"]["tier"] == tier


def test_costs_that_the_stores_engine_learned_here_are_used(
    directory: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused from another machine or model, and if the file is damaged: it says so."""
    path = profile(directory / "learned.json", 1e-9)
    learned = json.loads(path.read_text())

    def chosen(name: str, model: str = "TinyForCausalLM") -> tuple[int, str]:
        subject = {**learned["subject"], "machine": name, "architecture": model}
        path.write_text(json.dumps({**learned, "subject": subject, "learned_until": 1.75e9}))
        assert cli.main(["explain", str(directory), str(prompt), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["boundary"], found["assumed"]["costs_from"]

    here = machine.processor()
    boundary, source = chosen(here)
    assert boundary == 0
    assert source.startswith(f"learned on {here} until 2025-")
    assert chosen(f"{here}, 2 pipeline stages")[0] == 0

    boundary, source = chosen(f"not {here}")
    assert boundary == 224
    assert f"not used: it was learned on not {here}" in source
    boundary, source = chosen(here, "OtherForCausalLM")
    assert boundary == 224
    assert "architecture 'OtherForCausalLM' there, 'TinyForCausalLM' here" in source

    chosen(here)
    dear = profile(tmp_path / "profile.json", 1e-3)
    command = ["explain", str(directory), str(prompt), "--json"]
    assert cli.main([*command, "--profile", str(dear)]) == 0
    assert json.loads(capsys.readouterr().out)["boundary"] == 224
    path.write_text("{")
    assert cli.main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["boundary"] == 224
    assert "it is not JSON" in found["assumed"]["costs_from"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "neither a JSON list"),
        ("[1, true]", "neither a JSON list"),
        ("[1, 2.5]", "neither a JSON list"),
        ("[[1, 2, 3]]", "neither a JSON list"),
        ('{"prompt_token_ids": [1, 2, 3]}', "neither a JSON list"),
        ('["some", "text"]', "neither a JSON list"),
        ("2024", "no tokenizer of 'no/such-model'"),
        ("[-1, 2, 3]" + " " * 10, "token ids must be"),
        ("some text", "no tokenizer of 'no/such-model'"),
        ("[" * 100_000, "no tokenizer of 'no/such-model'"),
        ("9" * 5_000, "no tokenizer of 'no/such-model'"),
    ],
)
def test_a_wrong_prompt_is_refused(
    directory: Path, tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.write_text("[" + "-1," * 300 + "0]" if "-1" in text else text)
    assert cli.main(["explain", str(directory), str(path)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["model_spec", "chunk_tokens"])
def test_a_store_that_does_not_describe_its_model_is_refused(
    prompt: Path, tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    description = {
        "chunk_tokens": CHUNK,
        "model_spec": json.loads(json.dumps(DENSE.as_plain())),
    }
    del description[lost]
    slots = dict.fromkeys(DENSE.state_types, 4096)
    opened = SsdDirectory.open(tmp_path / "ssd", FINGERPRINT, slots, 4 << 20, description)
    opened.close()
    assert cli.main(["explain", str(opened.path), str(prompt)]) == 2
    assert "an earlier version wrote it" in capsys.readouterr().err


def test_several_models_in_a_directory_are_named(
    directory: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(directory, directory.parent / ("6f" * 8))
    assert cli.main(["explain", str(directory.parent), str(prompt)]) == 2
    shown = capsys.readouterr().err
    assert "several models" in shown
    assert str(directory) in shown
    assert str(other) in shown


def test_a_missing_prompt_or_store_is_refused(
    directory: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(directory), str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path / "none"), str(prompt)]) == 2
    assert "not a directory" in capsys.readouterr().err


def test_state_from_before_a_clearing_of_the_model_is_not_offered(
    directory: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Clearings.in_folder(directory).count_model("")
    assert cli.main(["explain", str(directory), str(prompt), "--json"]) == 0
    assert [c["boundary"] for c in json.loads(capsys.readouterr().out)["candidates"]] == [0]


def test_state_from_before_a_reset_is_not_offered(
    directory: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = GenerationFile.open(directory / GENERATION_NAME, is_new=False)
    file.write(file.found.after_own_reset())
    file.close()
    assert cli.main(["explain", str(directory), str(prompt), "--json"]) == 0
    assert [c["boundary"] for c in json.loads(capsys.readouterr().out)["candidates"]] == [0]
