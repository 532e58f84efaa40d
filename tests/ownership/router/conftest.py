"""Two stub workers for all tests of a module, and routers in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stub_fleet import StubFleet
from scripts.browser import find_chromium
from tests.ownership.router.bench import RunningRouter, config_of

if find_chromium() is None:  # see `make test-page`
    collect_ignore = ["test_page.py"]

StartRouter = Callable[..., RunningRouter]


@pytest.fixture(scope="module")
def fleet() -> Iterator[StubFleet]:
    with StubFleet(2) as running:
        yield running


@pytest.fixture
def start_router(fleet: StubFleet, tmp_path: Path) -> Iterator[StartRouter]:
    """Start a router with these keys; its workers are the module's, if no others are given."""
    with ExitStack() as stack:

        def start(num_ready: int | None = None, **keys: Any) -> RunningRouter:
            if not {"workers", "workers_file", "workers_dns"} & keys.keys():
                keys["workers"] = fleet.urls
            return stack.enter_context(RunningRouter(config_of(tmp_path, **keys), num_ready))

        yield start


@pytest.fixture(scope="module")
def router(fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """One for all tests that need no keys of their own and harm no worker."""
    config = config_of(tmp_path_factory.mktemp("router"), workers=fleet.urls)
    with RunningRouter(config) as running:
        yield running
