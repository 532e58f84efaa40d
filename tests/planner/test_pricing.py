"""Each term of the price, computed by hand with round numbers."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostModel, CostTerms
from hetero_connector.planner.decision import RestoreCandidate, RestoreDecision
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad, Parking
from hetero_connector.spec import ModelSpec, StateType
from tests.planner.chains import (
    CHUNK,
    DENSE,
    HYBRID,
    KV,
    SWA,
    chain_of,
    costs_of,
    in_tier,
    layout_of,
    rates,
)

DRAM = {Tier.DRAM: rates(0.001, 1e-6)}
CHUNK_BYTES = 4000  # of DENSE_KV: four pages of 16 tokens
DRAM_CHUNK_S = 0.004


def candidates(
    costs: CostModel,
    tiers: list[Tier],
    load: EngineLoad,
    model: ModelSpec = DENSE,
    prompt_tokens: int = 1000,
    local_tokens: int = 0,
) -> list[RestoreCandidate]:
    """The candidates of a chain whose chunks are in these tiers."""
    chain = chain_of([in_tier(tier, *model.state_types) for tier in tiers])
    planner = RestorePlanner(layout_of(model), costs)
    limit = prompt_tokens - 1
    return list(planner.plan(chain, local_tokens, limit, prompt_tokens, load).candidates())


def approx(*terms: float) -> CostTerms:
    return CostTerms(*(pytest.approx(x, abs=1e-6) for x in terms))  # pages of kilobytes cost less


def test_nothing_is_the_prefill_of_all_tokens() -> None:
    nothing = candidates(costs_of(DENSE), [], EngineLoad())[0]
    # 10 ms + 1000 x 1 ms + 1e-6 x 1000 x 500
    assert nothing.terms == approx(0, 0, 1.51, 0, 0)


def test_of_a_chunk_that_is_cut_only_what_is_needed_is_copied_but_all_is_read() -> None:
    """The second chunk, on SSD, is needed up to 48 of 64 tokens: 3 of 4 pages of 1,000 bytes."""
    costs = costs_of(DENSE, load={**DRAM, Tier.SSD: rates(0.01, 1e-5)})
    load = EngineLoad(hidden_share=0.0)
    *_, cut = candidates(costs, [Tier.DRAM, Tier.SSD], load, prompt_tokens=2 * CHUNK)
    assert (cut.boundary, cut.resume_tokens) == (2 * CHUNK - 16, 2 * CHUNK - 16)
    # staged in 10 ms + 4000 x 10 us, copied in 1 ms + 7000 x 1 us
    compute_s = 0.01 + 16 * 1e-3 + 1e-6 * 16 * (112 + 8)
    assert cut.terms == approx(0, 0.05 + 0.008, compute_s, 0, 0)


def test_local_tokens_are_context_and_are_not_computed() -> None:
    nothing = candidates(costs_of(DENSE), [], EngineLoad(), local_tokens=400)[0]
    # 10 ms + 600 x 1 ms + 1e-6 x 600 x (400 + 300)
    assert nothing.terms.compute_s == pytest.approx(0.01 + 0.6 + 0.42)


def test_each_step_pays_its_fixed_part_and_attention_adds_up() -> None:
    nothing = candidates(costs_of(DENSE, step_tokens=300), [], EngineLoad())[0]
    assert nothing.terms.compute_s == pytest.approx(4 * 0.01 + 1.0 + 0.5)


def test_a_parked_load_comes_before_the_compute() -> None:
    two = candidates(costs_of(DENSE, load=DRAM), [Tier.DRAM] * 2, EngineLoad(parking="always"))[2]
    rest = 1000 - 2 * CHUNK
    compute_s = 0.01 + rest * 1e-3 + 1e-6 * rest * (2 * CHUNK + rest / 2)
    assert two.terms == approx(0, 0.001 + 2 * DRAM_CHUNK_S, compute_s, 0, 0)


def test_layerwise_only_the_first_layer_is_exposed_if_compute_is_longer() -> None:
    # HYBRID has two layers; at the second boundary five of the window's pages.
    two = candidates(costs_of(HYBRID, load=DRAM), [Tier.DRAM] * 2, EngineLoad(), HYBRID)[2]
    dram_s = 0.001 + (2 * CHUNK_BYTES + 5000) * 1e-6
    assert two.terms.load_s == pytest.approx(dram_s / 2)


def test_layerwise_a_long_load_is_exposed_beyond_the_first_step() -> None:
    slow = {Tier.DRAM: rates(0.0, 1e-4)}
    costs = costs_of(HYBRID, (0.01, 1e-3, 0.0), load=slow, step_tokens=100)
    two = candidates(costs, [Tier.DRAM] * 2, EngineLoad(), HYBRID)[2]
    dram_s, first_step_s = 1.3, 0.11
    assert two.terms.load_s == pytest.approx(dram_s - first_step_s + dram_s / 2)


def test_ssd_is_staged_first_and_then_goes_from_dram_to_pages() -> None:
    load = DRAM | {Tier.SSD: rates(0.1, 1e-5)}
    mixed = candidates(
        costs_of(DENSE, load=load), [Tier.DRAM, Tier.SSD, Tier.SSD], EngineLoad(parking="always")
    )
    in_dram, one_staged, two_staged = mixed[1:]
    assert in_dram.terms.load_s == pytest.approx(0.001 + DRAM_CHUNK_S)
    assert one_staged.terms.load_s == pytest.approx(0.1 + 0.04 + 0.001 + 2 * DRAM_CHUNK_S)
    assert two_staged.terms.load_s == pytest.approx(0.1 + 0.08 + 0.001 + 3 * DRAM_CHUNK_S)


def test_boundary_state_costs_at_its_own_boundary_only_by_its_own_rate() -> None:
    load = {
        Tier.DRAM: rates(0.0, 0.0),
        Tier.SSD: rates(0.0, 1e-5, window_swa=1e-4),
    }
    chain = chain_of(
        [in_tier(Tier.DRAM, KV) | in_tier(Tier.SSD, SWA), in_tier(Tier.DRAM, KV, SWA)] * 2
    )
    planner = RestorePlanner(layout_of(HYBRID), costs_of(HYBRID, load=load))
    found = planner.plan(chain, 0, 999, 1000, EngineLoad(parking="always")).candidates()
    # Four pages of window at 64 tokens, five from 80 on.
    expected = [0.0, 4000 * 1e-4, 0.0, 5000 * 1e-4, 0.0]
    assert [c.terms.load_s for c in found] == pytest.approx(expected, abs=1e-6)


def test_tiers_are_staged_in_parallel() -> None:
    load = DRAM | {Tier.SSD: rates(0.0, 1e-5), Tier.PEER: rates(0.0, 2e-5)}
    three = candidates(
        costs_of(DENSE, load=load), [Tier.PEER, Tier.SSD, Tier.SSD], EngineLoad(parking="always")
    )[3]
    assert three.terms.load_s == pytest.approx(max(0.08, 0.08) + 0.001 + 3 * DRAM_CHUNK_S)


def test_bytes_in_flight_go_first() -> None:
    load = DRAM | {Tier.SSD: rates(0.1, 1e-5)}
    busy = EngineLoad(in_flight_bytes={Tier.SSD: 50_000}, parking="always")
    one = candidates(costs_of(DENSE, load=load), [Tier.SSD], busy)[1]
    assert one.terms.load_s == pytest.approx(0.1 + 0.5 + 0.04 + 0.001 + DRAM_CHUNK_S)


def test_the_queue_is_waited_for_and_hides_staging() -> None:
    load = DRAM | {Tier.SSD: rates(0.1, 1e-5)}
    for queued, hidden_s in ((0, 0.0), (100, 0.11), (1000, 0.14)):
        busy = EngineLoad(queued_tokens=queued, parking="always")
        one = candidates(costs_of(DENSE, load=load), [Tier.SSD], busy)[1]
        assert one.terms.queue_s == pytest.approx((0.01 + queued * 1e-3) if queued else 0.0)
        assert one.terms.load_s == pytest.approx(0.14 - hidden_s + 0.001 + DRAM_CHUNK_S)


@pytest.mark.parametrize("parking", ["never", "always"])
def test_waiting_requests_go_first_only_if_this_one_waits_too(parking: Parking) -> None:
    """400 tokens, 0.41 s, of requests that wait for loads."""
    load = DRAM | {Tier.SSD: rates(0.1, 1e-5)}
    costs = costs_of(DENSE, load=load)
    idle, busy = (
        candidates(costs, [Tier.DRAM, Tier.SSD], EngineLoad(waiting_tokens=n, parking=parking))
        for n in (0, 400)
    )
    assert busy[0].terms == idle[0].terms, "computing at once overtakes them"
    assert [c.terms.queue_s for c in busy] == [0.0] * 3
    delays = [b.terms.load_s - i.terms.load_s for b, i in zip(busy, idle, strict=True)]
    from_dram_s = 0.41 if parking == "always" else 0.0
    assert delays == [0.0, pytest.approx(from_dram_s), pytest.approx(0.41 - 0.14)]


@pytest.mark.parametrize("share", [1.0, 0.0])
@pytest.mark.parametrize("parking", ["never", "long", "always"])
def test_decodes_are_delayed_by_compute_and_by_loads_that_do_not_park(
    share: float, parking: Parking
) -> None:
    costs = costs_of(DENSE, load={Tier.DRAM: rates(5.0, 0.0)})
    busy = EngineLoad(running_decodes=3, hidden_share=share, parking=parking)
    nothing, one = candidates(costs, [Tier.DRAM], busy)
    assert nothing.terms.stall_s == pytest.approx(0.03 * nothing.terms.compute_s)
    held_s = one.terms.compute_s + (one.terms.load_s if parking == "never" else 0.0)
    assert one.terms.stall_s == pytest.approx(0.03 * held_s)
    assert one.terms.load_s > 4.9


def test_kv_pages_cost_by_gib_and_second() -> None:
    costs = costs_of(DENSE, load=DRAM)
    nothing, one = candidates(costs, [Tier.DRAM], EngineLoad(parking="always"))
    gib = 1000 * 1024 / 16 / 2**30
    assert nothing.terms.hbm_s == pytest.approx(0.001 * gib * nothing.terms.compute_s)
    assert one.terms.hbm_s == pytest.approx(0.001 * gib * (one.terms.compute_s + one.terms.load_s))


def test_the_total_and_the_time_to_first_token_are_sums() -> None:
    terms = CostTerms(1.0, 2.0, 4.0, 8.0, 16.0)
    assert terms.total_s == 31.0
    assert terms.ttft_s == 7.0


@pytest.mark.parametrize("busy", [EngineLoad(running_decodes=4), EngineLoad(queued_tokens=4)])
def test_loads_take_longer_while_the_engine_computes(busy: EngineLoad) -> None:
    quick, slow = (
        candidates(costs_of(DENSE, load={Tier.SSD: tier, **DRAM}), [Tier.SSD], load)[-1].terms
        for tier in (rates(0.5, 1e-6), rates(0.5, 1e-6, while_computing_s=0.25))
        for load in (busy,)
    )
    assert slow.load_s - quick.load_s == pytest.approx(0.25)
    idle = costs_of(DENSE, load={Tier.SSD: rates(0.5, 1e-6, while_computing_s=0.25), **DRAM})
    assert candidates(idle, [Tier.SSD], EngineLoad())[-1].terms.load_s < slow.load_s - 0.2


def test_while_decoding_staging_takes_half_a_step_and_is_noticed_half_a_step_late() -> None:
    costs = costs_of(DENSE, load={Tier.SSD: rates(0.5, 1e-6), **DRAM})
    idle, busy = (
        candidates(costs, [Tier.SSD], EngineLoad(running_decodes=n))[-1].terms.load_s
        for n in (0, 4)
    )
    # A step of 4 decodes takes 10 ms + 4 x 1 ms.
    assert busy - idle == pytest.approx(0.014 / 2)
    costs.staging_delay_steps = 1.0
    busy = candidates(costs, [Tier.SSD], EngineLoad(running_decodes=4))[-1].terms.load_s
    assert busy - idle == pytest.approx(0.014)
    in_dram = [
        candidates(costs, [Tier.DRAM], EngineLoad(running_decodes=n))[-1].terms.load_s
        for n in (0, 4)
    ]
    assert in_dram[0] == pytest.approx(in_dram[1])
    short = costs_of(DENSE, load={Tier.SSD: rates(0.001, 1e-12), **DRAM})
    busy = candidates(short, [Tier.SSD], EngineLoad(running_decodes=4))[-1].terms.load_s
    assert busy - in_dram[1] == pytest.approx(0.014, abs=1e-6), "no sooner than a whole step"


def test_decodes_of_long_contexts_take_longer_so_more_is_hidden_and_less_parks() -> None:
    """A step of 4 decodes over 100,000 tokens takes 10 ms + 4 x 1 ms + 100,000 x 1 us."""
    costs = costs_of(DENSE, load={Tier.SSD: rates(0.0, 1e-12), Tier.DRAM: rates(0.05, 0.0)})
    near, far = (
        EngineLoad(running_decodes=4, parking="long", decoded_context=context, hidden_share=0.0)
        for context in (0, 100_000)
    )
    from_ssd = [candidates(costs, [Tier.SSD], load)[-1].terms.load_s for load in (near, far)]
    planner = RestorePlanner(layout_of(DENSE), costs, "always_load")
    chain = chain_of([in_tier(Tier.DRAM, KV)])
    plans = [planner.plan(chain, 0, 999, 1000, load).plan for load in (near, far)]
    assert [plan.parked for plan in plans if plan] == [True, False], "50 ms to pages"
    # Staged in a step, noticed half a step later. The first one parks for half a step more.
    assert from_ssd == pytest.approx([0.014 + 0.05 + 0.007, 0.114 + 0.05], abs=1e-5)


def test_a_load_that_delays_decodes_by_more_than_a_step_parks_the_request() -> None:
    """A step of 4 decodes takes 14 ms, one of the prompt 11 ms."""
    costs = costs_of(HYBRID, (0.01, 1e-3, 0.0), load={Tier.DRAM: rates(0.0, 2e-6)}, step_tokens=1)
    costs.staging_delay_steps = 1.0

    def found(chunks: int, load: EngineLoad, *types: StateType, **options: int) -> RestoreDecision:
        planner = RestorePlanner(layout_of(HYBRID), costs, "always_load", **options)
        planner.replay_when_missing = True
        stored = chain_of([in_tier(Tier.DRAM, *types)] * chunks)
        return planner.plan(stored, 0, 999, 1000, load)

    def is_parked(*arguments: Any, **options: int) -> bool:
        plan = found(*arguments, **options).plan
        assert plan is not None
        return plan.parked

    busy = EngineLoad(running_decodes=4, parking="long")
    assert not is_parked(1, busy, KV, SWA), "16 ms, of which 16 x 3/2 - 11 delay the decodes"
    assert is_parked(2, busy, KV, SWA), "26 ms, of which 26 x 3/2 - 11 would"
    assert found(1, busy, KV, SWA).predicted.load_s == pytest.approx(0.013)
    assert found(2, busy, KV, SWA).predicted.load_s == pytest.approx(0.026 + 0.014)
    assert not is_parked(9, EngineLoad(running_decodes=4), KV, SWA)
    assert not is_parked(9, EngineLoad(queued_tokens=99, parking="long"), KV, SWA), "no decodes"
    assert not is_parked(9, busy, KV, replay_tokens=48), "each step of a replay loads"
