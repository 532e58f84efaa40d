"""A stock vLLM engine in a process of its own, which times one call at a time.

vLLM keeps its connector in a global variable, so an engine with HeteroConnector and one without
cannot run in one process. They take turns: between calls an engine is idle, and with turns of a
few seconds the machine's noise affects both.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.accounts import registered
from examples.serving import engine_arguments, kv_transfer_config, use_engine_environment
from hetero_connector.units import GIB

CHECKPOINTS = Path(__file__).parents[1] / ".cache" / "checkpoints"
_FLUSH_DEADLINE_S = 120.0
_ON_A_GPU = {"kv_cache_memory_bytes": GIB, "gpu_memory_utilization": 0.2}
"""The KV cache of a CPU's engine. vLLM starts if that part of the memory is free; with its default
of 0.92 a second engine would not start."""
_WAKING_TOKENS = 8
"""Fewer than a block, so that nothing of them is kept."""


@dataclass(frozen=True)
class Timing:
    """The times of one greedy completion."""

    ttft_s: float
    """Seconds from the call to the first token."""
    token_s: float
    """Seconds per decoded token after the first; 0 without one."""
    cached_tokens: int
    """Prompt tokens that were not computed."""


class EngineProcess:
    """An engine in another process.

    `extra`: HeteroConnector's configuration; None for no connector. `kind`: the class of the
    engine, which may add methods for `call`.
    """

    def __init__(
        self,
        model: str,
        extra: Mapping[str, Any] | None = None,
        kind: type[Engine] | None = None,
        **engine_args: Any,
    ) -> None:
        use_engine_environment()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, kind or Engine, model, extra, engine_args), daemon=True
        )
        self._process.start()
        theirs.close()
        self._receive()  # ready

    def complete(self, prompt: Sequence[int], tokens: int = 1, recompute: bool = False) -> Timing:
        """Complete a prompt. With `recompute` no cached state is used."""
        timing: Timing = self.call("complete", list(prompt), tokens, recompute)
        return timing

    def wake(self) -> None:
        """Compute a few tokens: after a pause the next answer would take longer for that."""
        self.complete(prompt_tokens(_WAKING_TOKENS, 0))

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own prefix cache, not the connector's store."""
        self.call("reset_prefix_cache")

    def flush(self) -> None:
        """Wait until all sealed state is on SSD."""
        self.call("flush")

    def leave_on_ssd(self) -> None:
        """Write all sealed state to SSD and let it leave DRAM, as by eviction."""
        self.call("leave_on_ssd")

    def restored(self) -> dict[str, int]:
        """Return the bytes restored since the last call, by tier.

        A GPU may end the copies of a load after the answer to it: the next step reports them.
        """
        self.wake()
        by_tier: dict[str, int] = self.call("restored")
        return by_tier

    def close(self) -> None:
        """End the engine. Idempotent."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine in the other process."""
        self._pipe.send((name, arguments))
        return self._receive()

    def _receive(self) -> Any:
        failure, result = self._pipe.recv()
        if failure is not None:
            raise RuntimeError(f"the engine process failed: {failure}")
        return result


def prompt_tokens(num_tokens: int, seed: int) -> list[int]:
    """Return random byte tokens."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()
    return tokens


class Engine:
    """The engine itself, in its process."""

    def __init__(
        self, model: str, extra: Mapping[str, Any] | None, engine_args: Mapping[str, Any]
    ) -> None:
        import torch
        from vllm import LLM

        from examples.checkpoints import write_checkpoint

        torch.set_num_threads(1)
        arguments = engine_arguments(model) | dict(engine_args)
        if torch.cuda.is_available():
            arguments = _ON_A_GPU | arguments
        if extra is not None:
            # The cost of a restore from a given tier is measured, not the planner's choice.
            extra = {"planner": "always_load", "prefetch": "off", **extra}
            arguments["kv_transfer_config"] = kv_transfer_config(extra)
        self._llm = LLM(
            model=str(write_checkpoint(model, CHECKPOINTS)),
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **arguments,
        )
        self._counted: dict[str, float] = {}

    def complete(self, prompt: list[int], tokens: int, recompute: bool) -> Timing:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=recompute or None,
        )
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        total_s = time.perf_counter() - started
        times = output.metrics
        decode_s = times.last_token_ts - times.first_token_ts
        return Timing(total_s - decode_s, decode_s / max(1, tokens - 1), output.num_cached_tokens)

    def reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine did not reset its prefix cache")

    def flush(self) -> None:
        if not self._store().flush(_FLUSH_DEADLINE_S):
            raise RuntimeError("the store did not reach the SSD in time")

    def leave_on_ssd(self) -> None:
        self.flush()
        store = self._store()
        ends_s = time.monotonic() + _FLUSH_DEADLINE_S
        while store.catalog.tiers.pinned():  # a sampled hit is pinned while it is checked
            if time.monotonic() > ends_s:
                raise RuntimeError("state stayed in use")
            time.sleep(1e-3)
        store.leave_to_ssd()

    def restored(self) -> dict[str, int]:
        now: dict[str, float] = {}
        for (name, tier, _), value in registered().items():
            if name == "heterocache_restored_bytes":
                now[tier] = now.get(tier, 0) + value
        new = {tier: int(value - self._counted.get(tier, 0)) for tier, value in now.items()}
        self._counted = now
        return {tier: value for tier, value in new.items() if value}

    def _store(self) -> Any:
        """Return the store; a benchmark may use private names."""
        core = self._llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector._scheduler.store

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _serve(
    pipe: Any,
    kind: type[Engine],
    model: str,
    extra: Mapping[str, Any] | None,
    engine_args: Mapping[str, Any],
) -> None:
    try:
        engine = kind(model, extra, engine_args)
    except Exception as error:
        pipe.send((repr(error), None))
        raise
    pipe.send((None, None))
    while (order := pipe.recv()) is not None:
        name, arguments = order
        try:
            pipe.send((None, getattr(engine, name)(*arguments)))
        except Exception as error:
            pipe.send((repr(error), None))
    engine.shutdown()
