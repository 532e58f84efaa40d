"""Settings of every test."""

import gc
import os
from collections.abc import Generator, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.engine.groups import group_of

_ENGINE_FOLDERS = ("tests/engine/", "tests/examples/")
"""The folders that `make test-engine` collects. All others take half a minute in each process."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a wrong name is wrong at once, not after retries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", metavar="DIR", help="check the readers on the public traces in it")
    parser.addoption(
        "--adversarial-device",
        action="store_true",
        help="engines in this process copy as late or as early as may be, drawn for each copy",
    )
    parser.addoption(
        "--full-decodes",
        action="store_true",
        help="engines in this process run decodes as FULL graphs (second model runner only)",
    )


class GroupScheduling(LoadScopeScheduling):
    """Give each process of pytest-xdist whole groups of tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: torch, vLLM and transformers are imported here, a million
    objects that outlive every test. It would look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test on the real engine where `make test-engine` would not look for it."""
    for item in items:
        is_run = item.get_closest_marker("engine") and not item.get_closest_marker("slow")
        if is_run and not item.nodeid.startswith(_ENGINE_FOLDERS):
            raise pytest.UsageError(
                f"{item.nodeid}: it needs an engine, so it is in {_ENGINE_FOLDERS}"
            )


@pytest.fixture(scope="session", autouse=True)
def _the_same_hits_are_sampled() -> Iterator[None]:
    """A store checks some of its hits, chosen at random: one test in a hundred would see a check
    under way, another each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero_connector.store.catalog.catalog.Random", lambda: Random(0))
        yield


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look for what was left behind, and print what they find


# A busy machine is slow, not wrong: only the examples decide. `make test` draws the same ones each
# time, so that what it refuses can be repeated; `make test-search` draws new ones, twice as many.
_SLOW_IS_FINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=50, **_SLOW_IS_FINE)
settings.register_profile("search", **_SLOW_IS_FINE)
settings.load_profile("repeatable")
