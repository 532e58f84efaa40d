"""Errors come back from another process as they were."""

from __future__ import annotations

import pickle

import pytest

from hetero_connector import errors
from hetero_connector.errors import HeteroCacheError


def kinds(base: type[HeteroCacheError]) -> list[type[HeteroCacheError]]:
    """The classes in `errors`; others are made where they are raised."""
    below = (kind for x in base.__subclasses__() for kind in kinds(x))
    return [kind for kind in (base, *below) if kind.__module__ == errors.__name__]


MADE = {
    errors.ConfigError: errors.ConfigError("dram_gib", "is no number"),
    errors.StaleEpochError: errors.StaleEpochError(7, "it was retired"),
    errors.NoWorkerError: errors.NoWorkerError(),
    errors.TransferError: errors.TransferError(28, "No space left on device"),
    errors.TraceError: errors.TraceError("a.jsonl", "not JSON", line=3, field="hash_ids"),
    errors.RouterConfigError: errors.RouterConfigError("fleet.yaml", ["port: is no port", "b"]),
    errors.SimulationError: errors.SimulationError("fleet.yaml", "no worker", "links[0].to"),
}
"""The classes whose constructors take more than a text."""


@pytest.mark.parametrize("kind", kinds(HeteroCacheError), ids=lambda kind: kind.__name__)
def test_an_error_is_pickled_as_it_is(kind: type[HeteroCacheError]) -> None:
    error = MADE[kind] if kind in MADE else kind("what is wrong")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args) == (kind, str(error), error.args)
    assert vars(again) == vars(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
