"""The environment of in-process engines, set before anything imports vLLM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from examples.cpu_kernels import unsupported_reason
from examples.serving import use_engine_environment
from scripts.browser import find_chromium

use_engine_environment()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch  # noqa: E402 - it reads the environment

from tests.engine import harness  # noqa: E402
from tests.engine.groups import group_of  # noqa: E402

collect_ignore = []
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":  # see tests/second_runner
    collect_ignore += ["test_full_steps.py", "test_random_sampling.py"]
if importlib.util.find_spec("ray") is None:  # see `make test-ray`
    collect_ignore += ["test_ray.py", "test_ray_router.py", "test_ray_serve.py"]
if find_chromium() is None:  # see `make test-page`
    collect_ignore.append("test_page.py")

torch.set_num_threads(1)  # the variable is too late when another test imported torch


@pytest.fixture(scope="session", autouse=True)
def _adversarial_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--adversarial-device` every load is layer-wise, and as late or early as allowed."""
    if not request.config.getoption("--adversarial-device"):
        yield
        return
    from hetero_connector.engine.worker import worker_side
    from tests.engine.adversarial_device import AdversarialDevice

    rng = Random(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_side, "OVERLAP_FROM_BYTES", 0)
        patch.setattr(
            worker_side,
            "device_of",
            lambda *_: AdversarialDevice(lambda: rng.random() < 0.3, eager_forward=True),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def _full_decodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--full-decodes` steps are graphs as on CUDA by default; see `full_steps`."""
    if not request.config.getoption("--full-decodes"):
        yield
        return
    from tests.engine.full_steps import full_decodes

    with full_decodes() as steps:
        yield
    assert steps, "no step was a FULL graph"


@pytest.fixture
def shared_llm(model: str) -> Iterator[Any]:
    """The engine that several modules share, with empty caches and its settings as at its start.

    A test that leaves anything behind fails, and the next one gets a new engine.
    """
    try:
        llm = harness.shared_engine(model)
        harness.forget(llm)
        assert harness.sealed(llm) == [], "something of an earlier test could be restored"
        yield llm
        harness.assert_shared_engine_is_as_at_its_start()
    except BaseException:
        harness.end_shared_engine()
        raise


@pytest.fixture
def stock_llm(model: str) -> Any:
    """The shared engine without the connector, its own prefix cache empty."""
    llm = harness.shared_engine(model, has_connector=False)
    assert llm.reset_prefix_cache()
    return llm


@pytest.fixture(scope="session", autouse=True)
def _no_shared_engine_at_the_end() -> Iterator[None]:
    yield
    harness.end_shared_engine()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order and group the tests on a real engine; let only warnings of this project be errors.

    Tests of one shared engine follow each other (`groups`). Those with the longest time limits come
    first: two processes then end at nearly the same time.
    """
    lacking = unsupported_reason("deepseek_v4")
    on_engine, first_of_group = [], dict[str, int]()
    for place, item in enumerate(items):
        if "engine" in item.keywords:
            # Later marks win, so the last one added is the first to apply.
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:::hetero_connector.*"))
            if lacking and "deepseek_v4" in item.name:
                item.add_marker(pytest.mark.skip(reason=lacking))
        if item.get_closest_marker("engine"):
            on_engine.append(item)
            first_of_group.setdefault(group_of(item.nodeid), place)

    def rank(item: pytest.Item) -> tuple[float, int]:
        limit = item.get_closest_marker("timeout")
        return -limit.args[0] if limit else 0, first_of_group[group_of(item.nodeid)]

    items[:] = [item for item in items if not item.get_closest_marker("engine")]
    items += sorted(on_engine, key=rank)
