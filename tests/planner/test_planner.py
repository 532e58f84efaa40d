"""The decision is the cheapest of all candidates, with its terms and actions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.compute_model import ComputeCoefficients, ComputeRegression
from hetero_connector.planner.cost_model import CostModel, CostTerms
from hetero_connector.planner.decision import RestoreCandidate, RestoreDecision
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import STALL_S_PER_S, EngineLoad, Prices, Pricing
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.spec.presets import PRESETS
from tests.planner.chains import (
    CHUNK,
    DENSE,
    HYBRID,
    KV,
    LLAMA4,
    SWA,
    TWO_WINDOWS,
    WINDOWS_ONLY,
    SlowPlanner,
    chain_of,
    costs_of,
    in_tier,
    layout_of,
    rates,
)

FAST = {Tier.DRAM: rates(1e-4, 1e-9), Tier.SSD: rates(1e-3, 1e-8)}
SLOW = {Tier.DRAM: rates(1e-4, 1e-9), Tier.SSD: rates(1e-3, 1e-3)}
BOTH = in_tier(Tier.DRAM, KV, SWA)
IDLE = EngineLoad()

places = st.sampled_from([None, Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.PEER])
seconds = st.floats(0, 1e-3)
lessons = st.tuples(st.sampled_from(Tier), st.integers(16, 20_000), st.floats(1e-3, 1.0))


@st.composite
def chains(draw: st.DrawFn, model: ModelSpec) -> list[StoredChunk]:
    rows = draw(st.lists(st.tuples(*(places for _ in model.state_types)), max_size=9))
    tail = draw(st.sampled_from([0, 16, 48]))
    ends = [CHUNK * (i + 1) for i in range(len(rows))]
    if tail and ends:
        ends[-1] += tail - CHUNK
    mappings = [  # of a local chunk that has just begun nothing is stored
        {
            t: tier
            for t, tier in zip(model.state_types, row, strict=True)
            if tier and layout_of(model).artifact_bytes(t, 0, end)
        }
        for row, end in zip(rows, ends, strict=True)
    ]
    return chain_of(mappings, tail, shared=draw(st.booleans()))


@st.composite
def cost_models(draw: st.DrawFn, model: ModelSpec) -> CostModel:
    compute = draw(st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-2), st.floats(0, 1e-5)))
    load = {
        tier: rates(draw(st.floats(0, 0.2)), draw(st.floats(0, 1e-4)), window_swa=draw(seconds))
        for tier in Tier
    }
    costs = costs_of(model, compute, load, draw(st.sampled_from([0, 50, 128])))
    for tier, size, took_s in draw(st.lists(lessons, max_size=3)):
        costs.load.observe(tier, dict.fromkeys(model.state_types, size), took_s)
        costs.compute.observe(size // 16, size // 100, took_s)
    return costs


loads = st.builds(
    EngineLoad,
    st.sampled_from([0, 0, 100]),
    st.sampled_from([0, 0, 7]),
    st.dictionaries(st.sampled_from(list(Tier)), st.integers(0, 10_000)),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0, 0, 60]),
    st.sampled_from(["never", "long", "always"]),
    st.sampled_from([0, 0, 3000]),
)
models = st.sampled_from([DENSE, HYBRID, LLAMA4, TWO_WINDOWS, WINDOWS_ONLY])


@dataclasses.dataclass(frozen=True)
class Case:
    """A planning question."""

    model: ModelSpec
    stored: list[StoredChunk]
    local_tokens: int
    prompt_tokens: int
    costs: CostModel
    load: EngineLoad

    def decide(self, mode: str = "cost", **options: float) -> RestoreDecision:
        planner = RestorePlanner(layout_of(self.model), self.costs, mode, **options)
        limit = self.prompt_tokens - 1
        return planner.plan(self.stored, self.local_tokens, limit, self.prompt_tokens, self.load)

    def every_candidate(self, replay_tokens: int) -> dict[tuple[int, int], CostTerms]:
        """(boundary, replayed tokens) -> terms, asked of the slow planner one by one."""
        slow = SlowPlanner(layout_of(self.model), self.costs, self.load, self.prompt_tokens)
        expected = {(self.local_tokens, 0): slow.terms([], self.local_tokens)}
        chunks: list[StoredChunk] = []
        for stored in self.stored:
            end = stored.chunk.end
            if end <= self.local_tokens:
                continue
            cut = self.model.last_cut(self.prompt_tokens - 1)
            if end >= self.prompt_tokens:
                complete = all(t in stored.tiers for t in self.model.prefix_types)
                if complete and max(stored.chunk.start, self.local_tokens) < cut:
                    expected[cut, 0] = slow.terms([*chunks, stored], 0, cut=cut)
                break
            chunks = [*chunks, stored]
            if any(t not in stored.tiers for t in self.model.prefix_types):
                break
            sizes = {t: slow.layout.artifact_bytes(t, 0, end) for t in self.model.boundary_types}
            if all(t in stored.tiers for t, size in sizes.items() if size):
                expected[end, 0] = slow.terms(chunks, 0)
            replayable = replay_tokens and self.model.boundary_types and self.model.prefix_types
            if replayable and end - replay_tokens > self.local_tokens:
                expected[end, replay_tokens] = slow.terms(chunks, 0, replay_tokens)
        return expected


local_tokens = st.sampled_from([0, 0, 16, CHUNK, CHUNK + 16, 3 * CHUNK])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(models)
    return Case(
        model,
        draw(chains(model)),
        draw(local_tokens),
        draw(st.integers(4 * CHUNK, 12 * CHUNK)),
        draw(cost_models(model)),
        draw(loads),
    )


@st.composite
def cut_cases(draw: st.DrawFn) -> Case:
    """The last chunk ends with the prompt, or after the last token to restore."""
    tiers = draw(st.lists(st.sampled_from(Tier), min_size=4, max_size=8))
    stored = full_chain(*tiers, model=DENSE)
    end = stored[-1].chunk.end
    prompt = draw(st.integers(end - 40, end))
    costs = draw(cost_models(DENSE))
    return Case(DENSE, stored, draw(local_tokens), prompt, costs, draw(loads))


@given(cases() | cut_cases(), st.sampled_from([0, 0, 30, 100]))
def test_the_decision_is_the_cheapest_of_all_candidates(case: Case, replay_tokens: int) -> None:
    expected = case.every_candidate(replay_tokens)
    decision = case.decide(replay_tokens=replay_tokens)
    found = {(c.boundary, c.boundary - c.resume_tokens): c.terms for c in decision.candidates()}
    assert found.keys() == expected.keys()
    for key, terms in expected.items():
        assert found[key] == pytest.approx(terms, rel=1e-9, abs=1e-12)
    plan = decision.plan
    chosen = (plan.boundary, plan.replay_tokens) if plan else (case.local_tokens, 0)
    assert decision.predicted == pytest.approx(expected[chosen], rel=1e-9, abs=1e-12)
    cheapest = min(terms.total_s for terms in expected.values())
    assert decision.predicted.total_s <= cheapest * (1 + 1e-9)
    marked = [c for c in decision.candidates() if c.chosen]
    assert [(c.boundary, c.boundary - c.resume_tokens) for c in marked] == [chosen]


@given(cases())
def test_planned_is_never_worse_than_always_or_never_loading(case: Case) -> None:
    planned, always, never = (
        case.decide(mode).predicted.total_s for mode in ("cost", "always_load", "never_load")
    )
    assert planned <= min(always, never)


@given(cases() | cut_cases())
def test_always_load_takes_the_deepest_boundary(case: Case) -> None:
    plan = case.decide("always_load").plan
    deepest = max(boundary for boundary, _ in case.every_candidate(replay_tokens=0))
    assert (plan.boundary if plan else case.local_tokens) == deepest


@given(cases())
def test_a_plan_does_not_depend_on_the_mode_that_chose_it(case: Case) -> None:
    plan = case.decide().plan
    if plan is not None:
        shorter = dataclasses.replace(case, prompt_tokens=plan.boundary + 1)
        always = shorter.decide("always_load").plan
        assert always is not None
        assert dataclasses.replace(always, parked=plan.parked) == plan


@given(cases())
def test_a_plan_has_what_its_boundary_needs(case: Case) -> None:
    plan = case.decide("always_load").plan
    if plan is not None:
        assert plan.prefix_types == case.model.prefix_types
        assert plan.boundary_types == case.model.boundary_types_at(plan.boundary)
        known = {id(x) for x in plan.tiers}
        assert {id(x.tiers) for x in plan.chunks} == known


@given(cases())
def test_never_load_computes_everything(case: Case) -> None:
    decision = case.decide("never_load")
    assert decision.plan is None
    assert decision.predicted == decision.nothing
    assert decision.reuse_benefit_s == 0.0
    assert not decision.is_rest_slow


@given(cases(), st.floats(1.0, 100.0))
def test_a_slower_tier_never_makes_the_best_cost_less(case: Case, factor: float) -> None:
    # A slower load may be parked, which spares the decodes.
    assume(case.load.parking != "long")
    slower = {}
    for tier in Tier:
        now = case.costs.load.rates(tier)
        slower[tier] = TierRates(
            now.latency_s * factor,
            {t: s * factor for t, s in now.seconds_per_byte.items()},
            now.ahead_s_per_byte * factor,
        )
    costs = costs_of(
        case.model,
        case.costs.compute.coefficients,
        slower,
        case.costs.step_tokens,
    )
    after = dataclasses.replace(case, costs=costs).decide().predicted.total_s
    assert after >= case.decide().predicted.total_s * (1 - 1e-9)


@given(cases(), st.integers(0, 8))
def test_more_stored_chunks_never_make_the_best_cost_more(case: Case, count: int) -> None:
    fewer = dataclasses.replace(case, stored=case.stored[:count])
    assert case.decide().predicted.total_s <= fewer.decide().predicted.total_s


def full_chain(*tiers: Tier, model: ModelSpec = HYBRID) -> list[StoredChunk]:
    return chain_of([in_tier(tier, *model.state_types) for tier in tiers])


def case_of(
    stored: list[StoredChunk], costs: CostModel, model: ModelSpec = HYBRID, load: EngineLoad = IDLE
) -> Case:
    return Case(model, stored, 0, 8 * CHUNK, costs, load)


def test_only_the_first_chunks_are_loaded_if_the_rest_is_slow() -> None:
    case = case_of(full_chain(*[Tier.DRAM] * 3, *[Tier.SSD] * 3), costs_of(HYBRID, load=SLOW))
    decision = case.decide()
    assert decision.plan is not None
    assert decision.plan.boundary == 3 * CHUNK
    assert (decision.plan.prefix_types, decision.plan.boundary_types) == ((KV,), (SWA,))
    assert decision.is_rest_slow
    layout = layout_of(HYBRID)
    prefix, end = 3 * layout.artifact_bytes(KV, 0, CHUNK), 6 * CHUNK
    window = layout.artifact_bytes(SWA, end - CHUNK, end)
    assert decision.declined == {Tier.SSD: prefix + window}


def test_chunks_on_ssd_are_staged_if_that_pays() -> None:
    case = case_of(full_chain(*[Tier.SSD] * 3, model=DENSE), costs_of(DENSE, load=FAST), DENSE)
    plan = case.decide().plan
    assert plan is not None
    assert (plan.boundary, plan.source_tiers) == (3 * CHUNK, {Tier.SSD})
    assert not case.decide().is_rest_slow


def test_nothing_is_loaded_where_computing_is_cheaper() -> None:
    decision = case_of(full_chain(*[Tier.SSD] * 3), costs_of(HYBRID, load=SLOW)).decide()
    assert decision.plan is None
    assert decision.is_rest_slow
    assert decision.reuse_benefit_s == 0.0
    assert set(decision.declined) == {Tier.SSD}


WAS_SLOW = {
    "loads like the declined one": [(24_000, 0)],
    "loads behind others": [(24_000, 72_000)],
    "loads alone and behind others": [(24_000, 0), (24_000, 72_000)],
    "shorter loads": [(200, 0)],
    "longer loads": [(2**20, 0), (2**26, 0)],
}
"""Bytes of loads, and those in flight before them."""


@pytest.mark.parametrize("slow", WAS_SLOW.values(), ids=WAS_SLOW)
def test_a_disk_that_was_slow_is_tried_after_ten_minutes_and_learned_again(
    slow: list[tuple[int, int]],
) -> None:
    """All requests are alike, one in ten seconds. The disk is fast by now."""
    costs = CostModel(ComputeRegression(ComputeCoefficients(0.01, 1e-4, 0.0)), LoadModel([KV]))
    for size_bytes, ahead_bytes in slow * 20:
        costs.load.observe(Tier.SSD, {KV: size_bytes}, 1.0, ahead_bytes)
    case = case_of(full_chain(*[Tier.SSD] * 6, model=DENSE), costs, DENSE)
    loaded = []
    for turn in range(80):
        decision = case.decide()
        for tier, size_bytes in decision.declined.items():
            costs.load.on_declined(tier, size_bytes, 10.0 * turn)
        if decision.plan is not None:
            loaded.append(turn)
            assert decision.predicted.total_s < 0.1
            costs.load.observe(Tier.SSD, {KV: 24_000}, 2e-3)
    assert loaded == list(range(61, 80))
    assert costs.load.predict(Tier.SSD, {KV: 24_000}) == pytest.approx(2e-3, rel=0.5)


def test_a_disk_that_is_slow_is_tried_once_in_ten_minutes() -> None:
    costs = CostModel(ComputeRegression(ComputeCoefficients(0.01, 1e-4, 0.0)), LoadModel([KV]))
    for _ in range(20):
        costs.load.observe(Tier.SSD, {KV: 24_000}, 6.0)
    case = case_of(full_chain(*[Tier.SSD] * 6, model=DENSE), costs, DENSE)
    loaded = []
    for turn in range(190):
        decision = case.decide()
        for tier, size_bytes in decision.declined.items():
            costs.load.on_declined(tier, size_bytes, 10.0 * turn)
        if decision.plan is not None:
            loaded.append(turn)
            costs.load.observe(Tier.SSD, {KV: 24_000}, 6.0)
    assert loaded == [61, 123, 185]


def test_a_try_is_not_spent_by_a_request_that_computes_all_the_same() -> None:
    costs = CostModel(ComputeRegression(ComputeCoefficients(0.01, 1e-4, 0.0)), LoadModel([KV]))
    for _ in range(20):
        costs.load.observe(Tier.SSD, {KV: 24_000}, 6.0)
    case = case_of(full_chain(*[Tier.SSD] * 6, model=DENSE), costs, DENSE)
    for now_s in (0.0, 600.0):
        for tier, size_bytes in case.decide().declined.items():
            costs.load.on_declined(tier, size_bytes, now_s)
    assert case.decide(deadline_s=1e-6).plan is None
    assert case.decide().plan is not None
    assert case.decide().plan is None


def test_the_bytes_of_a_declined_tier_include_its_largest_checkpoint() -> None:
    """Only the fourth of six chunks has a window, and only that is on SSD."""
    kv = in_tier(Tier.DRAM, KV)
    stored = chain_of([kv] * 3 + [kv | in_tier(Tier.SSD, SWA)] + [kv] * 2)
    decision = case_of(stored, costs_of(HYBRID, load=SLOW)).decide()
    assert decision.plan is None
    window = layout_of(HYBRID).artifact_bytes(SWA, 3 * CHUNK, 4 * CHUNK)
    assert decision.declined[Tier.SSD] == window


def test_a_tier_that_is_loaded_or_useless_is_not_declined() -> None:
    stored = chain_of([BOTH, in_tier(Tier.SSD, KV)])  # no boundary on SSD
    assert case_of(stored, costs_of(HYBRID, load=SLOW)).decide().declined == {}
    loaded = full_chain(*[Tier.SSD] * 3)
    assert case_of(loaded, costs_of(HYBRID, load=FAST)).decide().declined == {}
    assert case_of(loaded, costs_of(HYBRID, load=SLOW)).decide("never_load").declined == {}


def test_a_checkpoint_before_the_boundary_is_not_loaded() -> None:
    inner = in_tier(Tier.DRAM, KV) | in_tier(Tier.SSD, SWA)
    stored = chain_of([inner, BOTH, *[in_tier(Tier.SSD, KV, SWA)] * 4])
    decision = case_of(stored, costs_of(HYBRID, load=SLOW)).decide()
    assert decision.plan is not None
    assert decision.plan.boundary == 2 * CHUNK
    assert set(decision.declined) == {Tier.SSD}


def test_a_checkpoint_that_costs_more_than_a_replay_is_declined() -> None:
    stored = chain_of([in_tier(Tier.DRAM, KV) | in_tier(Tier.SSD, SWA)] * 6)
    decision = case_of(stored, costs_of(HYBRID, load=SLOW)).decide(replay_tokens=80)
    assert decision.plan is not None
    assert decision.plan.replay_tokens
    assert set(decision.declined) == {Tier.SSD}


@given(cases())
def test_declined_tiers_are_those_of_later_state_without_the_plans(case: Case) -> None:
    decision = case.decide(replay_tokens=80)
    plan = decision.plan
    resume = plan.resume_tokens if plan else case.local_tokens
    candidates = decision.candidates()
    later = {t for c in candidates if c.resume_tokens > resume for t in c.load_bytes}
    loaded = {t for c in candidates if c.chosen for t in c.load_bytes}
    declined = set(decision.declined)
    assert later - loaded <= declined
    assert not declined & loaded
    if not later:
        assert not declined
    assert declined <= {t for x in case.stored if x.chunk.end > resume for t in x.tiers.values()}


def test_the_benefit_is_the_prefill_minus_load_rest_and_stall() -> None:
    costs = costs_of(HYBRID, load=FAST)
    case = case_of(full_chain(*[Tier.DRAM] * 4), costs, load=EngineLoad(running_decodes=2))
    decision = case.decide()
    whole, chosen = decision.nothing, decision.predicted
    with_stall = 1 + 2 * STALL_S_PER_S
    assert (whole.compute_s - chosen.compute_s - chosen.load_s) * with_stall == pytest.approx(
        decision.reuse_benefit_s
    )
    assert decision.reuse_benefit_s > 0.2


def test_a_tie_goes_to_loading_deeper() -> None:
    """Compute is one step whatever its length, and nothing else costs anything."""
    free = {Tier.DRAM: rates(0.0, 0.0)}
    case = case_of(full_chain(*[Tier.DRAM] * 4), costs_of(HYBRID, (0.1, 0.0, 0.0), load=free))
    decision = case.decide()
    assert decision.nothing.total_s == decision.predicted.total_s
    assert decision.plan is not None
    assert decision.plan.boundary == 4 * CHUNK


def test_a_candidate_that_misses_the_deadline_is_shown_and_not_taken() -> None:
    load = FAST | {Tier.SSD: rates(0.0, 1e-6)}  # 4 ms of prefix a chunk
    dear_compute = costs_of(DENSE, (0.0, 1.0, 0.0), load=load)
    case = case_of(full_chain(*[Tier.SSD] * 4, model=DENSE), dear_compute, DENSE)
    decision = case.decide(deadline_s=0.010)
    assert decision.plan is not None
    assert decision.plan.boundary == 2 * CHUNK
    assert [c.in_time for c in decision.candidates()] == [True, True, True, False, False]
    late = case.decide(deadline_s=1e-6)
    assert late.plan is None
    assert set(late.declined) == {Tier.SSD}


def test_replay_restores_where_no_checkpoint_is_near() -> None:
    stored = chain_of([in_tier(Tier.DRAM, KV)] * 6)
    case = case_of(stored, costs_of(HYBRID, load=FAST))
    assert case.decide().plan is None
    decision = case.decide(replay_tokens=80)
    plan = decision.plan
    assert plan is not None
    assert (plan.boundary, plan.resume_tokens) == (6 * CHUNK, 6 * CHUNK - 80)
    assert (plan.prefix_types, plan.boundary_types) == ((KV,), ())


@pytest.mark.parametrize(
    ("name", "replayed"),
    [
        ("gpt-oss-120b", 2_288),  # 18 windows of 128 tokens, on a grid of 16
        ("deepseek-v4-flash", 5_632),  # 43 windows of 128 tokens, on a grid of 256
        ("deepseek-v4-pro", 7_936),  # 61 of them
        ("gemma-3-27b", 53_200),  # 52 windows of 1,024 tokens
    ],
)
def test_a_replay_is_priced_as_the_sum_of_all_windows(name: str, replayed: int) -> None:
    """Not as one window: each window layer passes the missing tokens of the one below on."""
    model = PRESETS[name]()
    rule = WindowReplay.of(model)
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    token_s, num_chunks = 1e-4, 256
    stored = chain_of(
        [in_tier(Tier.DRAM, *model.prefix_types)] * num_chunks, chunk_tokens=layout.chunk_tokens
    )
    costs = costs_of(model, (0.0, token_s, 0.0), load={Tier.DRAM: rates(0.0, 0.0)})
    planner = RestorePlanner(layout, costs, replay_tokens=rule.tokens)

    def candidates(chunks: int) -> dict[int, RestoreCandidate]:
        end = chunks * layout.chunk_tokens
        found = planner.plan(stored[:chunks], 0, end, end + 1, IDLE).candidates()
        return {candidate.boundary: candidate for candidate in found}

    assert rule.tokens == replayed
    end = num_chunks * layout.chunk_tokens
    last = candidates(num_chunks)[end]
    assert (last.resume_tokens, last.chosen) == (end - replayed, True)
    assert last.terms.compute_s == pytest.approx((replayed + 1) * token_s)
    within = replayed // layout.chunk_tokens  # a prompt shorter than the replay
    assert candidates(within).keys() == {0}


def test_a_replay_is_priced_only_if_its_lower_bound_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced = []
    replays = Pricing.with_replay

    def noted(*arguments: Any) -> Prices:
        priced.append(arguments)
        return replays(*arguments)

    monkeypatch.setattr(Pricing, "with_replay", noted)
    whole, bare = in_tier(Tier.DRAM, KV, SWA), in_tier(Tier.DRAM, KV)
    near, far = chain_of([whole] * 6), chain_of([whole] * 2 + [bare] * 4)
    decisions = [
        case_of(stored, costs_of(HYBRID, load=FAST)).decide(replay_tokens=80)
        for stored in (near, far)
    ]
    assert len(priced) == 1
    assert [d.plan is not None and d.plan.replay_tokens for d in decisions] == [0, 80]
    assert len(decisions[0].candidates()) == 1 + 6 + 5, "but it is shown"


def test_a_replay_that_resumes_slightly_later_than_the_checkpoint_is_priced() -> None:
    """Loading is free, so 176 tokens are computed where the checkpoint leaves 192."""
    free = {Tier.DRAM: rates(0.0, 0.0)}
    stored = chain_of([*[BOTH] * 5, in_tier(Tier.DRAM, KV)])
    decision = case_of(stored, costs_of(HYBRID, load=free)).decide(replay_tokens=48)
    assert decision.plan is not None
    assert (decision.plan.resume_tokens, decision.plan.replay_tokens) == (6 * CHUNK - 48, 48)


def test_a_replay_priced_after_the_decision_uses_the_costs_of_the_decision() -> None:
    case = case_of(full_chain(*[Tier.DRAM] * 3), costs_of(HYBRID, load=FAST))
    before = case.decide(replay_tokens=80).candidates()
    later = case.decide(replay_tokens=80)
    case.costs.compute.observe(1000, 0, 99.0)
    case.costs.load.observe(Tier.DRAM, {KV: 1000}, 99.0)
    assert later.candidates() == before


def test_a_checkpoint_is_taken_where_it_is_cheaper_than_replay() -> None:
    case = case_of(full_chain(*[Tier.DRAM] * 6), costs_of(HYBRID, load=FAST))
    plan = case.decide(replay_tokens=80).plan
    assert plan is not None
    assert (plan.boundary, plan.replay_tokens) == (6 * CHUNK, 0)


def test_a_boundary_where_a_local_chunk_begins_needs_none_of_its_state() -> None:
    """A chunk of 192 tokens begins at the last of the boundaries 64, 128 and 192."""
    case = case_of(chain_of([in_tier(Tier.DRAM, KV)] * 4), costs_of(LLAMA4, load=FAST), LLAMA4)
    for decision in (case.decide(), case.decide("always_load")):
        plan = decision.plan
        assert plan is not None
        assert (plan.boundary, plan.boundary_types) == (192, ())
    assert [c.boundary for c in case.decide().candidates()] == [0, 192]


def test_a_model_without_boundary_state_is_not_replayed() -> None:
    case = case_of(full_chain(*[Tier.DRAM] * 6, model=DENSE), costs_of(DENSE), DENSE)
    assert all(c.boundary == c.resume_tokens for c in case.decide(replay_tokens=80).candidates())


def test_a_decision_keeps_its_costs_when_the_model_learns() -> None:
    case = case_of(full_chain(*[Tier.DRAM] * 3), costs_of(HYBRID, load=FAST))
    decision = case.decide()
    before = decision.candidates()
    case.costs.compute.observe(1000, 0, 99.0)
    case.costs.load.observe(Tier.DRAM, {KV: 1000}, 99.0)
    assert decision.candidates() == before
    assert case.decide().candidates() != before


def test_load_bytes_are_listed_by_tier() -> None:
    stored = chain_of([BOTH, in_tier(Tier.SSD, KV) | in_tier(Tier.DRAM, SWA)])
    last = case_of(stored, costs_of(HYBRID)).decide().candidates()[-1]
    assert last.load_bytes == {Tier.DRAM: 4000 + 5000, Tier.SSD: 4000}


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        RestorePlanner(layout_of(DENSE), costs_of(DENSE), "sometimes")  # type: ignore[arg-type]


def test_prompts_longer_than_the_planners_first_arrays() -> None:
    """Beyond the arrays the planner starts with."""
    tiers = in_tier(Tier.DRAM, StateType.DENSE_KV)
    stored = chain_of([tiers])[:1]
    key = stored[0].chunk
    stored = [
        StoredChunk(dataclasses.replace(key, start=i * CHUNK, end=(i + 1) * CHUNK), tiers)
        for i in range(3000)
    ]
    planner = RestorePlanner(layout_of(DENSE), costs_of(DENSE, load=FAST))
    plan = planner.plan(stored, 0, math.inf, 3000 * CHUNK + 1, IDLE).plan  # type: ignore[arg-type]
    assert plan is not None
    assert plan.boundary == 3000 * CHUNK
