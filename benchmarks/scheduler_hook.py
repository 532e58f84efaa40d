"""`python -m benchmarks.scheduler_hook [--json]`: the cost of one long prompt on the scheduler.

`hook_ms_131k`: milliseconds on the scheduler's thread to match, plan, admit, order the load and
release it, without hashing (`hash_ms_131k`); the worst of three models, medians over rounds by
turns. Before each prompt the cost model learns from a step and a load, as it does in an engine; the
load ends what the planner has cached of loads from DRAM.
`queue_us_1024`: microseconds to find the engine's load before a request, with 1,024 requests that
decode and 1,024 that wait; it is a part of the match. `decode_us_1024`: microseconds to order a
step in which those 1,024 decode and complete no chunk.

It runs the real scheduler side over a real store that has every chunk of the prompt in DRAM. Only
vLLM's request and block table are stand-ins. Pages are small, because the hook moves no bytes and
512 real chunks would not fit on a small machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

from benchmarks.goals import goal_table
from benchmarks.measure import Samples, machine_line, publish, rounded, table, timed
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import Full
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.spec import ModelSpec
from hetero_connector.spec.presets import PRESETS
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig

PROMPT_TOKENS = 131_072
CROWD = 1_024
_FINGERPRINT = b"benchmark"
_PAGE_BYTES = 64
MODELS = ("llama-3.1-8b", "gemma-3-27b", "deepseek-v4-flash")


@dataclass(frozen=True)
class HookTiming:
    """Medians of one model, in seconds, for a prompt of `PROMPT_TOKENS`."""

    hash_s: float
    match_s: float
    admit_s: float
    step_s: float
    release_s: float
    queue_s: float
    """To find the load before a request, with `CROWD` that decode and `CROWD` that wait."""
    decode_s: float
    """To order a step in which `CROWD` requests decode and complete no chunk."""
    chunks: int
    state_types: int

    @property
    def hook_s(self) -> float:
        """Seconds of the scheduler's thread for the prompt, without hashing."""
        return self.match_s + self.admit_s + self.step_s + self.release_s


def measure(preset: str, repeats: int = 31) -> HookTiming:
    """Time the hook for a preset model (`hetero_connector.spec.presets`)."""
    model = _shrunk(PRESETS[preset]())
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    hasher = ChainHasher(_FINGERPRINT, layout.chunk_tokens)
    tokens = [i * 7919 % 100_000 for i in range(PROMPT_TOKENS + 1)]
    costs = CostModel(ComputeRegression(), LoadModel(model.state_types))
    samples = Samples()
    with _filled_store(layout, hasher, tokens) as (store, recorder):
        side = _scheduler_side(layout, hasher, store, recorder, costs)
        for repeat in range(repeats + 1):
            _learn(costs, model)
            _one_request(side, f"request-{repeat}", tokens, samples if repeat else Samples())
        newest = _crowd(side)
        for _ in range(repeats):
            samples.add("queue", timed(lambda: side._engine_load(newest, [])))
        decodes = _output([], {f"crowd-{number}": 1 for number in range(CROWD)})
        for _ in range(repeats):
            samples.add("decode", timed(lambda: side.order_step(decodes)))
        store.check_integrity()
    medians = samples.medians()
    return HookTiming(
        **{f"{part}_s": seconds for part, seconds in medians.items()},
        chunks=PROMPT_TOKENS // layout.chunk_tokens,
        state_types=len(model.state_types),
    )


def _learn(costs: CostModel, model: ModelSpec) -> None:
    """Let the cost model learn from a step, and from a load: the planner's table is made again."""
    costs.compute.observe(8_192, 0, 0.4)
    costs.load.observe(Tier.DRAM, {model.prefix_types[0]: 10**8}, 0.02)


def measure_all(rounds: int = 7) -> dict[str, HookTiming]:
    """Time all models by turns, because the machine's speed changes within seconds."""
    timings = [{name: measure(name, 13) for name in MODELS} for _ in range(rounds)]
    return {name: _median([timing[name] for timing in timings]) for name in MODELS}


def _median(timings: Sequence[HookTiming]) -> HookTiming:
    names = [field.name for field in fields(HookTiming)]
    return HookTiming(**{x: statistics.median(getattr(t, x) for t in timings) for x in names})


def figures_of(timings: Mapping[str, HookTiming]) -> dict[str, float]:
    """Return the figures of the slowest model, in the units of their names."""
    return {
        "hook_ms_131k": 1e3 * max(timing.hook_s for timing in timings.values()),
        "hash_ms_131k": 1e3 * max(timing.hash_s for timing in timings.values()),
        "queue_us_1024": 1e6 * max(timing.queue_s for timing in timings.values()),
        "decode_us_1024": 1e6 * max(timing.decode_s for timing in timings.values()),
    }


def report(timings: Mapping[str, HookTiming]) -> str:
    """Return a table of the parts."""
    parts = ("hash", "match", "admit", "step", "release", "hook", "queue", "decode")
    header = ["131,072 tokens, ms", "chunks", "types", *parts]
    rows = [
        [name, t.chunks, t.state_types, *(f"{1e3 * getattr(t, f'{p}_s'):.3f}" for p in parts)]
        for name, t in timings.items()
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_hook")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    timings = measure_all()
    figures = rounded(figures_of(timings))
    goals = goal_table("scheduler_hook", figures)
    text = f"{machine_line()}; medians\n\n{report(timings)}\n\n{goals}"
    details = {name: vars(timing) for name, timing in timings.items()}
    publish("scheduler_hook", text, figures, details, as_json=arguments.json)


def _one_request(side: Any, request_id: str, tokens: list[int], samples: Samples) -> None:
    from hetero_connector.engine.messages import WorkerReport

    request = _request(request_id, tokens)
    tracker = side._track(request)  # `match` does it first; done here to hash before

    def hash_all() -> None:
        tracker.grow()
        for _ in tracker.chain.chunks():
            pass

    samples.add("hash", timed(hash_all))
    found: list[Any] = []
    samples.add("match", timed(lambda: found.append(side.match(request, 0))))
    if found != [(PROMPT_TOKENS, False)]:
        raise RuntimeError(f"expected the whole prompt from DRAM, got {found}")
    samples.add("admit", timed(lambda: side.on_allocated(request, PROMPT_TOKENS)))
    request.num_computed_tokens = PROMPT_TOKENS
    block_ids = side._kv_cache_manager.get_block_ids(request_id)  # vLLM calls it, too
    output = _output([SimpleNamespace(req_id=request_id, block_ids=block_ids)], {request_id: 1})
    meta: list[Any] = []
    samples.add("step", timed(lambda: meta.append(side.order_step(output))))
    report = WorkerReport(loaded=Counter(x.load_id for x in meta[0].loads))
    samples.add("release", timed(lambda: side.on_report(report)))
    side._trackers.pop(request_id)
    side._queue.remove(request_id)


def _output(new: Sequence[Any], scheduled: Mapping[str, int]) -> Any:
    """Return a stand-in for a `SchedulerOutput`."""
    return SimpleNamespace(
        scheduled_new_reqs=new,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        preempted_req_ids=None,
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
    )


def _crowd(side: Any) -> Any:
    """Add `CROWD` requests that decode and as many that wait; return the last one's tracker."""
    from vllm.v1.request import RequestStatus

    for number in range(2 * CROWD):
        request = _request(f"crowd-{number}", [number] * 16)
        side.match(request, 0)
        if number < CROWD:
            side.on_allocated(request, 0)
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, 16
    side.order_step(_output([], {}))
    return side._trackers[request.request_id]


def _scheduler_side(
    layout: ArtifactLayout,
    hasher: ChainHasher,
    store: ArtifactStore,
    recorder: Recorder,
    costs: CostModel,
) -> Any:
    from hetero_connector.engine.scheduler.scheduler_side import Policies, SchedulerSide

    side = SchedulerSide(
        layout,
        hasher,
        store,
        recorder,
        Policies(RestorePlanner(layout, costs), Full(), prefetch="auto"),
        layerwise=True,
        load_deadline_s=10.0,
    )
    groups = max(x.group for x in layout.model.layers) + 1
    blocks = []
    for group in range(groups):
        sizes = {x.block_tokens for x in layout.model.layers if x.group == group}
        pages = range(1, PROMPT_TOKENS // min(sizes, default=PROMPT_TOKENS) + 2)
        blocks.append([SimpleNamespace(block_id=page) for page in pages])
    manager = SimpleNamespace(
        get_blocks=lambda request_id: SimpleNamespace(blocks=blocks),
        get_block_ids=lambda request_id: tuple([b.block_id for b in g] for g in blocks),
    )
    side.bind(manager)
    return side


@contextmanager
def _filled_store(
    layout: ArtifactLayout, hasher: ChainHasher, tokens: list[int]
) -> Iterator[tuple[ArtifactStore, Recorder]]:
    recorder = Recorder()
    chunks = PROMPT_TOKENS // layout.chunk_tokens
    slot_bytes = sum(-(-n // 4096) * 4096 for n in layout.max_bytes.values())
    store = ArtifactStore.open(
        layout.max_bytes,
        StoreConfig(dram_bytes=(chunks + 1) * slot_bytes * 5 // 4),  # some is in unfilled zones
        recorder,
        chunk_tokens=layout.chunk_tokens,
        fingerprint=_FINGERPRINT,
        description={},
    )
    try:
        chain = RequestChain(hasher)
        chain.extend(tokens)
        for chunk in chain.chunks():
            sizes = {
                t: layout.artifact_bytes(t, chunk.start, chunk.end)
                for t in layout.model.state_types
            }
            save = store.begin_save(chunk, sizes)
            if save is None:
                raise RuntimeError("the store is too small for the prompt")
            store.complete_save(save)
        yield store, recorder
    finally:
        store.close()


def _request(request_id: str, tokens: list[int]) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        status=None,
        lora_request=None,
        mm_features=None,
        cache_salt=None,
        prompt_embeds=None,
        pooling_params=None,
        resumable=False,
        skip_reading_prefix_cache=False,
        session_id=None,
        kv_transfer_params=None,
    )


def _shrunk(model: ModelSpec) -> ModelSpec:
    return replace(
        model,
        layers=tuple(
            replace(x, page_bytes=_PAGE_BYTES, page_stride_bytes=_PAGE_BYTES, runs=())
            for x in model.layers
        ),
    )


if __name__ == "__main__":
    main()
