"""Routers know what they sent, what was reported, and what other routers tell them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.errors import SimulationError
from ownership.scheduling.step import WorkerPrefix
from ownership.simulator.policies import parse_policy
from ownership.simulator.routers import Knowledge, Router
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session, Trace
from tests.ownership.simulator.checked_runs import figures, run_of
from tests.ownership.simulator.small_fleets import agents, fleet, prompt, trace_of

ALL_VIEWS = (
    "",
    "+view=exact",
    "+view=reports+reports=1",
    "+reports=0.5+report_lag=0.2+lost_reports=0.3",
    "+routers=3",
    "+routers=3+deltas=0.05",
    "+routers=2+reports=1",
    "+prefix_lag=0.5+wrong_prefixes=0.3",
)


def burst(number: int = 40) -> Trace:
    """Prompts that share nothing, each of a second of computing, ten a second."""
    rng = range(number)
    return trace_of(*[Session(str(i), (prompt(1_000 * i, 16_384),), 0.1 * i) for i in rng])


@pytest.mark.parametrize("view", ALL_VIEWS)
@pytest.mark.parametrize("policy", ["ownerserve", "static_pd+prefillers=1"])
def test_everything_is_served_and_no_ledger_keeps_a_request(policy: str, view: str) -> None:
    run = run_of(agents(8, rate=0.5), fleet(3), policy + view)
    assert len(run.tally.task_s) == 8


def test_a_ledger_is_as_good_as_an_exact_view_and_reports_are_not() -> None:
    """Ten prompts a second come to four workers; a report is a second old when the next comes."""
    spec = fleet(4)
    exact, ledger, reports, lagging = (
        figures(burst(), spec, f"ownerserve+view={view}").task_wait_mean_s
        for view in ("exact", "ledger", "reports+reports=1", "reports+reports=1+report_lag=1")
    )
    assert ledger == pytest.approx(exact, rel=0.1)
    assert reports > 1.3 * exact
    assert lagging > reports


def test_routers_that_tell_each_other_place_like_one() -> None:
    spec = fleet(4)
    one, two, told = (
        figures(burst(), spec, f"ownerserve{more}").task_wait_mean_s
        for more in ("", "+routers=4", "+routers=4+deltas=0")
    )
    assert told == pytest.approx(one, rel=1e-3)
    assert two > 1.1 * one


def loads_seen(policy: str, trace: Trace) -> list[tuple[int, int]]:
    """Return for each request the requests known at its router, and those at the worker."""
    spec = fleet(1)
    shape = StateShape.of(spec.model, 256)
    run = FleetSimulation(spec, parse_policy(policy), shape, iter(trace), 256, 0)
    (worker,) = run.workers.values()
    found = []
    updated = Router.update

    def update(router: Router, now_s: float) -> None:
        updated(router, now_s)
        known, there = router.ledger.load("w0"), worker.load()
        found.append(
            (
                known.waiting_requests + known.running_requests,
                there.waiting_requests + there.running_requests,
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "update", update)
        run.run()
    return found


def test_one_router_knows_every_request_at_a_worker() -> None:
    seen = loads_seen("ownerserve", burst(20))
    assert [known for known, _ in seen] == [there for _, there in seen]
    assert max(there for _, there in seen) > 5


def test_two_routers_know_their_own_and_by_reports_those_of_the_other() -> None:
    apart = loads_seen("ownerserve+routers=2", burst(20))
    assert sum(known for known, _ in apart) < 0.7 * sum(there for _, there in apart)
    reported = loads_seen("ownerserve+routers=2+reports=0.01", burst(20))
    assert sum(known for known, _ in reported) > 0.9 * sum(there for _, there in reported)


def prefixes_known(policy: str, wait_s: float) -> list[int]:
    """Return the tokens of a prompt that a router believes are stored, before and after it runs."""
    return [max(prefix) for prefix in told_prefixes(policy, wait_s)]


def told_prefixes(policy: str, wait_s: float) -> list[WorkerPrefix]:
    """Return what a router believes of a prompt, before and after it runs.

    The prompt comes again `wait_s` after it was stored.
    """
    spec, told = fleet(1), []
    first = replace(prompt(0, 2_048), output_tokens=1)
    again = replace(prompt(0, 2_304), parent=0, think_s=wait_s)
    shape = StateShape.of(spec.model, 256)
    sessions = iter(trace_of(Session("a", (first, again), 0.0)))
    run = FleetSimulation(spec, parse_policy(policy), shape, sessions, 256, 0)
    known = run.routers.prefixes

    def prefixes(chain: BlockRuns, chunk_tokens: int) -> dict[str, WorkerPrefix]:
        found = known(chain, chunk_tokens)
        told.append(found.get("w0", WorkerPrefix()))
        return found

    run.routers.prefixes = prefixes  # type: ignore[method-assign]
    run.run()
    return told


def test_what_was_stored_just_now_is_known_late() -> None:
    assert prefixes_known("ownerserve", 0.1) == [0, 2_048]
    assert prefixes_known("ownerserve+prefix_lag=1", 0.1) == [0, 0]
    assert prefixes_known("ownerserve+prefix_lag=1", 1.1) == [0, 2_048]


@pytest.mark.parametrize(
    ("policy", "known"),
    [("ownerserve", [0, 0]), ("ownerserve+view=exact", [0, 2_048]),
     ("ownerserve+tiers=gpu", [0, 2_048])],
)  # fmt: skip
def test_routers_know_pages_of_stock_engines_only(policy: str, known: list[int]) -> None:
    """The directory does not record what is in HBM; engines without DRAM publish it."""
    assert [prefix.hbm_tokens for prefix in told_prefixes(policy, 0.1)] == known


def test_a_prefix_that_is_known_wrong_has_another_length_or_none() -> None:
    sent = agents(8, rate=0.5)
    right, wrong = (figures(sent, fleet(3), f"ownerserve{x}") for x in ("", "+wrong_prefixes=1"))
    assert wrong.requests == right.requests
    assert wrong.owner_hit_rate < right.owner_hit_rate


def test_the_default_is_what_a_router_can_know() -> None:
    assert parse_policy("ownerserve").knowledge == Knowledge("ledger", None, 0.0, 0.0, 1, None)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("view=best", "view is 'best'; there are ledger, reports, exact"),
        ("view=reports", "there are no reports: add reports=SECONDS"),
        ("report_lag=1", "there are no reports"),
        ("view=exact+reports=1", "an exact view has no reports"),
        ("view=exact+prefix_lag=1", "an exact view has no prefix_lag"),
        ("wrong_prefixes=2", "2 is no share of 1"),
        ("deltas=1", "one router has no other: add routers=2"),
        ("routers=0", "'0' is no number from 1 to 1000"),
        ("reports=1+lost_reports=1.5", "1.5 is no share of 1"),
        ("reports=0", "'0' is no number above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(option: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        parse_policy(f"ownerserve+{option}")
