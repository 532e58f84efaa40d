"""Every model x checkpoint policy x planner x tier: where requests resume, and how exactly.

Each case stores a prompt and then restores three: the prompt itself (its checkpoint is loaded), one
that differs from the middle on (an earlier boundary, a replay of the windows or a plain recompute,
as policy and planner decide), and another that differs from there on. The reference of each is the
engine's own prefix hit at the same number of cached tokens, over the whole vocabulary.

`docs/internals/exactness.md` says what the other tests of exactness add. The complete matrix is
marked slow, except for one case of every model and policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.scheduler.scheduler_side import SchedulerSide
from hetero_connector.planner.checkpoints import (
    CheckpointRates,
    CheckpointSizes,
    KeptBoundaries,
    policy_named,
)
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.load_model import LoadModel, TierRates
from tests.engine.harness import (
    BF16_MODELS,
    HYBRID_MODELS,
    Completion,
    delta,
    flipped,
    forget_local,
    generate,
    leave_on_ssd_only,
    metric,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
    wide,
)

pytestmark = pytest.mark.engine

CLEAR = 0.02
"""A logprob difference that rounding cannot cause."""
PROMPT = prompt_tokens(1400, seed=81)
SHARED = 1100
BRANCHES = [PROMPT[:SHARED] + prompt_tokens(400, seed=seed) for seed in (82, 83)]
"""Their own ends are after the boundary at which they differ from the prompt."""
REPLAYED = {"gemma3": 384, "gptoss": 256, "deepseek_v4": 768}
"""Tokens of a replay: 63 x 6, 63 x 4 and 127 x 5 window tokens, on the model's grid. The others
have no windows, or also recurrent state, which a replay does not rebuild."""

MODELS = ("dense", *HYBRID_MODELS)
POLICIES = ("full", "periodic:3", "zero", "adaptive")
IN_MAKE_TEST = {
    *product(["gemma3"], POLICIES),
    ("dense", "full"),
    ("gptoss", "periodic:3"),
    ("deepseek_v4", "zero"),
    ("qwen3_next", "adaptive"),
}
"""Each policy with one model, and each model with one policy."""
PLANNERS = ("always_load", "cost", "cost with dear loads")
TIERS = (Tier.DRAM, Tier.SSD)
ONE_WAY = {
    "full": (("cost", Tier.DRAM), ("always_load", Tier.SSD)),
    "periodic:3": (("always_load", Tier.DRAM), ("cost", Tier.SSD)),
    "zero": (("cost", Tier.SSD), ("cost", Tier.DRAM)),
    "adaptive": (("cost", Tier.DRAM), ("cost with dear loads", Tier.SSD)),
}
"""Planner and tier by policy, for models that are not tried with all."""
REFERENCES: dict[str, dict[tuple[tuple[int, ...], int], Completion]] = {}
"""Each engine's own answers, by model, and by prompt and cached tokens."""


@dataclass
class Engine:
    """One model's engine and its own answers."""

    model: str
    llm: Any
    references: dict[tuple[tuple[int, ...], int], Completion]

    @property
    def side(self) -> SchedulerSide:
        return scheduler_side(self.llm)

    @property
    def chunk(self) -> int:
        return self.side.layout.chunk_tokens

    def boundary(self, num_tokens: int) -> int:
        """Return the last token at which a prompt of `num_tokens` can resume."""
        alignment = self.side.layout.model.alignment
        return (num_tokens - 1) // alignment * alignment

    def checkpoints(self) -> set[int]:
        """Return the boundaries, in tokens, whose boundary state is stored."""
        needed = set(self.side.layout.model.state_types)
        nodes = self.side.store.catalog.tiers.index.nodes.values()
        return {node.chunk.end for node in nodes if needed <= node.artifacts.keys()}

    def use_policy(self, name: str) -> None:
        """Change the policy as if the engine had been started with it.

        With these rates `adaptive` keeps every eighth boundary, and those where matches ended.
        """
        sizes, rate = CheckpointSizes.of(self.side.layout), 1e-4
        write = 0.9 * rate * self.chunk / max(1, sizes.checkpoint_bytes)
        rates = CheckpointRates(write, 1e-12, rate)
        self.side._saver._policy = policy_named(name, sizes, lambda: rates)
        self.side._saver._kept = KeptBoundaries()

    @contextmanager
    def planned(self, planner: str) -> Iterator[None]:
        """Let the planner decide by these costs, whatever the machine's are."""
        side, dear = self.side, planner == "cost with dear loads"
        types = side.layout.model.state_types
        rates = TierRates(30.0 if dear else 1e-5, dict.fromkeys(types, 1e-11), 1e-11)
        with ExitStack() as patches:
            mode = planner.split()[0]
            patches.enter_context(patch.object(side.planner, "mode", mode))
            load = LoadModel(types, dict.fromkeys(TIERS, rates))
            patches.enter_context(patch.object(side.costs, "load", load))
            compute = ComputeRegression(ComputeCoefficients(1e-3, 1e-3, 0.0))
            patches.enter_context(patch.object(side.costs, "compute", compute))
            patches.enter_context(patch.object(side.planner, "_deadline_s", 60.0))
            yield

    def restore(self, prompt: Sequence[int], planner: str, tier: Tier) -> Completion:
        """Return the answer with all state in one tier and none in the engine's cache."""
        if tier is Tier.SSD:
            leave_on_ssd_only(self.llm)
        forget_local(self.llm)
        hits = metric("heterocache_hit_tokens_total", tier=tier.value)
        with self.planned(planner):
            restored = generate(self.llm, prompt, max_tokens=8)
        hits = metric("heterocache_hit_tokens_total", tier=tier.value) - hits
        assert hits == restored.num_cached_tokens
        return restored

    def own_hit(self, prompt: Sequence[int], cached: int) -> Completion:
        """Return the engine's own answer with this many tokens in its prefix cache."""
        key = (tuple(prompt), cached)
        if key not in self.references:
            forget_local(self.llm)
            with no_restores(self.llm):
                if cached:
                    generate(self.llm, prompt[: cached + 1])
                self.references[key] = generate(self.llm, prompt, max_tokens=8)
        return self.references[key]

    def assert_exact(self, prompt: Sequence[int], restored: Completion) -> None:
        reference = self.own_hit(prompt, restored.num_cached_tokens)
        assert reference.num_cached_tokens == restored.num_cached_tokens
        self.assert_same(restored, reference)

    def assert_same(self, restored: Completion, reference: Completion) -> None:
        if self.model in BF16_MODELS:  # another shape rounds differently
            assert reference.num_cached_tokens == restored.num_cached_tokens
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) <= (0.0 if self.model in BF16_MODELS else 1e-4)


@pytest.fixture
def engine(model: str, shared_llm: Any) -> Iterator[Engine]:
    saver = scheduler_side(shared_llm)._saver
    with patch.multiple(saver, _policy=saver._policy, _kept=saver._kept):  # see `use_policy`
        yield Engine(model, shared_llm, REFERENCES.setdefault(model, {}))


def kept(engine: Engine, policy: str) -> set[int]:
    """Return the boundaries of PROMPT that have a checkpoint under a policy."""
    chunk, last = engine.chunk, len(PROMPT) // engine.chunk * engine.chunk
    every = {"full": 1, "periodic:3": 3}.get(policy)
    if not engine.side.layout.model.boundary_types:
        every = 1
    ends = {last, last if engine.model == "qwen3_next" else engine.boundary(len(PROMPT))}
    return ends | (set(range(every * chunk, last, every * chunk)) if every else set())


def deepest(engine: Engine, planner: str, checkpoints: set[int], limit: int) -> int:
    """Return the token at which a request resumes that shares `limit` tokens."""
    if planner == "cost with dear loads":
        return 0
    loaded = max((x for x in checkpoints if x <= limit), default=0)
    replayed = REPLAYED.get(engine.model, limit)
    return max(loaded, limit - replayed) if planner == "cost" else loaded


@pytest.mark.parametrize("model", wide(MODELS, "gemma3"))
def test_power_a_flipped_early_token_shows(engine: Engine) -> None:
    base = engine.own_hit(PROMPT, 0)
    assert delta(base, engine.own_hit(flipped(PROMPT, 3), 0)) > CLEAR


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        pytest.param(*cell, marks=() if cell in IN_MAKE_TEST else pytest.mark.wide)
        for cell in product(MODELS, POLICIES)
    ],
)
def test_restored_where_policy_and_planner_say_and_exactly(engine: Engine, policy: str) -> None:
    planner, tier = ONE_WAY[policy][MODELS.index(engine.model) % 2]
    restore_and_compare(engine, policy, planner, tier)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("tier", TIERS)
def test_the_complete_matrix(engine: Engine, policy: str, planner: str, tier: Tier) -> None:
    restore_and_compare(engine, policy, planner, tier)


def restore_and_compare(engine: Engine, policy: str, planner: str, tier: Tier) -> None:
    engine.use_policy(policy)
    generate(engine.llm, PROMPT)
    settle(engine.llm)
    checkpoints = kept(engine, policy)
    assert engine.checkpoints() == checkpoints
    limit = SHARED // engine.chunk * engine.chunk
    again = engine.restore(PROMPT, planner, tier)
    assert again.num_cached_tokens == deepest(engine, planner, checkpoints, max(checkpoints))
    engine.assert_exact(PROMPT, again)
    for branch in BRANCHES:
        restored = engine.restore(branch, planner, tier)
        assert restored.num_cached_tokens == deepest(engine, planner, checkpoints, limit)
        engine.assert_exact(branch, restored)
        if policy == "adaptive":  # it kept the boundary where the other prompt differs
            checkpoints.add(limit)


@pytest.mark.parametrize("model", ["gemma3", "deepseek_v4"])
@pytest.mark.parametrize(
    "policy", ["zero", *(pytest.param(x, marks=pytest.mark.slow) for x in POLICIES if x != "zero")]
)
def test_the_next_turn_resumes_after_decoded_tokens(engine: Engine, policy: str) -> None:
    engine.use_policy(policy)
    reply = generate(engine.llm, PROMPT, max_tokens=300).tokens
    turn = PROMPT + reply + prompt_tokens(60, seed=84)
    restored = engine.restore(turn, "always_load", Tier.DRAM)
    assert restored.num_cached_tokens == engine.boundary(len(PROMPT) + len(reply))
    forget_local(engine.llm)
    with no_restores(engine.llm):
        # Not prefilled: in bfloat16 kernels for few rows round differently from those for many.
        assert generate(engine.llm, PROMPT, max_tokens=300).tokens == reply
        reference = generate(engine.llm, turn, max_tokens=8)
    engine.assert_same(restored, reference)
