"""Which models are left out on which CPU, and that it is said."""

from __future__ import annotations

import pytest
import torch

from examples.cpu_kernels import runnable, why_not

MODELS = ["dense", "deepseek_v4", "qwen3_next"]


@pytest.mark.parametrize("has_avx512", [True, False])
def test_only_what_has_no_kernels_is_left_out_and_said(
    has_avx512: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    assert runnable(MODELS) == (MODELS if has_avx512 else ["dense", "qwen3_next"])
    said = capsys.readouterr().out
    assert said == ("" if has_avx512 else f"deepseek_v4: left out, {why_not('deepseek_v4')}\n")


def test_on_a_cpu_with_avx_512_no_test_is_left_out() -> None:
    with open("/proc/cpuinfo") as info:
        flags = info.read().split()
    assert bool(why_not("deepseek_v4")) == ("avx512f" not in flags)
