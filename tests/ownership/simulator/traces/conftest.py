"""Tests on recorded traces run only if their directory is given: `pytest --traces DIR`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without `--traces` their tests do not exist: a test that cannot fail is none."""
    of_recorded = collection_path.name == "test_recorded_traces.py"
    return True if of_recorded and config.getoption("--traces") is None else None
