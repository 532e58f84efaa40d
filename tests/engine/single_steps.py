"""Add requests to an engine and run it one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest

from hetero_connector.connector import HeteroConnector

_ids = count()


def add(llm: Any, prompt: Sequence[int], max_tokens: int = 8, **sampling: Any) -> str:
    """Add a request without running a step."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling
    )
    request_id = f"by-hand-{next(_ids)}"
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, parameters)
    return request_id


def step(llm: Any, times: int = 1) -> list[Any]:
    """Run some engine steps; return their outputs."""
    return [output for _ in range(times) for output in llm.llm_engine.step()]


def worker_connector() -> HeteroConnector:
    """Return the worker side of a worker in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    assert isinstance(connector, HeteroConnector)
    return connector


WORKER_HOOKS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


def hooks_of_next_step(llm: Any) -> list[str]:
    """Run a step; return the worker's hooks in the order in which each was called first."""
    connector, called = worker_connector(), list[str]()

    def call(name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return hook(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in WORKER_HOOKS:
            patch.setattr(connector, name, partial(call, name, getattr(connector, name)))
        step(llm)
    return list(dict.fromkeys(called))
