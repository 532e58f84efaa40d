"""`heterocache trace stats` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_connector.tools import cli, command
from tests.ownership.simulator.traces.trace_files import write_lines


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lengths = {"input_length": 1024, "output_length": 8}
    rows = [
        {"timestamp": 0, **lengths, "hash_ids": [1, 2]},
        {"timestamp": 3000, **lengths, "hash_ids": [1, 3]},
    ]
    return write_lines(tmp_path / "trace.jsonl.gz", rows, zipped=True)


def test_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "stats", str(trace)]) == command.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"# {trace} (mooncake, 512-token blocks)"
    assert "- Sessions are not recorded: every request is a session of its own." in lines
    for row in (
        "| requests | 2 |",
        "| from first to last arrival | 3 s |",
        "| hit rate of an endless cache, by tokens | 25.00% |",
        "| of reused tokens, within 10 s | 100.0% |",
        "| longest prefix of at least 50% of the prompts | 1,024 tokens |",
        "| prompt, tokens | 2 | 1,024 | 1,024 | 1,024 | 1,024 | 1,024 | 1,024 |",
        "| time since last use, s (by tokens) | 512 | 3 | 3 | 3 | 3 | 3 | 3 |",
        "| 1 prompt | 66.7% | 50.0% |",
        "| 2 prompts | 33.3% | 50.0% |",
    ):
        assert row in lines
    assert not any("think time" in line for line in lines), "nothing is said of what is not known"


def test_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "stats", str(trace), "--json"]) == command.EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["hit_rate"], found["hit_tokens"], found["requests"]) == (0.25, 512, 2)
    assert found["reuse_within"] == {"10": 1.0, "60": 1.0, "300": 1.0, "3600": 1.0}
    assert found["think_s"]["user"]["p50"] is None


def test_a_wrong_file_is_an_error_and_prints_nothing(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write_lines(tmp_path / "bad", ['{"timestamp": 1, "hash_ids": []}'])
    for arguments, problem in (
        ([str(bad)], f"{bad}:1: input_length: Object missing required field"),
        ([str(tmp_path / "none")], "No such file"),
        ([str(tmp_path / "trace.jsonl.gz" / "x")], "Not a directory"),
        ([str(trace), "--format", "azure"], f"{trace}:1: header: is not TIMESTAMP,"),
        ([str(trace), "--format", "x"], "no format 'x'; there are agent-sessions, mooncake"),
    ):
        assert cli.main(["trace", "stats", *arguments]) == command.EXIT_UNUSABLE
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith("heterocache: ")
        assert problem in error
