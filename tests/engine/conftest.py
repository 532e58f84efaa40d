"""The environment of in-process engines, set before anything imports vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import pytest

from examples.cpu_kernels import unsupported_reason
from examples.serving import use_engine_environment

use_engine_environment()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch  # noqa: E402 - it reads the environment

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
            lambda _: AdversarialDevice(lambda: rng.random() < 0.3, eager_forward=True),
        )
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and its dependencies warn about each other; here only our warnings are errors.

    Later marks win, so the last one added is the first to apply. And what vLLM has no kernels for
    on this CPU is skipped, by name.
    """
    lacking = unsupported_reason("deepseek_v4")
    for item in items:
        if "engine" in item.keywords:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:::hetero_connector.*"))
            if lacking and "deepseek_v4" in item.name:
                item.add_marker(pytest.mark.skip(reason=lacking))
