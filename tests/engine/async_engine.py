"""Switch on vLLM's async scheduling on its CPU engine.

    with async_engine("gemma3", {"dram_gib": 0.1}) as llm:
        ...  # as with `harness.engine`; before `assert_no_leaks`: `drain(llm)`

Two things of the CPU platform stand against it, and nothing else is changed here. Its
`check_and_update_config` sets `async_scheduling` to False, whatever was asked for; that is undone
after it. And vLLM's model runner then makes CUDA events and a CUDA stream to copy its results
on; they get stand-ins that do nothing, for on a CPU a result is there when the call returns.
Scheduler, queue of batches, executors and the runner's use of tokens not known yet are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.plugins import load_general_plugins
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.engine.harness import engine, settle


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


_STAND_INS = {
    "Event": _Event,
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": lambda _: nullcontext(),
}


class AsyncWorker(CPUWorker):  # type: ignore[misc]
    """The worker's class, also in a process of its own, where it is found by name."""

    def init_device(self) -> None:
        self._stand_ins = ExitStack()
        for name, stand_in in _STAND_INS.items():
            self._stand_ins.enter_context(patch.object(torch.cuda, name, stand_in))
        super().init_device()

    def shutdown(self) -> None:
        super().shutdown()
        self._stand_ins.close()


@contextmanager
def async_engine(
    model: str, connector_extra: Mapping[str, Any] | None = None, **engine_args: Any
) -> Iterator[Any]:
    """Yield `harness.engine` with steps that are scheduled before the last one was reported."""
    load_general_plugins()  # one of them replaces the check for good, and must not replace ours
    check = CpuPlatform.check_and_update_config

    def checked(_: type, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    worker = f"{__name__}.{AsyncWorker.__name__}"
    with (
        patch.object(CpuPlatform, "check_and_update_config", classmethod(checked)),
        engine(model, connector_extra, worker_cls=worker, **engine_args) as llm,
    ):
        core = llm.llm_engine.engine_core.engine_core
        assert isinstance(core.scheduler, AsyncScheduler)
        assert core.batch_queue_size == 2
        yield llm


def drain(llm: Any) -> None:
    """Step until no batch is under way, as the busy loop of an engine core does."""
    settle(llm)
    while llm.llm_engine.engine_core.engine_core.batch_queue:
        llm.llm_engine.step()
