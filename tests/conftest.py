"""Settings of every test."""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a wrong name is wrong at once, not after retries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", metavar="DIR", help="check the readers on the public traces in it")


# A busy machine is slow, not wrong: only the examples decide. `make test` draws the same ones each
# time, so that what it refuses can be repeated; `make test-search` draws new ones.
_SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **_SLOW_IS_FINE)
settings.register_profile("search", **_SLOW_IS_FINE)
settings.load_profile("repeatable")
