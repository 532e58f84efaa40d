"""The order in which a restore and a save are timed, on stand-ins of the engine and the disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import engine_process, layerwise_transfer, restore
from benchmarks.engine_process import Timing
from benchmarks.measure import Memcpy, Samples
from examples import cpu_kernels
from hetero_connector.transfer.base import OpenFile
from hetero_connector.transfer.choose import ChosenTransfer
from hetero_connector.transfer.pread_files import PreadFiles

RATIOS, TURNS = ("ratio", "vs_off", "with_ssd"), ("plain", "save", "off", "spill")
LONG = 256
"""A prompt of so many tokens is timed."""


class FakeEngine:
    """Notes its calls. A prompt is on SSD until it was restored, then in DRAM."""

    def __init__(self, calls: list[str], name: str = "") -> None:
        self._calls, self.name = calls, name
        self._has_prefix, self._tiers = False, {}
        self._next = "dram"

    def complete(self, prompt: Sequence[int], tokens: int = 1, recompute: bool = False) -> Timing:
        if len(prompt) < LONG:
            self._calls.append(f"{self.name}wake")
        elif self._has_prefix:
            self._calls.append(f"{self.name}local")
        else:
            self._calls.append(f"{self.name}{self._next}")
            self._tiers[self._next] = 1
            self._has_prefix, self._next = True, "dram"
        return Timing(1.0, 1.0, 256)

    def wake(self) -> None:
        engine_process.EngineProcess.wake(self)  # type: ignore[arg-type]

    def leave_on_ssd(self) -> None:
        self._calls.append(f"{self.name}leave")
        self._next = "ssd"

    def reset_prefix_cache(self) -> None:
        self._has_prefix = False

    def restored(self) -> dict[str, int]:
        found, self._tiers = self._tiers, {}
        return found

    def flush(self) -> None:
        self._calls.append(f"{self.name}flush")

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None: ...


class FakeDisk:
    def read_bandwidth(self) -> float:
        return 1.0

    limit = read_bandwidth


@pytest.mark.parametrize("local_first", [True, False])
def test_an_engine_is_woken_before_each_completion_that_is_timed(local_first: bool) -> None:
    calls: list[str] = []
    engine: Any = FakeEngine(calls)
    disk: Any = FakeDisk()
    turns = restore._Turns(engine, Samples(), disk, Memcpy(4096))
    turns.run([1] * LONG, local_first=local_first)
    last = ["local", "dram"] if local_first else ["dram", "local"]
    assert calls == ["leave", "wake", "ssd", "wake", last[0], "wake", last[1]]


def test_a_step_is_run_before_restored_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reports the end of its copies in the step after the answer."""
    engine = object.__new__(engine_process.EngineProcess)
    asked: list[str] = []

    def call(name: str, *arguments: Any) -> Any:
        asked.append(name)
        return {}

    monkeypatch.setattr(engine, "call", call)
    assert engine.restored() == {}
    assert asked == ["complete", "restored"]


def started(monkeypatch: pytest.MonkeyPatch, module: Any, names: Sequence[str]) -> list[str]:
    """Let the module start stand-ins with these names; return what they are asked."""
    calls: list[str] = []
    left = iter(names)
    monkeypatch.setattr(module, "EngineProcess", lambda *_, **__: FakeEngine(calls, next(left)))
    return calls


def test_saves_are_on_disk_before_another_engine_takes_its_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = started(monkeypatch, restore, ["plain ", "saving ", "spilling "])
    monkeypatch.setattr(FakeEngine, "complete", noted)
    repeats = 31
    restore.measure_saving(tmp_path, repeats)
    work = [x for x in calls if not x.endswith("wake")]
    for at, call in enumerate(work):
        if call == "spilling work":
            assert work[at + 1] == "spilling flush"
    assert work.count("spilling flush") == 2 * (repeats + 1)
    order = [x.partition(" ")[0] for x in work if x.endswith("work")]
    followed = set(pairwise(order))
    assert followed >= {(x, y) for x in set(order) for y in set(order) if x != y}
    assert calls.count("plain wake") == calls.count("plain work")


def noted(
    engine: FakeEngine, prompt: Sequence[int], tokens: int = 1, recompute: bool = False
) -> Timing:
    engine._calls.append(f"{engine.name}{'work' if len(prompt) >= LONG else 'wake'}")
    return Timing(1.0, 1.0, 0)


def test_engines_with_and_without_overlap_take_turns_in_both_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = started(monkeypatch, layerwise_transfer, ["on ", "off "])
    layerwise_transfer.measure_overlap(9)
    timed = dropwhile(lambda call: not call.endswith("wake"), calls)
    restores = [x for x in timed if x.endswith("dram")]
    assert {*zip(restores[::2], restores[1::2], strict=True)} == {
        ("on dram", "off dram"),
        ("off dram", "on dram"),
    }


def test_a_model_that_this_cpu_cannot_run_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"cold": 9.0, "local": 1.0, "dram": 2.0, "ssd": 3.0}
    seconds |= dict.fromkeys(("memcpy", "memcpy fresh", "dd", "limit"), 1.0)

    def measured(case: restore.RestoreCase, *_: object) -> restore.RestoreTimes:
        return restore.RestoreTimes(case, 256, 1, 1, seconds)

    saving = {f"{work}_{x}": 1.0 for work in ("prefill", "decode") for x in RATIOS}
    saving |= {f"{work} {x}": 1.0 for work in ("prefill", "decode") for x in TURNS}
    reasons = {"deepseek_v4": "no kernels"}
    monkeypatch.setattr(cpu_kernels, "unsupported_reason", lambda model: reasons.get(model, ""))
    monkeypatch.setattr(restore, "measure_restore", measured)
    monkeypatch.setattr(restore, "measure_saving", lambda *_: saving)
    monkeypatch.setattr(sys, "argv", ["restore", "--no-files", "--dir", str(tmp_path)])
    restore.main()
    printed = capsys.readouterr().out
    assert printed.startswith("deepseek_v4: skipped, no kernels\n")
    assert "gemma3" in printed
    assert printed.count("deepseek_v4") == 1


def test_tokens_that_are_decoded_complete_a_chunk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoded: set[tuple[int, int]] = set()

    def complete(
        engine: FakeEngine, prompt: Sequence[int], tokens: int = 1, recompute: bool = False
    ) -> Timing:
        if tokens > 1:
            decoded.add((len(prompt), tokens))
        return Timing(1.0, 1.0, 0)

    started(monkeypatch, restore, ["plain ", "saving ", "spilling "])
    monkeypatch.setattr(FakeEngine, "complete", complete)
    restore.measure_saving(tmp_path, 1)
    [(prompt, tokens)] = decoded
    chunk = 256
    assert prompt // chunk < (prompt + tokens - 1) // chunk


def test_nixl_is_not_taken_for_what_took_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = np.zeros(4096, np.uint8)
    chosen = ChosenTransfer(PreadFiles(memory, []), "no io_uring here")
    monkeypatch.setattr(layerwise_transfer, "choose_file_transfer", lambda *_: chosen)
    with pytest.raises(RuntimeError, match="no io_uring here"):
        layerwise_transfer._nixl(memory, OpenFile(0, 0), tmp_path)
