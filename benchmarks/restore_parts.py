"""`python -m benchmarks.restore_parts [MODEL ...] [--json]`: where the time of a restore goes.

An engine restores a prompt from DRAM and then hits it in its own cache, by turns, and the methods
that both pass are timed. Before each it computes a few tokens: after a pause the next answer takes
longer. Each part is the median of its milliseconds; what is in brackets is a share of the part
above it. The forward of a restore is longer, because it reads what was just copied, or waits for
copies that it overlaps with. Answers have one token, so the end of the request counts.
`beyond_memcpy_ms_MODEL`: what a restore adds beyond a plain copy of the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.engine_process import Engine, EngineProcess, prompt_tokens
from benchmarks.measure import Memcpy, Samples, machine_line, publish, rounded, table
from examples.cpu_kernels import runnable

_TURNS = 30
_CASES = {"gemma3": 8196, "gptoss": 8196, "deepseek_v4": 3844, "qwen3_next": 3844}
"""Prompt tokens by model: just beyond a chunk."""
_SCHEDULER = "hetero_connector.engine.scheduler.scheduler_side:SchedulerSide"
_WORKER = "hetero_connector.engine.worker.worker_side:WorkerSide"
_PLANNER = "hetero_connector.engine.worker.copy_plan:CopyPlanner"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


class _Part(NamedTuple):
    name: str
    where: str
    """Module and class."""
    methods: tuple[str, ...]


_PARTS = (
    _Part("match and plan", _SCHEDULER, ("match",)),
    _Part("admit", _SCHEDULER, ("on_allocated",)),
    _Part("order the step", _SCHEDULER, ("order_step",)),
    _Part("load before the forward", _WORKER, ("start_loads",)),
    _Part("[plan the copies]", _PLANNER, ("plan_loads", "plan_layerwise")),
    _Part("forward", _RUNNER, ("_model_forward",)),
    _Part("[wait for copies]", _WORKER, ("ensure_loaded",)),
    _Part("end the step", _WORKER, ("end_step",)),
    _Part("learn and release", _SCHEDULER, ("on_report",)),
    _Part("end the request", _SCHEDULER, ("on_finished",)),
)


class TimedEngine(Engine):
    """An engine that adds up the seconds of each part."""

    def __init__(self, model: str, extra: Mapping[str, Any] | None, args: Mapping[str, Any]):
        super().__init__(model, extra, args)
        self._seconds: dict[str, float] = defaultdict(float)
        for part in _PARTS:
            module, _, name = part.where.partition(":")
            kind = getattr(importlib.import_module(module), name)
            for method in part.methods:
                setattr(kind, method, self._timed(part.name, getattr(kind, method)))

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[part] += time.perf_counter() - began_s

        return timed

    def take_parts(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        taken = {part.name: self._seconds[part.name] for part in _PARTS}
        self._seconds.clear()
        return taken


def measure(model: str, turns: int) -> tuple[Samples, Samples, int]:
    """Return the samples of restores, those of hits, and the bytes of a restore."""
    restores, hits = Samples(), Samples()
    num_tokens = _CASES[model]
    prompt = prompt_tokens(num_tokens, 0)
    with EngineProcess(
        model, {"dram_gib": 1.0, "planner": "cost"}, TimedEngine, max_model_len=num_tokens + 64
    ) as engine:
        for other in range(1, 4):
            engine.complete(prompt_tokens(num_tokens, other))
        engine.complete(prompt, 40)
        engine.reset_prefix_cache()
        engine.restored()
        engine.complete(prompt)
        size_bytes = sum(engine.restored().values())
        memcpy = Memcpy(size_bytes)
        for _ in range(turns):
            engine.reset_prefix_cache()
            for samples in (restores, hits):
                engine.wake()
                engine.call("take_parts")
                timing = engine.complete(prompt)
                samples.add("first token", timing.ttft_s)
                for name, seconds in engine.call("take_parts").items():
                    samples.add(name, seconds)
            restores.add("memcpy", memcpy.reused())
        restored = engine.restored()
        if restored != {"dram": turns * size_bytes}:
            raise RuntimeError(f"wrong tiers or bytes: {restored}")
    return restores, hits, size_bytes


def _table(model: str, restores: Samples, hits: Samples, size_bytes: int) -> str:
    rows = []
    for name, own in hits.medians().items():
        restore_s = restores.median(name)
        values = (restore_s, own, restore_s - own)
        rows.append([name, *(f"{1e3 * value:.2f}" for value in values)])
    memcpy_ms = 1e3 * restores.median("memcpy")
    rows.append([f"memcpy of {size_bytes / 1e6:.1f} MB", f"{memcpy_ms:.2f}", "", ""])
    return table([f"{model}, ms", "restored", "own hit", "more"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restore_parts")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(_CASES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--turns", type=int, default=_TURNS, help="(default 30)")
    given = parser.parse_args()
    if given.turns < 1:
        parser.error("--turns is at least 1")
    if unknown := set(given.models) - _CASES.keys():
        parser.error(f"no model {min(unknown)!r}; there are {', '.join(_CASES)}")
    tables, figures = [], {}
    for model in runnable(given.models or _CASES):
        restores, hits, size_bytes = measure(model, given.turns)
        tables.append(_table(model, restores, hits, size_bytes))
        pairs = zip(
            restores.by_name["first token"],
            hits.by_name["first token"],
            restores.by_name["memcpy"],
            strict=True,
        )
        beyond = Samples({"s": [restored - own - memcpy for restored, own, memcpy in pairs]})
        figures[f"beyond_memcpy_ms_{model}"] = 1e3 * beyond.median("s")
    text = "\n\n".join([f"{machine_line()}; medians of {given.turns}", *tables])
    publish(
        "restore_parts",
        text,
        rounded(figures),
        vars(given),
        as_json=given.json,
        write=not given.models and given.turns == _TURNS,
    )


if __name__ == "__main__":
    main()
