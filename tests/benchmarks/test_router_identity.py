"""The benchmark of the router's identity still measures turns that are named rightly."""

import pytest

from benchmarks import router_identity

pytestmark = pytest.mark.long


def test_a_small_run_has_every_figure() -> None:
    figures = router_identity.measure(num_tokens=6_000, turns=6, sessions=1)
    assert 4_000 < figures["tokens"] < 9_000
    assert figures["turn_ms"] > figures["render_ms"] > 0
    assert 5 < figures["kib_per_session"] < 50
    assert figures["us_per_new_token"] > 0
