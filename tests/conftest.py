"""Settings of every test."""

import pytest
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", metavar="DIR", help="check the readers on the public traces in it")


# A busy machine is slow, not wrong: only the examples decide.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
