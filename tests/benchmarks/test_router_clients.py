"""The counts that are made of the reports of clients that send through the router."""

from __future__ import annotations

import pytest

from benchmarks.clients import Report, Run
from benchmarks.router_clients import Counts, Passage, Return, returns, row_of, summarised
from ownership.decisions.records import DecisionRecord
from ownership.router.metrics import RouterMetrics
from ownership.scheduling.decision import PlacementAction


def metrics(answers: int = 10, left: int = 2, **others: int) -> RouterMetrics:
    """Return the metrics of a router that has placed all requests once."""
    found = RouterMetrics()
    found.requests.labels("chat", "200").inc(answers)
    found.requests.labels("tokenize", "200").inc(3)
    found.left.inc(left)
    found.placements.labels("exact", "colocated_prefill").inc(answers + left)
    for status in others:
        found.requests.labels("chat", status.removeprefix("status_")).inc(others[status])
    return found


def passage(found: RouterMetrics, requests: int = 9, cancelled: int = 2) -> Passage:
    report = Report(requests, 0, 1.0, 1.0, cancelled, unreported=1)
    counts = Counts.of(found.text().decode())
    return Passage(Run(report, 0, 64, 64), counts, [decision(0.0), decision(5.0)])


def decision(time_s: float, worker: str = "w0", chunks: int = 4, first: int = 0) -> DecisionRecord:
    return DecisionRecord(
        time=time_s,
        path="/v1/completions",
        policy="ownerserve",
        prompt_tokens=1_000,
        worker=worker,
        action=PlacementAction.COLOCATED_PREFILL,
        predicted={},
        predicted_ttft_s=None,
        chunks=[(first, chunks)],
        chunk_tokens=32,
        first_byte_s=1.0,
        total_s=2.0,
    )


def test_a_report_and_a_router_that_agree() -> None:
    found = passage(metrics())
    assert (found.errors, found.uncounted) == (0, 0)


@pytest.mark.parametrize(("requests", "cancelled"), [(8, 2), (10, 2), (9, 0)])
def test_requests_that_only_one_of_them_counted(requests: int, cancelled: int) -> None:
    assert passage(metrics(), requests, cancelled).uncounted > 0


def test_a_request_without_a_placement() -> None:
    found = metrics()
    found.requests.labels("chat", "200").inc()
    assert passage(found, 10).uncounted == 1


def test_what_the_router_counted_as_an_error() -> None:
    found = metrics(status_429=1)
    found.retried.labels("w0").inc(2)
    found.cut.labels("w1").inc(3)
    found.prefills.labels("w1", "failed").inc(4)
    found.prefills.labels("w1", "done").inc(5)
    assert passage(found).errors == 10


def test_counters_of_before_are_not_counted() -> None:
    found = metrics()
    before = Counts.of(found.text().decode())
    found.requests.labels("chat", "200").inc(7)
    gained = Counts.of(found.text().decode())
    gained.subtract(before)
    assert gained.total_of("requests") == gained["requests", "200"] == 7


def test_a_request_stays_where_the_longest_beginning_of_its_prompt_was_answered() -> None:
    longest, short = decision(0.0, "w0", 8), decision(0.0, "w1", 2)
    for worker, stayed in (("w0", True), ("w1", False)):
        again = decision(3.0, worker, 9)
        assert returns([longest, short, again]) == [Return(8 * 32, stayed)]


def test_what_was_under_way_or_failed_or_differs_is_nothing_to_return_to() -> None:
    failed = decision(0.0)
    failed.first_byte_s = None
    assert not returns([decision(0.0), decision(1.0), failed, decision(3.0, first=100)])


def test_figures_are_over_all_clients() -> None:
    rows = {"one": passage(metrics()), "other": passage(metrics(20, 0), 19, 0)}
    _, figures = summarised({name: row_of(passed) for name, passed in rows.items()})
    assert figures["requests"] == 28
    assert figures["exact_share"] == 1.0
    assert (figures["returned"], figures["stayed_share"]) == (2, 1.0)
    assert figures["reused_share"] == 1.0
