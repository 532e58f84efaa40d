"""The errors of the planner's predictions on a real engine.

For each request it compares the predicted seconds to the first token (queue, load and compute
together) with the observed seconds from the request's submission to its first token. Every
prediction is made before its request runs, by a cost model that starts without a profile and
learns online. The connector asks its planner only if something is stored; otherwise the benchmark
asks it just before the request.

Requests are turns of sessions: 256 to 8,000 tokens, the first turn cold, the others restored from
DRAM or from an SSD slowed to `SSD_BANDWIDTH`. The first `LEARNING` requests are not counted. Then
every session is served twice, with other tokens but the same lengths and tiers, in random order:
two requests of equal cost. Their difference is noise that no model can predict: |a - b| / sqrt 2,
over their mean, is distributed like the error of a predictor that knows the true mean.
"""

from __future__ import annotations

import math
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine_process import EngineProcess, prompt_tokens
from benchmarks.measure import percentile, table
from benchmarks.planned_engine import PlannedEngine
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.pricing import EngineLoad

MODELS = ("dense-bench", "gemma3")
LEARNING = 50
LONGEST = 8000
SSD_BANDWIDTH = 0.5e9
"""Bytes a second."""
_LENGTHS = ((256, 1024), (1024, 4096), (4096, LONGEST + 1))


class Turn(NamedTuple):
    """One request of a session: the prompt so far and `new_tokens` more."""

    tier: Tier | None
    """The tier of the prompt so far; None if it is not stored."""
    new_tokens: int


class Judged(NamedTuple):
    """One counted request."""

    session: int
    turn: int
    tier: Tier | None
    tokens: int
    restored: int
    """Tokens that were not computed."""
    predicted_s: float
    observed_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.observed_s) / self.observed_s


class PartError(NamedTuple):
    """The errors of one part of the cost model, each sample predicted before it was learned."""

    part: str
    samples: int
    median: float
    p95: float


@dataclass(frozen=True)
class CostErrors:
    """The errors on one model's engine."""

    model: str
    judged: list[Judged]
    parts: list[PartError]

    def noise(self) -> list[float]:
        """Return the noise of each pair that was restored alike."""
        pairs: dict[tuple[int, int, int], list[float]] = {}
        for x in self.judged:
            pairs.setdefault((x.session, x.turn, x.restored), []).append(x.observed_s)
        return [
            abs(pair[0] - pair[1]) / math.sqrt(2) / statistics.fmean(pair)
            for pair in pairs.values()
            if len(pair) == 2
        ]


class JudgedEngine(PlannedEngine):
    """A `PlannedEngine` that also returns the prediction for a request."""

    def judge(self, prompt: list[int]) -> tuple[float, float, int]:
        """Return the predicted and observed TTFT in seconds, and the tokens not computed."""
        tokens = len(prompt)
        cold = self._steered.planner.plan([], 0, tokens - 1, tokens, EngineLoad())
        self._steered.first = None
        observed_s, restored = self.serve(prompt, "planned", 0)
        decision = self._steered.first or cold
        return decision.predicted.ttft_s, observed_s, restored

    def part_errors(self) -> list[PartError]:
        costs = self._steered.planner.costs
        parts = {"steps": costs.compute.errors} | {
            f"loads from {tier.name}": costs.load.errors(tier) for tier in (Tier.DRAM, Tier.SSD)
        }
        return [PartError(name, e.count, e.median, e.p95) for name, e in parts.items()]


def measure(model: str, sessions: int, seed: int = 0) -> CostErrors:
    """Learn from `LEARNING` requests, then compare `sessions` sessions, each served twice."""
    parent = Path.cwd() / ".cache"
    parent.mkdir(exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="cost-errors-", dir=parent)
    extra = {"dram_gib": 1.0, "ssd_dir": scratch, "ssd_gib": 2.0, "planner": "cost"}
    rng = random.Random(seed)
    try:
        with EngineProcess(model, extra, JudgedEngine, max_model_len=LONGEST + 64) as engine:
            learned = 0
            while learned < LEARNING:
                learned += len(_run(engine, rng, -1, session(rng)))
            shapes = [session(rng) for _ in range(sessions)]
            order = [*range(sessions)] * 2
            rng.shuffle(order)
            judged = [x for i in order for x in _run(engine, rng, i, shapes[i])]
            return CostErrors(model, judged, engine.call("part_errors"))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def session(rng: random.Random) -> list[Turn]:
    """Make a cold turn and one to three that continue it, of log-uniform lengths."""
    turns = [Turn(None, _log_uniform(rng, 256, LONGEST * 3 // 4))]
    for _ in range(rng.randint(1, 3)):
        turns.append(Turn(rng.choice([Tier.DRAM, Tier.SSD]), _log_uniform(rng, 32, 640)))
    return turns


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _run(
    engine: EngineProcess, rng: random.Random, number: int, turns: Iterable[Turn]
) -> list[Judged]:
    """Serve one session, with new tokens."""
    prompt: list[int] = []
    results = []
    for index, turn in enumerate(turns):
        prompt += prompt_tokens(turn.new_tokens, rng.randrange(1 << 30))
        engine.call("throttle", SSD_BANDWIDTH if turn.tier is Tier.SSD else None)
        predicted_s, observed_s, restored = engine.call("judge", prompt)
        results.append(
            Judged(number, index, turn.tier, len(prompt), restored, predicted_s, observed_s)
        )
    return results


def figures(measured: Iterable[CostErrors]) -> dict[str, float]:
    """Return the figures of the worst model."""
    worst: dict[str, float] = {}
    for result in measured:
        errors, noise = [x.error for x in result.judged], result.noise()
        for name, values in (("error", errors), ("noise", noise)):
            for label, share in (("median", 0.5), ("p95", 0.95)):
                key = f"cost_{name}_{label}"
                worst[key] = max(worst.get(key, 0.0), percentile(values, share))
    return worst


def report(measured: Iterable[CostErrors]) -> str:
    """Return the errors by tier and length of the requests, and those of the parts."""
    rows = [row for result in measured for row in _rows(result)]
    header = ["|predicted - observed| / observed", "requests", "median", "p95", "bias"]
    return table(header, rows)


def _rows(result: CostErrors) -> Iterator[list[object]]:
    judged = result.judged
    groups = {"all": judged}
    for tier in (None, Tier.DRAM, Tier.SSD):
        name = "cold" if tier is None else f"from {tier.name}"
        groups[name] = [x for x in judged if x.tier is tier]
    for least, beyond in _LENGTHS:
        groups[f"{least}-{beyond - 1} tokens"] = [x for x in judged if least <= x.tokens < beyond]
    for name, group in groups.items():
        if group:
            errors = [x.error for x in group]
            bias = statistics.median(x.predicted_s / x.observed_s for x in group)
            yield [f"{result.model}, {name}", len(group), *_shares(errors), f"{bias:.2f}"]
    noise = result.noise()
    yield [f"{result.model}, noise: two requests alike", len(noise), *_shares(noise), ""]
    for part in result.parts:
        shares = [f"{part.median:.3f}", f"{part.p95:.3f}"]
        yield [f"{result.model}, {part.part}", part.samples, *shares, ""]


def _shares(values: list[float]) -> list[str]:
    return [f"{percentile(values, share):.3f}" for share in (0.5, 0.95)]
