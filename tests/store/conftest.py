"""A store over a disk in memory, for every test that does not say otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clock import Clock
from tests.store.filling import Bench, Disk


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def bench(tmp_path: Path, disk: Disk) -> Bench:
    return Bench(tmp_path / "ssd", disk)
