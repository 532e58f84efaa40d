"""The simulator does what the example's servers do, one that prefills and one that decodes."""

from __future__ import annotations

import pytest

from benchmarks.faithful_pd import DECODE, PREFILL, compare


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["gemma3", "dense"])
def test_a_fleet_apart_and_its_twin_agree(model: str) -> None:
    real, twin = compare(model, sessions=3)
    assert real[PREFILL].hit_tokens.keys() >= {"hbm", "peer"}, "nothing was read from the decoder"
    assert real[DECODE].hit_tokens.keys() >= {"hbm", "peer"}, "nothing was handed off"
    assert twin == real
