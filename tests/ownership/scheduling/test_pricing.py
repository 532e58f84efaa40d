"""Prices follow the planner's models, are equal as arrays and as terms, and match hand figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import InterferenceCoefficients
from hetero_connector.planner.cost_model import HandoffCost, RequestOverhead
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from ownership.scheduling import (
    FleetView,
    Link,
    PlacementWeights,
    StateFootprint,
    Step,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
)
from ownership.scheduling.roles import Leaning
from ownership.scheduling.step_pricing import Route, StepPricing
from tests.ownership.scheduling.candidates import routes
from tests.ownership.scheduling.fleets import (
    BYTE_A_TOKEN,
    FREE,
    costs_of,
    fleet_of,
    rates,
    steps,
    worker,
    workers,
)
from tests.planner.chains import (
    CHUNK,
    DENSE,
    HYBRID,
    KV,
    SWA,
    chain_of,
    in_tier,
    layout_of,
)
from tests.planner.chains import costs_of as planner_costs

WEIGHTS = PlacementWeights(0.01, 0.25)


@given(workers(), steps(), st.booleans())
def test_arrays_and_terms_give_the_same_totals(
    found: list[WorkerView], step: Step, linked: bool
) -> None:
    last = found[-1].name
    links = {(found[0].name, last): Link(0.2, 1e-3)} if linked else None
    fleet = FleetView(BYTE_A_TOKEN, found, links)
    sources = list(range(len(fleet)))
    pricing = StepPricing(step, fleet, WEIGHTS, sources)
    totals = {}
    for i in sources:
        totals[Route(i, i)] = pricing.local_total_s[i]
        for j in sources:
            totals[Route(j, j, i)] = pricing.fetched_total_s[i, j]
            if i != j:
                totals[Route(j, i)] = pricing.remote_total_s[i, j]
    possible = set(routes(pricing))
    for route, total_s in totals.items():
        if route in possible:
            assert pricing.terms(route).total_s == pytest.approx(total_s), route
            assert min(pricing.terms(route)) >= -1e-12
        else:
            assert total_s == math.inf, route


@given(workers(), steps(), st.booleans(), st.sampled_from([0.0, 1.5]))
def test_no_route_costs_less_than_its_bound(
    found: list[WorkerView], step: Step, linked: bool, demand: float
) -> None:
    links = {(found[0].name, found[-1].name): Link(0.2, 1e-3)} if linked else None
    fleet = FleetView(BYTE_A_TOKEN, found, links)
    leaning = Leaning(2.0, np.ones(len(fleet)), demand, fleet.accepting)
    pricing = StepPricing(step, fleet, WEIGHTS, range(len(fleet)), leaning)
    rounding = 1.0 - 1e-12
    assert rounding * pricing.fetched_least_s <= pricing.fetched_total_s.min()
    assert rounding * pricing.remote_least_s <= pricing.remote_total_s.min()


@pytest.mark.parametrize("model", [DENSE, HYBRID])
@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.SSD])
@pytest.mark.parametrize("queued", [0, 300])
def test_a_worker_is_priced_as_its_own_planner_prices_the_request(model, tier, queued) -> None:  # type: ignore[no-untyped-def]
    """8 chunks in one tier, no running decodes: the planner's stall is not modelled here."""
    layout = layout_of(model)
    load = {Tier.DRAM: rates(1e-4, 1e-7), Tier.SSD: rates(1e-3, 1e-6)}
    costs = planner_costs(model, (0.01, 1e-3, 1e-6), load, step_tokens=100)
    prompt = 9 * CHUNK
    planner = RestorePlanner(layout, costs)
    chain = chain_of([in_tier(tier, KV, SWA)] * 8)
    planned = planner.plan(chain, 0, prompt - 1, prompt, EngineLoad(queued_tokens=queued))
    assert planned.plan is not None
    assert planned.plan.boundary == 8 * CHUNK
    held = WorkerPrefix(0, 8 * CHUNK if tier is Tier.DRAM else 0, 8 * CHUNK)
    view = WorkerView("a", costs, 1 << 30, load=WorkerLoad(queued_tokens=queued))
    fleet = FleetView(StateFootprint.of(layout), [view])
    terms = StepPricing(Step(prompt, {"a": held}), fleet, WEIGHTS).terms(Route(0, 0))
    expected = planned.predicted
    assert terms.queue_s == pytest.approx(expected.queue_s)
    assert terms.restore_s == pytest.approx(expected.load_s)
    assert terms.compute_s == pytest.approx(expected.compute_s)
    nothing = StepPricing(Step(prompt), fleet, WEIGHTS).terms(Route(0, 0))
    assert nothing.total_s == pytest.approx(planned.nothing.total_s)


def test_state_on_a_slow_ssd_is_computed_again() -> None:
    """100 of 200 tokens are in DRAM, 190 with SSD. From SSD 90 bytes at 10 ms are 900 ms, so
    it computes 100 tokens, 100 ms."""
    fleet = fleet_of(worker("a", costs=costs_of(ssd_s=1e-2)))
    pricing = StepPricing(Step(200, {"a": WorkerPrefix(0, 100, 190)}), fleet, FREE)
    assert pricing.terms(Route(0, 0)).total_s == pytest.approx(0.1)
    assert pricing.resume_tokens(Route(0, 0)) == 100


def test_terms_of_local_fetched_and_remote_routes() -> None:
    """1,000 tokens; b has 900 of them in DRAM. 1 ms a token, 0.1 ms a byte from a peer.

    Locally at a: queue of 50 tokens 0.05 + 1.0 computed = 1.05.
    Fetched: max(0.09 network, 0.05 queue) + 0.1 computed: 0.05 + 0.04 + 0.1 = 0.19.
    Prefilled at b, decoded at a: b is done after 0.1, 999 bytes take 0.0999, a's queue is
    worked off meanwhile, and its last token takes 0.001.
    """
    fleet = fleet_of(worker("a", WorkerLoad(queued_tokens=50)), worker("b"))
    pricing = StepPricing(Step(1_000, {"b": WorkerPrefix(0, 900, 900)}), fleet, FREE, [1])
    assert pricing.terms(Route(0, 0)) == pytest.approx((0.05, 1.0, 0, 0, 0, 0, 0, 0))
    assert pricing.terms(Route(0, 0, 1)) == pytest.approx((0.05, 0.1, 0.04, 0, 0, 0, 0, 0))
    remote = (0, 0.101, 0.0999, 0, 0, 0, 0, 0)
    assert pricing.terms(Route(0, 1)) == pytest.approx(remote, abs=1e-9)


def test_a_handoff_costs_more_than_reading() -> None:
    """0.3 s + 0.1 ms a token, and b's front end and scheduling once more: 0.02 + 0.01 s, and
    0.02 ms a token."""
    costs = costs_of()
    costs.handoff = HandoffCost(0.3, 1e-4)
    costs.overhead = RequestOverhead(0.02, 1e-5, 0.01, 1e-5)
    fleet = fleet_of(worker("a"), worker("b", costs=costs))
    free, dear = (
        StepPricing(Step(1_000), x, FREE).terms(Route(1, 0))
        for x in (fleet_of(worker("a"), worker("b")), fleet)
    )
    assert dear == pytest.approx(free._replace(network_s=free.network_s + 0.33 + 0.12))
    pricing = StepPricing(Step(1_000), fleet, FREE)
    assert pricing.remote_total_s[0, 1] == pytest.approx(dear.total_s)
    assert pricing.terms(Route(1, 1)).total_s == pytest.approx(1.0), "it computes all itself"


def test_terms_of_a_route_that_fetches_and_hands_off() -> None:
    """a fetches 900 of 1,000 tokens from b, computes 100, hands off to c: as Conductor does.

    network: 0.09 + 999 bytes 0.0999; compute: 0.1 + 0.001 for the last token.
    """
    fleet = fleet_of(worker("a"), worker("b"), worker("c"))
    pricing = StepPricing(Step(1_000, {"b": WorkerPrefix(0, 900, 900)}), fleet, FREE, [1])
    terms = pricing.terms(Route(2, 0, 1))
    assert terms == pytest.approx((0, 0.101, 0.1899, 0, 0, 0, 0, 0), abs=1e-9)
    assert terms.ttft_s == pytest.approx(0.2909)


def test_terms_of_delayed_decodes() -> None:
    """4 decodes; a prefill of 10 tokens in steps of 5 delays each by 2 x 0.1 + 10 x 0.01 = 0.3.

    mu = 0.5: 0.5 x 4 x 0.3 = 0.6. Then 20 tokens are decoded beside them: steps take
    0.2 + 5 x 0.02 = 0.3, and each of the 4 is 20 x 0.02 late: 0.5 x 4 x 0.4 = 0.8.
    """
    delays = InterferenceCoefficients(0.2, 0.02, 0.0, 0.1, 0.01, 0.0)
    busy = WorkerLoad(running_requests=4)
    fleet = fleet_of(worker("a", busy, costs_of(step_tokens=5, interference=delays)))
    step = Step(10, output_tokens=20.0)
    terms = StepPricing(step, fleet, PlacementWeights(0.5, 0.0)).terms(Route(0, 0))
    assert terms.interference_s == pytest.approx(0.6 + 0.8)
    assert terms.decode_s == pytest.approx(20 * 0.3)


def test_requests_that_wait_count_as_decodes() -> None:
    """1 runs and 3 wait. The prefill delays the one by 0.3; 20 tokens are decoded with all 4."""
    delays = InterferenceCoefficients(0.2, 0.02, 0.0, 0.1, 0.01, 0.0)
    load = WorkerLoad(running_requests=1, waiting_requests=3)
    fleet = fleet_of(worker("a", load, costs_of(step_tokens=5, interference=delays)))
    step = Step(10, output_tokens=20.0)
    terms = StepPricing(step, fleet, PlacementWeights(0.5, 0.0)).terms(Route(0, 0))
    assert terms.decode_s == pytest.approx(20 * (0.2 + 5 * 0.02))
    assert terms.interference_s == pytest.approx(0.5 * (0.3 + 4 * 20 * 0.02))


def test_terms_of_roles() -> None:
    """The same figures on a worker that leans to prefills by a quarter; 4 is the largest factor.

    Decoding there is 4^0.25 as dear: 6 s and 0.8 of delays; the prefill's 0.6 are 4^0.75 as dear.
    """
    delays = InterferenceCoefficients(0.2, 0.02, 0.0, 0.1, 0.01, 0.0)
    busy = WorkerLoad(running_requests=4)
    fleet = fleet_of(
        worker("a", busy, costs_of(step_tokens=5, interference=delays)), worker("b"), worker("c")
    )
    leaning = Leaning(4.0, np.ones(3), 0.25, np.ones(3))
    weights = PlacementWeights(0.5, 0.0)
    terms = StepPricing(Step(10, output_tokens=20.0), fleet, weights, (), leaning).terms(
        Route(0, 0)
    )
    assert terms.interference_s == pytest.approx(0.6 + 0.8)
    assert terms.role_s == pytest.approx((4**0.25 - 1) * (6.0 + 0.8) + (4**0.75 - 1) * 0.6)


def test_terms_of_second_copies() -> None:
    """A prompt of 1,000 tokens: b has 900, c 400 on its SSD; 1 ms a token, kappa 0.5.

    At a 900 tokens are held twice then, at c 500, at b none, however they get there. Prefilled at
    b and decoded at a it is all but the last token.
    """
    fleet = fleet_of(worker("a"), worker("b"), worker("c"))
    held = {"b": WorkerPrefix(0, 900, 900), "c": WorkerPrefix(0, 0, 400)}
    weights = PlacementWeights(0.0, 0.5)
    pricing = StepPricing(Step(1_000, held), fleet, weights, [1])
    ways = (Route(0, 0), Route(0, 0, 1), Route(1, 1), Route(2, 2), Route(0, 1))
    assert [pricing.terms(route).copy_s for route in ways] == pytest.approx(
        [0.45, 0.45, 0.0, 0.25, 0.4995]
    )


@pytest.mark.parametrize("copy", [-0.1, math.inf, math.nan])
def test_a_price_of_copies_that_is_not_finite_is_refused(copy: float) -> None:
    with pytest.raises(ValueError, match="copy are finite"):
        PlacementWeights(copy=copy)


def test_idle_sessions_count_when_a_new_session_is_placed() -> None:
    """4 sessions will decode again. 10 tokens at 0.02 s for each of those. A request without a
    session will not."""
    delays = InterferenceCoefficients(0.2, 0.02, 0.0, 0.1, 0.01, 0.0)
    load = WorkerLoad(running_requests=1, returning=4.0)
    fleet = fleet_of(worker("a", load, costs_of(interference=delays)))
    asked = (
        Step(10, session_id=session, owner=owner, output_tokens=10.0)
        for session, owner in (("s", None), ("s", "a"), ("", None))
    )
    new, known, single = (StepPricing(x, fleet, FREE).terms(Route(0, 0)) for x in asked)
    assert known.decode_s == pytest.approx(10 * (0.2 + 0.02 * 2))
    assert new.decode_s - known.decode_s == pytest.approx(4 * 10 * 0.02)
    assert single.decode_s == known.decode_s


def test_a_request_waits_for_pages_of_a_full_worker() -> None:
    """Pages of 1,000 bytes, 800 used, 300 needed: 100 short. 800 bytes leave in 4 s: 0.5 s."""
    full = WorkerLoad(hbm_used_bytes=800, residence_s=4.0)
    fleet = fleet_of(worker("a", full, hbm_bytes=1_000))
    assert StepPricing(Step(300), fleet, FREE).terms(Route(0, 0)).queue_s == pytest.approx(0.5)
    cached = Step(300, {"a": WorkerPrefix(150, 150, 150)})  # what is free has it already
    assert StepPricing(cached, fleet, FREE).terms(Route(0, 0)).queue_s == pytest.approx(0.5)
    assert StepPricing(Step(1_001), fleet, FREE).terms(Route(0, 0)).total_s == math.inf


def test_a_prompt_that_fits_no_pages_costs_infinity_despite_a_cached_prefix() -> None:
    fleet = fleet_of(worker("a", hbm_bytes=1_000), worker("b", hbm_bytes=9_000))
    pricing = StepPricing(Step(1_200, {"a": WorkerPrefix(600, 600, 600)}), fleet, FREE)
    assert pricing.local_total_s.tolist() == [math.inf, pytest.approx(1.2)]
    handoff = pricing.terms(Route(1, 0))
    assert (handoff.queue_s, handoff.total_s) == (math.inf, math.inf)


def test_a_slow_link_and_a_busy_source_delay_a_fetch() -> None:
    """900 bytes: over the link 0.5 + 0.9 s, and 100 bytes that others read before them 0.1."""
    sending = worker("b", WorkerLoad(outgoing_bytes=100))
    fleet = fleet_of(worker("a"), sending, links={("b", "a"): Link(0.5, 1e-3)})
    pricing = StepPricing(Step(1_000, {"b": WorkerPrefix(0, 900, 900)}), fleet, FREE, [1])
    assert pricing.terms(Route(0, 0, 1)).network_s == pytest.approx(1.5)
