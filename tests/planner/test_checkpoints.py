"""The promises of every checkpoint policy, and the choices of the adaptive one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.planner.checkpoints import (
    NEVER,
    PERIODS,
    Adaptive,
    Boundary,
    CheckpointPolicy,
    CheckpointRates,
    CheckpointSizes,
    Full,
    KeptBoundaries,
    Periodic,
    Reuse,
    Zero,
    policy_named,
)
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.spec import StateType
from hetero_connector.spec.presets import PRESETS
from tests.planner.chains import deepest
from tests.planner.stored_chunks import HYBRID

CHUNK = 256
SIZES = CheckpointSizes(chunk_tokens=CHUNK, chunk_bytes=1 << 20, checkpoint_bytes=5 << 20)
PLAIN = CheckpointSizes(chunk_tokens=CHUNK, chunk_bytes=0, checkpoint_bytes=1_000_000)
WRITE_S, CHUNK_S = 10e-3, 5e-3


def plain_rates() -> CheckpointRates:
    """10 ms to write a checkpoint of `PLAIN`, 5 ms to recompute a chunk, loads for nothing."""
    return CheckpointRates(WRITE_S / PLAIN.checkpoint_bytes, 0.0, CHUNK_S / CHUNK)


def plain(prior_requests: float = 0.0, slower_writes: float = 1.0) -> Adaptive:
    """An adaptive policy that forgets nothing."""
    known = plain_rates()
    rates = replace(known, write_s_per_byte=slower_writes * known.write_s_per_byte)
    return Adaptive(
        PLAIN,
        rates=lambda: rates,
        memory_requests=1 << 60,
        prior_requests=prior_requests,
    )


POLICIES: dict[str, Callable[[], CheckpointPolicy]] = {
    "full": Full,
    "periodic:2": lambda: Periodic(2),
    "periodic:7": lambda: Periodic(7),
    "zero": Zero,
    "adaptive": lambda: Adaptive(SIZES),
    "adaptive, costly writes": lambda: Adaptive(SIZES, rates=lambda: CheckpointRates(1e-6)),
}


@st.composite
def reuses(draw: st.DrawFn) -> Reuse:
    """Any reuse of one request."""
    matched = draw(st.integers(0, 600))
    local = draw(st.integers(0, 600))
    kept = max(draw(st.integers(0, matched)), min(local, matched))
    return Reuse(matched, kept, local, new=draw(st.integers(0, 600)))


HISTORIES = st.lists(reuses(), max_size=20)
BOUNDARIES = st.builds(Boundary, st.integers(1, 4096), st.booleans(), st.integers(0, 600))


def kept(policy: CheckpointPolicy, chunks: int) -> list[int]:
    """Boundaries of a prompt of `chunks` chunks that get a checkpoint."""
    return [
        n for n in range(1, chunks + 1) if policy.should_keep(Boundary(n, turn_end=n == chunks))
    ]


every_policy = pytest.mark.parametrize("new_policy", POLICIES.values(), ids=POLICIES)


# Every policy


@every_policy
@given(history=HISTORIES, chunks=st.integers(1, 4096))
def test_a_turn_s_end_is_always_kept(
    new_policy: Callable[[], CheckpointPolicy], history: Sequence[Reuse], chunks: int
) -> None:
    policy = new_policy()
    for reuse in history:
        policy.observe(reuse)
        assert policy.should_keep(Boundary(chunks, turn_end=True))


@every_policy
@given(history=HISTORIES, boundaries=st.lists(BOUNDARIES, max_size=20))
def test_the_same_history_gives_the_same_answers_and_queries_change_nothing(
    new_policy: Callable[[], CheckpointPolicy],
    history: Sequence[Reuse],
    boundaries: Sequence[Boundary],
) -> None:
    asked, silent = new_policy(), new_policy()
    for reuse in history:
        silent.observe(reuse)
        asked.observe(reuse)
        for boundary in boundaries:
            asked.should_keep(boundary)
    answers = [asked.should_keep(b) for b in boundaries]
    assert answers == [silent.should_keep(b) for b in boundaries]
    assert answers == [asked.should_keep(b) for b in reversed(boundaries)][::-1]


@every_policy
@given(history=HISTORIES, chunks=st.integers(1, 300))
def test_no_policy_writes_less_than_zero_or_more_than_full(
    new_policy: Callable[[], CheckpointPolicy], history: Sequence[Reuse], chunks: int
) -> None:
    policy = new_policy()
    for reuse in history:
        policy.observe(reuse)
    chosen = set(kept(policy, chunks))
    assert set(kept(Zero(), chunks)) <= chosen <= set(kept(Full(), chunks))


# The fixed ones


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 300))
def test_a_period_that_divides_another_writes_at_least_as_much(
    period: int, factor: int, chunks: int
) -> None:
    assert set(kept(Periodic(period * factor), chunks)) <= set(kept(Periodic(period), chunks))


def test_boundaries_kept_by_the_fixed_policies() -> None:
    assert kept(Full(), 7) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(Periodic(3), 7) == [3, 6, 7]
    assert kept(Zero(), 7) == [7]


def test_the_fixed_policies_ignore_where_requests_leave() -> None:
    left = Boundary(5, missed_chunks=100)
    assert not Zero().should_keep(left)
    assert not Periodic(2).should_keep(left)


def test_a_period_below_one_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 chunk"):
        Periodic(0)


def test_policies_by_the_names_of_the_configuration() -> None:
    adaptive = policy_named("adaptive", SIZES, lambda: CheckpointRates(load_s_per_byte=1.0))
    assert isinstance(adaptive, Adaptive)
    assert adaptive.period == NEVER
    assert kept(policy_named("full", SIZES), 3) == [1, 2, 3]
    assert kept(policy_named("zero", SIZES), 3) == [3]
    assert kept(policy_named("periodic:2", SIZES), 5) == [2, 4, 5]


# The adaptive one


def test_the_cost_of_every_period_worked_by_hand() -> None:
    """Requests leave after 5, 6, 7 and 12 chunks and add 8 each: 32 to write at 10 ms.

    A period of 4 has them recompute 1 + 2 + 3 + 0 chunks at 5 ms.
    """
    policy = plain()
    for matched in (5, 6, 7, 12):
        policy.observe(Reuse(matched, new=8))
    milliseconds = {p: cost * 1e3 for p, cost in policy.costs_s().items()}
    assert milliseconds == pytest.approx(
        {
            1: 320 + 0,
            2: 160 + 5 * (1 + 0 + 1 + 0),
            4: 80 + 5 * (1 + 2 + 3 + 0),
            8: 40 + 5 * (5 + 6 + 7 + 4),
            16: 20 + 5 * (5 + 6 + 7 + 12),
            32: 10 + 5 * (5 + 6 + 7 + 12),
            64: 5 + 5 * (5 + 6 + 7 + 12),
            NEVER: 5 * (5 + 6 + 7 + 12),
        },
        abs=1e-3,
    )
    assert policy.period == 4
    assert kept(policy, 11) == [4, 8, 11]


def test_a_chunk_deep_in_a_prompt_costs_more_to_compute_again() -> None:
    """Attention over 100 chunks of 256 tokens costs as much as everything else."""
    rates = CheckpointRates(
        WRITE_S / PLAIN.checkpoint_bytes, 0.0, CHUNK_S / CHUNK, CHUNK_S / CHUNK / 25_600
    )
    adaptive = Adaptive(PLAIN, rates=lambda: rates, prior_requests=0.0)
    adaptive.observe(Reuse(matched=101, new=10))  # 101 mod 4 = 1 chunk after 100
    assert adaptive.costs_s()[4] == pytest.approx(WRITE_S * 10 / 4 + 2.005 * CHUNK_S)
    shallow, deep = (Boundary(n, missed_chunks=1) for n in (33, 133))
    assert not adaptive.should_keep(shallow)
    assert not adaptive.should_keep(deep), "another request may never leave there"


def test_rates_follow_the_cost_model() -> None:
    slow = LoadModel([StateType.DENSE_KV])
    for size in (10**7, 10**8) * 50:
        slow.observe(Tier.SSD, {StateType.DENSE_KV: size}, size / 0.1e9)
    coefficients = ComputeCoefficients(1e-3, 2e-4, 3e-9)
    known = CheckpointRates.learned(
        CostModel(ComputeRegression(coefficients), slow, step_tokens=100)
    )
    assert known.load_s_per_byte == pytest.approx(1e-8, rel=0.1)
    assert known.write_s_per_byte == pytest.approx(3 * known.load_s_per_byte)
    assert known.recompute_s_per_token == pytest.approx(1e-3 / 100 + 2e-4)
    assert known.attention_s == pytest.approx(3e-9)
    fresh = CostModel(ComputeRegression(), LoadModel([StateType.DENSE_KV]))
    assert CheckpointRates.learned(fresh).write_s_per_byte == pytest.approx(
        CheckpointRates.write_s_per_byte
    )


def test_the_seconds_of_loads_count() -> None:
    """A chunk takes 1 ms to load and a checkpoint 2 ms, and 5 ms to recompute."""
    sizes = CheckpointSizes(CHUNK, chunk_bytes=1_000_000, checkpoint_bytes=2_000_000)
    policy = Adaptive(
        sizes, rates=lambda: CheckpointRates(0.0, 1e-9, CHUNK_S / CHUNK), prior_requests=0.0,
        memory_requests=1 << 60,
    )  # fmt: skip
    policy.observe(Reuse(matched=7, new=1))
    costs_ms = {p: cost * 1e3 for p, cost in policy.costs_s().items()}
    # From chunk 6 on: one chunk recomputed instead of loaded. From the start: seven, but
    # no checkpoint is loaded. What all periods load alike is left out.
    assert costs_ms[2] == pytest.approx(2 + (5 - 1) * 1)
    assert costs_ms[8] == pytest.approx((5 - 1) * 7)


@pytest.mark.parametrize(("new_chunks", "period"), [(1, 2), (4, 4), (16, 8), (64, 16), (256, 32)])
def test_requests_that_leave_at_random_places_give_the_square_root_law(
    new_chunks: int, period: int
) -> None:
    policy = plain()
    for matched in range(128, 256):
        policy.observe(Reuse(matched, new=new_chunks))
    assert (2 * WRITE_S * new_chunks / CHUNK_S) ** 0.5 == pytest.approx(period)
    assert policy.period == period


def test_a_session_that_only_grows_needs_only_its_turns_ends() -> None:
    policy = plain(prior_requests=1.0)
    assert policy.period < NEVER
    for turn in range(1, 100):
        policy.observe(Reuse(matched=3 * turn, kept=3 * turn, new=3))
    assert policy.period == NEVER


def test_the_period_follows_a_change_of_reuse() -> None:
    policy = Adaptive(PLAIN, rates=plain_rates, memory_requests=20)
    for matched in range(200, 400):
        policy.observe(Reuse(matched, new=4))
    assert policy.period == 4
    for _ in range(200):
        policy.observe(Reuse(matched=30, kept=30, new=4))
    assert policy.period == NEVER
    for matched in range(200, 400):
        policy.observe(Reuse(matched, new=4))
    assert policy.period == 4


def test_only_turns_ends_are_kept_if_loading_is_slower_than_computing() -> None:
    slow = CheckpointRates(load_s_per_byte=1e-6)
    policy = Adaptive(SIZES, rates=lambda: slow)
    for matched in range(100, 300):
        policy.observe(Reuse(matched, new=1))
    assert policy.period == NEVER
    assert not policy.should_keep(Boundary(100, missed_chunks=50))


def test_chunks_in_the_engines_own_cache_need_no_checkpoint() -> None:
    policy = plain()
    for matched in range(100, 200):
        policy.observe(Reuse(matched, kept=matched, local=matched, new=2))
    assert policy.period == NEVER


def test_a_boundary_where_a_request_left_is_kept_if_one_more_pays_for_it() -> None:
    """Writing takes 10 ms: worth three missed chunks of 5 ms, not two."""
    policy = plain()
    assert policy.period == NEVER
    assert not policy.should_keep(Boundary(5, missed_chunks=2))
    assert policy.should_keep(Boundary(5, missed_chunks=3))


def test_the_first_period_is_about_two_thousand_tokens() -> None:
    model = PRESETS["deepseek-v4-flash"]()
    policy = Adaptive(CheckpointSizes.of(ArtifactLayout(model, CHUNK)))
    assert 4 * CHUNK <= policy.period * CHUNK <= 8 * CHUNK


@given(st.lists(reuses(), min_size=1, max_size=20))
def test_the_period_is_the_best_for_the_observed_requests(history: Sequence[Reuse]) -> None:
    policy = plain()
    for reuse in history:
        policy.observe(reuse)

    def cost_s(period: int) -> float:
        written = sum(x.new for x in history) / period
        recomputed = sum(min(x.matched % period, x.matched - x.kept) for x in history)
        return WRITE_S * written + CHUNK_S * recomputed

    assert cost_s(policy.period) == pytest.approx(min(map(cost_s, PERIODS)), abs=1e-6)


@given(st.lists(reuses(), min_size=1, max_size=20), st.integers(0, 10), st.integers(0, 10))
def test_a_greater_weight_of_writes_means_fewer_writes(
    history: Sequence[Reuse], one: int, more: int
) -> None:
    light, heavy = plain(slower_writes=2.0**one), plain(slower_writes=2.0 ** (one + more))
    for reuse in history:
        light.observe(reuse)
        heavy.observe(reuse)
    assert light.period <= heavy.period


# KeptBoundaries


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "little"))


def test_the_nearest_kept_boundary_is_found_backwards() -> None:
    boundaries = KeptBoundaries()
    boundaries.add(key(3))
    boundaries.add(key(7))
    assert boundaries.steps_to(map(key, [9, 8, 7, 6, 5, 4, 3])) == 2
    assert boundaries.steps_to(map(key, [7, 3])) == 0
    assert boundaries.steps_to(map(key, [9, 8])) is None
    assert boundaries.steps_to([]) is None


def test_the_search_for_a_kept_boundary_ends() -> None:
    boundaries = KeptBoundaries()
    boundaries.add(key(1))
    assert boundaries.steps_to(map(key, range(1024, 0, -1))) == 1023
    assert boundaries.steps_to(map(key, range(1025, 0, -1))) is None


def test_the_oldest_boundary_is_dropped_first_and_a_repeated_one_is_new() -> None:
    boundaries = KeptBoundaries(capacity=2)
    for number in (1, 2, 1, 3):
        boundaries.add(key(number))
    assert [boundaries.steps_to([key(n)]) for n in (1, 2, 3)] == [0, None, 0]


# All of them on sessions of agents


@dataclass
class Sessions:
    """Sessions over five system prompts that grow by turns, and sometimes branch off earlier.

    The store forgets nothing and the engine's own cache holds nothing.
    """

    policy: CheckpointPolicy
    sizes: CheckpointSizes
    branching: float
    """Share of turns that branch off before the session's end."""
    stored: set[int] = field(default_factory=set)
    checkpoints: set[int] = field(default_factory=set)
    kept: KeptBoundaries = field(default_factory=KeptBoundaries)
    missed: int = 0

    def play(self, num_turns: int, seed: int) -> float:
        """Seconds of writing checkpoints and of recomputing, at the default `CheckpointRates`."""
        rng = random.Random(seed)
        new = count()
        prompts = [[next(new) for _ in range(rng.randrange(2, 40))] for _ in range(5)]
        sessions = [list(rng.choice(prompts)) for _ in range(30)]
        for _ in range(num_turns):
            at = rng.randrange(len(sessions))
            chunks = sessions[at]
            if rng.random() < 0.03 or len(chunks) > 400:
                chunks = list(rng.choice(prompts))
            elif rng.random() < self.branching:
                chunks = chunks[: rng.randrange(1, len(chunks))]
            sessions[at] = chunks + [next(new) for _ in range(rng.randrange(1, 8))]
            self.serve(sessions[at])
        written = len(self.checkpoints) * self.sizes.checkpoint_bytes
        recompute_s = (
            self.missed * self.sizes.chunk_tokens * CheckpointRates().recompute_s_per_token
        )
        return written * CheckpointRates().write_s_per_byte + recompute_s

    def serve(self, chunks: Sequence[int]) -> None:
        names = list(accumulate(chunks, lambda parent, chunk: hash((parent, chunk))))
        matched = sum(name in self.stored for name in names)
        passed = range(matched, 0, -1)
        resumed = next((n for n in passed if names[n - 1] in self.checkpoints), 0)
        steps = self.kept.steps_to(key(names[n - 1] % 2**64) for n in passed)
        self.missed += matched - resumed
        if resumed and not self.policy.should_keep(Boundary(resumed)):
            self.kept.add(key(names[resumed - 1] % 2**64))
        self.stored.update(names)
        for n in range(resumed + 1, len(names) + 1):
            missed = matched - resumed if n == matched else 0
            boundary = Boundary(n, n == len(names), missed)
            if self.policy.should_keep(boundary):
                self.checkpoints.add(names[n - 1])
                if boundary.turn_end or missed:
                    self.kept.add(key(names[n - 1] % 2**64))
        behind = 0 if steps is None else matched - steps
        self.policy.observe(Reuse(matched, behind, new=len(names) - matched))


@pytest.mark.parametrize("branching", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "gemma-3-27b", "gpt-oss-120b"])
def test_adaptive_costs_no_more_than_the_best_fixed_policy(model: str, branching: float) -> None:
    """Within 3%, learning included; the fixed ones differ by a factor of two and more."""
    sizes = CheckpointSizes.of(ArtifactLayout(PRESETS[model](), CHUNK))
    fixed = {p: Sessions(Periodic(p), sizes, branching).play(800, seed=5) for p in PERIODS}
    adaptive = Sessions(Adaptive(sizes), sizes, branching).play(800, seed=5)
    assert max(fixed.values()) > 2 * min(fixed.values())
    assert adaptive <= 1.03 * min(fixed.values())


# What a restore makes of it

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA


@given(chunks=st.integers(1, 40), left=st.integers(1, 40), period=st.integers(1, 12))
def test_a_sparse_chain_is_resumed_at_its_last_checkpoint(
    chunks: int, left: int, period: int
) -> None:
    size = 64
    checkpoints = set(kept(Periodic(period), chunks))
    chain = [
        StoredChunk(
            ChunkRange(key(n), key(n - 1), (n - 1) * size, n * size),
            dict.fromkeys([KV, SWA] if n in checkpoints else [KV], Tier.DRAM),
        )
        for n in range(1, chunks + 1)
    ]
    plan = deepest(HYBRID, chain, local_tokens=0, limit_tokens=left * size)
    usable = [n for n in checkpoints if n <= left]
    assert (plan.boundary if plan else 0) == max(usable, default=0) * size
