"""Checkpoint policies on the real CPU engine: bytes on the SSD, and time to the first token.

Sessions are cut to their first turns and scaled down until their prompts fit a small engine. Each
turn is served with an empty prefix cache of the engine and all stored state on SSD only. The next
prompt continues the engine's own answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agent_sessions import Session, scaled, token_turns
from benchmarks.engine_process import Engine, EngineProcess
from benchmarks.measure import table
from hetero_connector.spec.state_types import Family

MODELS = ("gemma3", "deepseek_v4")
POLICIES = ("full", "periodic:4", "zero", "adaptive")
_PROMPT_TOKENS = 3_500
_SESSIONS = 2
_TURNS = 14
_LATENCIES = ("heterocache_stage_seconds_sum", "heterocache_load_seconds_sum")


@dataclass(frozen=True)
class EngineRun:
    """The results of one policy on one model."""

    model: str
    policy: str
    factor: int
    """The factor by which the sessions were scaled down."""
    chunk_bytes: int
    checkpoint_bytes: int
    """Bytes on SSD at the end; nothing was evicted."""
    new_tokens: int
    computed_tokens: int
    """Prompt tokens that were not restored."""
    ttft_s: float
    """The sum over all turns except the first of each session."""
    restore_s: float
    """Seconds of staging and loading, as the connector measures them."""

    @property
    def written_per_token(self) -> float:
        return (self.chunk_bytes + self.checkpoint_bytes) / self.new_tokens


class SessionEngine(Engine):
    """An `Engine` that serves turns of sessions."""

    def __init__(
        self, model: str, extra: Mapping[str, Any] | None, engine_args: Mapping[str, Any]
    ) -> None:
        super().__init__(model, extra, engine_args)
        self._served: list[tuple[np.ndarray, list[int]]] = []
        """The ids in the trace and the model's token ids, of each prompt with its answer."""

    def turn(self, ids: list[int], prompt_tokens: int) -> tuple[float, int, int]:
        """Serve a prompt; return TTFT in seconds, cached tokens, and tokens never seen before."""
        from vllm import SamplingParams

        wanted = np.array(ids, np.int64)
        shared, known = max(
            ((_shared(wanted, seen), tokens) for seen, tokens in self._served),
            default=(0, []),
            key=lambda found: found[0],
        )
        prompt = (known[:shared] + _token_ids(wanted)[shared:])[:prompt_tokens]
        parameters = SamplingParams(
            temperature=0.0, max_tokens=len(ids) - prompt_tokens, ignore_eos=True, detokenize=False
        )
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        self._served.append((wanted, prompt + list(output.outputs[0].token_ids)))
        self.flush()
        self.reset_prefix_cache()
        self._store().leave_to_ssd()
        return output.metrics.first_token_latency, output.num_cached_tokens, len(ids) - shared

    def on_ssd(self) -> tuple[int, int]:
        """Return the bytes of chunks and of checkpoints on SSD."""
        sizes = dict.fromkeys(Family, 0)
        for artifact in self._store().catalog.tiers.index.artifacts():
            if artifact.ssd is not None:
                sizes[artifact.state_type.family] += artifact.size_bytes
        return sizes[Family.PREFIX], sizes[Family.BOUNDARY]

    def restore_s(self) -> float:
        """Return the seconds of staging and of loading since the engine started."""
        from prometheus_client import REGISTRY

        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return sum(sample.value for sample in samples if sample.name in _LATENCIES)


def measure(
    sessions: Sequence[Session],
    directory: Path,
    models: Sequence[str] = MODELS,
    policies: Sequence[str] = POLICIES,
) -> list[EngineRun]:
    """Run every policy on every model, each in a new engine with a new directory."""
    long = [s for s in sessions if len(s.turns) >= _TURNS][:_SESSIONS]
    if not long:
        raise ValueError(f"no session has {_TURNS} turns: take more of them")
    longest = max(t.prompt_tokens for s in long for t in s.turns[:_TURNS])
    factor = -(-longest // _PROMPT_TOKENS)
    small = [scaled(session, factor, _TURNS) for session in long]
    return [
        _run(model, policy, factor, small, directory / model / policy.replace(":", "-"))
        for model in models
        for policy in policies
    ]


def _run(
    model: str, policy: str, factor: int, sessions: Sequence[Session], directory: Path
) -> EngineRun:
    extra = {"dram_gib": 0.5, "ssd_dir": str(directory), "ssd_gib": 2.0, "checkpoints": policy}
    turns = list(token_turns(sessions))
    longest = max(len(turn.tokens) for turn in turns)
    new_tokens = computed = 0
    ttft_s = 0.0
    with EngineProcess(model, extra, SessionEngine, max_model_len=longest + 64) as engine:
        begun: set[int] = set()
        for turn in turns:
            first_s, cached, unseen = engine.call("turn", turn.tokens, turn.prompt_tokens)
            new_tokens += unseen
            computed += turn.prompt_tokens - cached
            if turn.session in begun:
                ttft_s += first_s
            begun.add(turn.session)
        chunk_bytes, checkpoint_bytes = engine.call("on_ssd")
        restore_s = engine.call("restore_s")
    return EngineRun(
        model, policy, factor, chunk_bytes, checkpoint_bytes, new_tokens, computed, ttft_s,
        restore_s,
    )  # fmt: skip


def report(runs: Sequence[EngineRun]) -> str:
    header = [
        "CPU engine", "policy", "B/token on SSD", "in checkpoints", "tokens computed",
        "restore, s", "TTFT, s",
    ]  # fmt: skip
    rows = [
        [
            run.model, run.policy, f"{run.written_per_token:,.0f}",
            f"{run.checkpoint_bytes / (run.chunk_bytes + run.checkpoint_bytes):.0%}",
            run.computed_tokens, f"{run.restore_s:.2f}", f"{run.ttft_s:.2f}",
        ]
        for run in runs
    ]  # fmt: skip
    factor = max(run.factor for run in runs)
    scale = f"the first {_TURNS} turns of {_SESSIONS} sessions, one block of {factor}; sums"
    return f"{scale}\n{table(header, rows)}"


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def _token_ids(ids: np.ndarray) -> list[int]:
    """Return bytes that look random, a function of an id and its position."""
    mixed = (ids.astype(np.uint64) << np.uint64(20)) + np.arange(len(ids), dtype=np.uint64)
    tokens: list[int] = ((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)).tolist()
    return tokens
