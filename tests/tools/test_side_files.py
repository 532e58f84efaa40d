"""`heterocache inspect` and `verify` know the files that lie next to a journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.tools import cli

SLOTS = {StateType.DENSE_KV: 64 << 10, StateType.WINDOW_SWA: 8 << 10}
MODEL_FIELDS = {
    "architecture": "TinyForCausalLM",
    "hf_config": {"hidden_size": 64},
    "model_dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "tp_size": 1,
}


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in argv])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A directory whose journal describes its model, with learned costs and cleared salts."""
    directory = SsdDirectory.open(tmp_path, b"\1" * 32, SLOTS, 4 << 20, MODEL_FIELDS)
    directory.close()
    subject = ProfileSubject.of(MODEL_FIELDS, "some machine")
    costs = ComputeCoefficients(1e-3, 1e-5, 0.0)
    CostProfile("tiny", subject, costs, learned_until=1.75e9).write(directory.path / "learned.json")
    salts = Clearings.in_folder(directory.path)
    salts.count_salt("a")
    salts.count_salt("b")
    return directory.path


@pytest.mark.parametrize(
    "hostile",
    [
        {"tp_size": []},
        {"tp_size": None, "quantization": {}},
        {"tp_size": float("inf")},
        {"tp_size": "x", "hf_config": 7},
        {"model_name": "\x1b[2Jgone", "\x1b]0;title\x07": "x", "k" * 9000: 1},
    ],
)
def test_a_description_that_no_engine_wrote_does_no_harm(
    tmp_path: Path, run: Run, hostile: dict[str, object]
) -> None:
    SsdDirectory.open(tmp_path, b"\1" * 32, SLOTS, 4 << 20, {**MODEL_FIELDS, **hostile}).close()
    (path,) = (x for x in tmp_path.iterdir() if x.is_dir())
    for command in ("inspect", "verify"):
        code, out, err = run(command, path)
        assert code == 0, err
        assert "\x1b" not in out + err
        assert len(out) < 5000
    (tmp_path / "prompt.json").write_text("[1, 2, 3]")
    code, _, err = run("explain", path, tmp_path / "prompt.json")
    assert code == 2
    assert "does not describe its model" in err


def test_inspect_shows_what_was_learned_and_cleared(described: Path, run: Run) -> None:
    code, out, _ = run("inspect", described)
    assert code == 0
    assert "  costs learned on some machine until 2025-06-" in out
    assert "  2 salts or models were cleared" in out
    files = json.loads(run("inspect", described, "--json")[1])[0]["side_files"]
    assert (files["cleared_salts"], files["costs_problem"], files["salts_problem"]) == (
        2,
        None,
        None,
    )
    assert run("verify", described)[0] == 0


@pytest.mark.parametrize(
    ("name", "content", "problem", "is_mended"),
    [
        ("learned.json", "{", "it is not JSON", True),
        ("learned.json", '{"format": 2}', "format 2, this version reads 3", True),
        ("cleared-salts.json", "{", "is damaged", False),
    ],
)
def test_verify_says_which_of_the_other_files_cannot_be_used(
    described: Path, run: Run, name: str, content: str, problem: str, is_mended: bool
) -> None:
    (described / name).write_text(content)
    for option in ([], ["--json"]):
        code, out, _ = run("inspect", described, *option)
        assert code == 1
        assert problem in out
    assert f"BAD {name}" in run("inspect", described)[1] or name == "cleared-salts.json"
    for option in ([], ["--repair"]):
        code, out, _ = run("verify", described, *option)
        assert code == 1
        assert "BAD" in out
        assert problem in out
        assert "all intact" not in out
    assert (described / name).exists() != is_mended
    assert run("verify", described)[0] == (0 if is_mended else 1)


def test_learned_costs_of_another_model_are_named(described: Path, run: Run) -> None:
    content = json.loads((described / "learned.json").read_text())
    content["subject"]["architecture"] = "Other"
    (described / "learned.json").write_text(json.dumps(content))
    code, out, _ = run("verify", described)
    assert code == 1
    assert "architecture 'Other' there, 'TinyForCausalLM' here" in out
