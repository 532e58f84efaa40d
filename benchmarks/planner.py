"""`python -m benchmarks.planner [--json]`: the time and the accuracy of restore decisions.

`cost_error_median`, `cost_error_p95`: relative errors of predicted times to first token on a real
engine, see `cost_errors`; the worst of its models. `cost_noise_p95` is that of a perfect predictor.

`decision_us_131k`, `decision_us_1m`: microseconds of the scheduler's thread for one decision over
a prompt of 131,072 and of 1,048,576 tokens whose chunks are all stored; medians, the worst of all
models and tiers. Before each decision the cost model learns from a step and a load, as it does in
an engine, so that no cached table is still valid.

Only a run with the default options writes results.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import cost_errors
from benchmarks.goals import goal_table
from benchmarks.measure import is_default, machine_line, publish, rounded, table, timed
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, ChunkRange, SharedTiers, StoredChunk, Tier
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.spec.presets import PRESETS

MODELS = ("llama-3.1-8b", "gemma-3-27b", "deepseek-v4-flash")
SIZES = {"131k": 131_072, "1m": 1_048_576}
_REPEATS = 301
_STEP_TOKENS = 8192
_REPLAY_TOKENS = 8192
_DEADLINE_S = 10.0
_BUSY = EngineLoad(queued_tokens=2000, running_decodes=16, in_flight_bytes={Tier.SSD: 50_000_000})

ChunkState = Mapping[StateType, Tier]
Place = Callable[[int, int], ChunkState]
"""(chunk, chunks) -> the tiers of the chunk's state."""


@dataclass(frozen=True)
class DecisionTiming:
    """The median seconds of a decision."""

    model: str
    size: str
    held: str
    chunks: int
    decision_s: float
    replay_s: float
    """With the replay strategy: up to twice the boundaries to price."""


def places(model: ModelSpec) -> dict[str, Place]:
    """Return typical tiers of the chunks of a long prompt, by name."""
    dram, ssd = (dict.fromkeys(model.state_types, tier) for tier in (Tier.DRAM, Tier.SSD))
    bare_dram, bare_ssd = (
        dict.fromkeys(model.prefix_types, tier) for tier in (Tier.DRAM, Tier.SSD)
    )

    def mixed(chunk: int, chunks: int) -> ChunkState:
        full, bare = (dram, bare_dram) if 2 * chunk < chunks else (ssd, bare_ssd)
        return bare if chunk % 4 else full

    def half(chunk: int, chunks: int) -> ChunkState:
        return mixed(chunk, chunks) if 2 * chunk < chunks else bare_ssd

    return {
        "DRAM": lambda chunk, chunks: dram,
        "half DRAM, half SSD": lambda chunk, chunks: dram if 2 * chunk < chunks else ssd,
        "the same, every 4th checkpoint": mixed,
        # Where no checkpoint is near the end a replay cannot be ruled out by a bound.
        "the same, none of them on SSD": half,
    }


def measure(name: str, size: str, repeats: int) -> list[DecisionTiming]:
    """Time one model and prompt length, for every place."""
    model = PRESETS[name]()
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    chunks = SIZES[size] // layout.chunk_tokens
    timings = []
    for held, place in places(model).items():
        shared = SharedTiers()
        stored = [_stored(layout, i, place(i, chunks), shared) for i in range(chunks)]
        decision_s, replay_s = (
            _decision_s(model, layout, stored, replay_tokens, repeats)
            for replay_tokens in (0, _REPLAY_TOKENS)
        )
        timings.append(DecisionTiming(name, size, held, chunks, decision_s, replay_s))
    return timings


def _decision_s(
    model: ModelSpec,
    layout: ArtifactLayout,
    stored: list[StoredChunk],
    replay_tokens: int,
    repeats: int,
) -> float:
    costs = CostModel(ComputeRegression(), LoadModel(model.state_types), step_tokens=_STEP_TOKENS)
    planner = RestorePlanner(layout, costs, replay_tokens=replay_tokens, deadline_s=_DEADLINE_S)
    limit = stored[-1].chunk.end
    samples = []
    for repeat in range(repeats + 1):
        costs.compute.observe(1 + repeat % 2 * _STEP_TOKENS, 0, 0.02 + repeat % 2 * 0.4)
        for tier in (Tier.DRAM, Tier.SSD):
            costs.load.observe(tier, {model.prefix_types[0]: 10**8}, 0.02)
        samples.append(timed(lambda: planner.plan(stored, 0, limit, limit + 1, _BUSY)))
    return statistics.median(samples[1:])


def _stored(
    layout: ArtifactLayout, index: int, held: ChunkState, shared: SharedTiers
) -> StoredChunk:
    """Make stored chunks like those of the store's index."""
    key, parent = (ChunkKey(i.to_bytes(16, "big")) for i in (index + 1, index))
    size = layout.chunk_tokens
    tiers, number = shared.share(held)
    chunk = ChunkRange(key, parent, index * size, (index + 1) * size)
    return StoredChunk(chunk, tiers, number=number)


def figures(timings: list[DecisionTiming]) -> dict[str, float]:
    """Return the worst of each prompt length, with and without replay."""
    worst = {}
    for size in SIZES:
        of_size = [t for t in timings if t.size == size]
        worst[f"decision_us_{size}"] = 1e6 * max(t.decision_s for t in of_size)
        worst[f"decision_us_{size}_with_replay"] = 1e6 * max(t.replay_s for t in of_size)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the figures as a last line of JSON")
    parser.add_argument("--only", choices=("decisions", "costs"))
    parser.add_argument("--sessions", type=int, default=16, help="sessions judged, twice each")
    parser.add_argument("--model", choices=cost_errors.MODELS, help="costs of this one only")
    arguments = parser.parse_args()
    texts = [f"{machine_line()}; medians"]
    worst: dict[str, float] = {}
    details: dict[str, Any] = {}
    if arguments.only != "costs":
        timings = [x for name in MODELS for size in SIZES for x in measure(name, size, _REPEATS)]
        worst |= figures(timings)
        texts.append(_decision_table(timings))
        details["decisions"] = [vars(timing) for timing in timings]
    if arguments.only != "decisions":
        names = [arguments.model] if arguments.model else cost_errors.MODELS
        measured = [cost_errors.measure(name, arguments.sessions) for name in names]
        worst |= cost_errors.figures(measured)
        texts.append(cost_errors.report(measured))
        details["requests"] = [
            {"model": m.model, **x._asdict()} for m in measured for x in m.judged
        ]
    worst = rounded(worst)
    text = "\n\n".join([*texts, goal_table("planner", worst)])
    write = is_default(parser, arguments, free=("json",))
    publish("planner", text, worst, details, as_json=arguments.json, write=write)


def _decision_table(timings: list[DecisionTiming]) -> str:
    rows = [
        [t.model, t.size, t.held, t.chunks, f"{1e6 * t.decision_s:.0f}", f"{1e6 * t.replay_s:.0f}"]
        for t in timings
    ]
    header = ["model", "tokens", "chunks are in", "chunks", "decision, us", "with replay, us"]
    return table(header, rows)


if __name__ == "__main__":
    main()
