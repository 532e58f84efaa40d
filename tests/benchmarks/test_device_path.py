"""The counts of `benchmarks.device_path` stay below their goals on every machine."""

from __future__ import annotations

import pytest

from benchmarks.device_path import _MODELS, measure
from hetero_connector.spec.presets import PRESETS

MOST_LAUNCHES = {"70b_tp8": 40, "v4_flash": 16}
"""For a restore of 131,072 tokens."""


@pytest.mark.parametrize("parked", [False, True], ids=["with its forward", "between steps"])
@pytest.mark.parametrize("name", MOST_LAUNCHES)
def test_a_long_restore_is_few_launches_and_no_wait(name: str, parked: bool) -> None:
    preset, settings, calls_hooks = _MODELS[name]
    found = measure(PRESETS[preset](**settings), calls_hooks, parked=parked, repeats=1)
    assert 0 < found.launches <= MOST_LAUNCHES[name]
    assert found.syncs == 0
