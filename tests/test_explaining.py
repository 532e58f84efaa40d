"""`heterocache explain` on a directory with a known chain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_connector import cli
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.cost_profile import CostProfile
from hetero_connector.planner.load_model import TierRates
from hetero_connector.store.journal_format import JournalRow
from hetero_connector.store.ssd_directory import SsdDirectory
from tests.engine.fakes import DENSE

CHUNK = 64
FINGERPRINT = b"e" * 32
LAYOUT = ArtifactLayout(DENSE, CHUNK)
TOKENS = [i * 31 % 251 for i in range(300)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three full chunks and a tail of 32 tokens of `TOKENS`."""
    description = {
        "fingerprint": FINGERPRINT.hex(),
        "chunk_tokens": CHUNK,
        "model_spec": json.loads(json.dumps(DENSE.as_plain())),
        "model_name": "no/such-model",
    }
    opened = SsdDirectory.open(
        tmp_path / "ssd", FINGERPRINT, dict.fromkeys(LAYOUT.max_bytes, 4096), 4 << 20, description
    )
    chain = RequestChain(ChainHasher(FINGERPRINT, CHUNK))
    chain.extend(TOKENS)
    chunks = [*list(chain.chunks())[:3], chain.tail(3 * CHUNK + 32)]
    (kind,) = DENSE.state_types
    opened.journal.record(
        JournalRow(c, kind, slot, 1, LAYOUT.artifact_bytes(kind, c.start, c.end), b"c" * 16, 1e9)
        for slot, c in enumerate(chunks)
    )
    path = opened.path
    opened.close()
    return path


def profile(path: Path, token_s: float) -> Path:
    (kind,) = DENSE.state_types
    rates = TierRates(1e-4, {kind: 1e-9}, 1e-9)
    coefficients = ComputeCoefficients(1e-4, token_s, 0.0)
    CostProfile("test", coefficients, load=dict.fromkeys(Tier, rates)).write(path)
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
    told = json.loads(capsys.readouterr().out)
    assert told["boundary"] == boundary
    boundaries = [c["boundary"] for c in told["candidates"]]
    assert boundaries == [0, 64, 128, 192, 224]
    (chosen,) = [c for c in told["candidates"] if c["chosen"]]
    assert chosen["total_s"] == min(c["total_s"] for c in told["candidates"])
    assert chosen["boundary"] == boundary


def test_a_table_for_people_from_the_ssd_dir_itself(
    directory: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(directory.parent), str(prompt), "--in-dram"]) == 0
    out = capsys.readouterr().out
    assert "choice: restore" in out
    assert "dram" in out
    assert "ssd" not in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "neither a JSON list"),
        ("[1, true]", "neither a JSON list"),
        ("{}", "neither a JSON list"),
        ("[-1, 2, 3]" + " " * 10, "token ids must be"),
        ("some text", "no tokenizer of 'no/such-model'"),
    ],
)
def test_a_wrong_prompt_is_said(
    directory: Path, tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt"
    path.write_text("[" + "-1," * 300 + "0]" if "-1" in text else text)
    assert cli.main(["explain", str(directory), str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_prompt_or_store_is_said(
    directory: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(directory), str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path / "none"), str(prompt)]) == 2
    assert "not a directory" in capsys.readouterr().err
