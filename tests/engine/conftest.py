"""The environment of in-process engines, set before anything imports vLLM."""

from __future__ import annotations

import os

import pytest

from examples.cpu_kernels import why_not
from examples.serving import ENGINE_ENVIRONMENT

os.environ.update(ENGINE_ENVIRONMENT)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch

torch.set_num_threads(1)  # the variable is too late when another test imported torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and its dependencies warn about each other; here only our warnings are errors.

    Later marks win, so the last one added is the first to apply. And what vLLM has no kernels for
    on this CPU is skipped, by name.
    """
    lacking = why_not("deepseek_v4")
    for item in items:
        if "engine" in item.keywords:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:::hetero_connector.*"))
            if lacking and "deepseek_v4" in item.name:
                item.add_marker(pytest.mark.skip(reason=lacking))
