"""Replays the same requests with several checkpoint policies, and counts writes and restores.

Every request is restored from the state that earlier sessions and its own earlier turns have
stored; the engine's own prefix cache is empty. Restores are priced as from SSD. All policies see
the same requests in the same order, one session after another.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.agent_sessions import Session, TokenTurn, token_turns
from benchmarks.measure import percentile
from benchmarks.replayed_engine import STEP_TOKENS, ReplayedEngine, Served, SmallStore
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import CheckpointRates, CheckpointSizes, policy_named
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.profile import CostProfile
from hetero_connector.spec.presets import PRESETS
from hetero_connector.store.base import StoreConfig

FINGERPRINT = b"checkpoint policies"
CHUNK_TOKENS = 256
_SLOT_BYTES = 4096
_SLOTS = 12_000
"""Capacity in chunks: three times those of the longest recorded session."""


@dataclass
class PolicyRun:
    """One policy on one model: totals over all requests, and seconds of each restore."""

    model: str
    policy: str
    sizes: CheckpointSizes
    rates: CheckpointRates
    chunk_bytes: int = 0
    checkpoint_bytes: int = 0
    new_tokens: int = 0
    load_s: float = 0.0
    recompute_s: float = 0.0
    restores_s: list[float] = field(default_factory=list)
    """The seconds of each request that found stored state."""
    period: int | None = None
    """The last period of the adaptive policy, in chunks."""

    @property
    def written_per_token(self) -> float:
        """Bytes written to SSD for each token that was new to the store."""
        return (self.chunk_bytes + self.checkpoint_bytes) / max(1, self.new_tokens)

    @property
    def restore_s(self) -> float:
        """Seconds to restore stored state, by loading or recomputing."""
        return self.load_s + self.recompute_s

    @property
    def objective_s(self) -> float:
        """The objective of `Adaptive` with weights of 1, with the bytes that all policies write."""
        written = self.chunk_bytes + self.checkpoint_bytes
        return written * self.rates.write_s_per_byte + self.restore_s

    def percentile_s(self, share: float) -> float:
        """The seconds that this share of the restores do not exceed."""
        return percentile(self.restores_s, share)

    @property
    def median_s(self) -> float:
        return statistics.median(self.restores_s)

    def count(self, served: Served) -> None:
        self.new_tokens += served.new_tokens
        self.load_s += served.load_s
        self.recompute_s += served.recompute_s
        if served.stored_tokens:
            self.restores_s.append(served.restore_s)


def replay(
    models: Sequence[str],
    policies: Sequence[str],
    sessions: Sequence[Session],
    profile: CostProfile | None = None,
) -> list[PolicyRun]:
    """Serve all sessions with every policy on every model."""
    contenders = [_Contender(m, p, profile) for m in models for p in policies]
    gc.disable()  # there are millions of objects, which live to the end
    try:
        return _replay(contenders, token_turns(sessions))
    finally:
        gc.enable()
        for contender in contenders:
            contender.close()


def _replay(contenders: Sequence[_Contender], turns: Iterable[TokenTurn]) -> list[PolicyRun]:
    hasher = ChainHasher(FINGERPRINT, CHUNK_TOKENS)
    for turn in turns:
        chain = RequestChain(hasher)
        chain.extend(turn.tokens)
        for contender in contenders:
            contender.serve(turn, chain)
    return [contender.result() for contender in contenders]


class _Contender:
    """One policy on one model, with a store of its own."""

    def __init__(self, model: str, policy: str, profile: CostProfile | None) -> None:
        layout = ArtifactLayout(PRESETS[model](), CHUNK_TOKENS)
        costs = costs_of(layout, profile)
        self._checkpoints = policy_named(
            policy, CheckpointSizes.of(layout), lambda: CheckpointRates.learned(costs)
        )
        self._run = PolicyRun(
            model, policy, CheckpointSizes.of(layout), CheckpointRates.learned(costs)
        )
        recorder = Recorder()
        self._store = SmallStore.open(
            dict.fromkeys(layout.model.state_types, _SLOT_BYTES),
            StoreConfig(_SLOTS * _SLOT_BYTES * len(layout.model.state_types), shared=False),
            recorder,
            chunk_tokens=CHUNK_TOKENS,
            fingerprint=FINGERPRINT,
            description={},
        )
        # Slots are all alike here: nothing depends on the sizes in a store that is never full.
        self._store.scale = max(layout.max_bytes.values()) / _SLOT_BYTES
        self._store.priced_as = Tier.SSD
        planner = RestorePlanner(layout, costs)
        self._engine = ReplayedEngine(
            layout, self._store, planner, self._checkpoints, recorder,
            clock=lambda: 0.0, count_hits=False,
        )  # fmt: skip
        self._prefix_types = layout.model.prefix_types

    def serve(self, turn: TokenTurn, chain: RequestChain) -> None:
        self._run.count(self._engine.serve(turn, chain))

    def result(self) -> PolicyRun:
        run = self._run
        for state_type, size_bytes in self._store.sealed_bytes.items():
            if state_type in self._prefix_types:
                run.chunk_bytes += size_bytes
            else:
                run.checkpoint_bytes += size_bytes
        run.period = getattr(self._checkpoints, "period", None)
        return run

    def close(self) -> None:
        self._store.close()


def costs_of(layout: ArtifactLayout, profile: CostProfile | None) -> CostModel:
    """Return a calibrated machine's costs, or the planner's defaults: a plausible GPU and NVMe."""
    if profile is not None:
        return profile.cost_model(layout.model.state_types, step_tokens=STEP_TOKENS)
    load = LoadModel(layout.model.state_types)
    return CostModel(ComputeRegression(), load, step_tokens=STEP_TOKENS)
