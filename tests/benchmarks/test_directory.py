"""The benchmark of the directory still claims and finds what it says."""

import pytest

from benchmarks import directory
from benchmarks.goals import GOALS

pytestmark = pytest.mark.long


def test_a_small_run_has_every_figure() -> None:
    figures, tables = directory.measure(artifacts=1, repeats=2)
    assert figures.keys() >= GOALS["directory"].keys()
    assert figures["lookup_decoded_ms_1m"] > 0
    assert figures["found_ms_1m"] > 0
    assert 50 < figures["redis_bytes_per_artifact"] < 1_000
    assert "dense, every record decoded" in tables
