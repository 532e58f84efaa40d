"""The command lines of the examples that start engines, without an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from examples import demo
from examples.disaggregated_prefill import run

pytestmark = pytest.mark.parametrize("example", [demo, run])


def test_an_unknown_model_is_named_before_anything_is_written_or_deleted(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "store/dense"
    store.mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["", "dense", "llama-405b", "--dir", str(tmp_path)])
    monkeypatch.setattr(example, "stop_servers_on_sigterm", lambda: None)
    monkeypatch.setattr(example, "runnable", lambda models: [])
    with pytest.raises(SystemExit) as raised:
        example.main()
    assert raised.value.code == 2
    assert "no checkpoint 'llama-405b'; there are blip2, " in capsys.readouterr().err
    assert [*tmp_path.rglob("*")] == [store.parent, store]


def test_a_run_of_no_model_is_a_failure(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--dir", str(tmp_path)])
    monkeypatch.setattr(example, "stop_servers_on_sigterm", lambda: None)
    monkeypatch.setattr(example, "runnable", lambda models: [])
    assert example.main() == 1
