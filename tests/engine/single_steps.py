"""Add requests to an engine and run it one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

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
