"""The parts that are timed are methods of today's classes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure as measures
from benchmarks import restore_parts
from benchmarks.engine_process import Timing
from benchmarks.measure import Memcpy, Samples
from benchmarks.side_by_side import shared_prefixes
from examples import cpu_kernels


@pytest.mark.parametrize("part", restore_parts._PARTS, ids=lambda part: part.name)
def test_every_part_has_its_methods(part: restore_parts._Part) -> None:
    module, _, name = part.where.partition(":")
    kind = getattr(importlib.import_module(module), name)
    for method in part.methods:
        assert callable(getattr(kind, method))


@pytest.fixture
def without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"deepseek_v4": "no kernels"}
    monkeypatch.setattr(cpu_kernels, "unsupported_reason", lambda model: reasons.get(model, ""))


def test_a_model_that_this_cpu_cannot_run_is_left_out(
    without_avx512: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Samples({"first token": [1.0], "memcpy": [1.0]})
    monkeypatch.setattr(restore_parts, "measure", lambda *_: (measured, measured, 1))
    monkeypatch.setattr(sys, "argv", ["restore_parts", "gemma3", "deepseek_v4", "--turns", "1"])
    restore_parts.main()
    printed = capsys.readouterr().out
    assert printed.startswith("deepseek_v4: skipped, no kernels\n")
    assert "gemma3, ms" in printed
    assert "deepseek_v4, ms" not in printed


def test_shared_prefixes_leave_out_what_this_cpu_cannot_run(
    without_avx512: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: list[str] = []
    sharing = shared_prefixes.Sharing(1, 1, 1)

    def measure(model: str, *_: Any) -> shared_prefixes.Restart:
        measured.append(model)
        return shared_prefixes.Restart(model, sharing, sharing)

    monkeypatch.setattr(shared_prefixes, "measure", measure)
    monkeypatch.setattr(shared_prefixes, "ROOT", tmp_path)
    monkeypatch.setattr(shared_prefixes, "stop_servers_on_sigterm", lambda: None)
    results = tmp_path / "results"
    monkeypatch.setattr(measures, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", ["shared_prefixes", "--models", "gemma3", "--json"])
    shared_prefixes.main()
    assert not results.exists(), "a part of the models is no result"
    printed = capsys.readouterr().out
    assert "blocks_per_session      1  <= 1.1  met" in printed
    figures = json.loads(printed.splitlines()[-1])
    assert figures == {"local_hits": 1.0, "blocks_per_session": 1.0}
    measured.clear()
    monkeypatch.setattr(sys, "argv", ["shared_prefixes"])
    shared_prefixes.main()
    assert measured == [x for x in shared_prefixes.MODELS if x != "deepseek_v4"]
    assert [x.suffix for x in sorted(results.iterdir())] == [".json", ".txt"]


def test_an_engine_is_woken_before_a_restore_and_before_the_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Engine:
        """Notes what it is asked; a prompt has 8 bytes of state."""

        def __init__(self, *_: object, **__: object) -> None:
            self._restores = 0

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None: ...

        def call(self, name: str) -> dict[str, float]:
            return {}

        def complete(self, prompt: list[int], tokens: int = 1) -> Timing:
            calls.append("complete")
            return Timing(1.0, 0.0, 0)

        def wake(self) -> None:
            calls.append("wake")

        def reset_prefix_cache(self) -> None:
            calls.append("forget")

        def restored(self) -> dict[str, int]:
            self._restores += 1
            return {"dram": 8 * (1, 1, 2)[self._restores - 1]}

    class Copy(Memcpy):
        def reused(self) -> float:
            calls.append("memcpy")
            return super().reused()

    monkeypatch.setattr(restore_parts, "EngineProcess", Engine)
    monkeypatch.setattr(restore_parts, "Memcpy", Copy)
    restore_parts.measure("gemma3", turns=2)
    turn = ["forget", "wake", "complete", "wake", "complete", "memcpy"]
    assert calls[-12:] == 2 * turn
