"""The figures that are made of the reports of load generators."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.clients import KV_TOKENS, Report, Run, agent_trace, summarised, trace_of


def run(ttft_s: float, requests_per_s: float, restored: int = 0, **report: int) -> Run:
    errors = report.pop("errors", 0)
    told = Report(10, errors, ttft_s, requests_per_s, **report)
    return Run(told, restored, restored, 100)


def test_a_trace_comes_back_to_each_session_with_a_longer_prompt() -> None:
    first, again = (trace_of(1)[at] for at in (0, 10))
    assert again["hash_ids"][: len(first["hash_ids"])] == first["hash_ids"]
    assert again["input_length"] > first["input_length"]
    assert again["timestamp"] > first["timestamp"]


def test_a_trace_does_not_fit_the_engines_cache_and_shares_nothing_with_the_next() -> None:
    one, other = ({x for line in trace_of(turn) for x in line["hash_ids"]} for turn in (1, 2))
    assert not one & other
    assert sum(line["input_length"] for line in trace_of(1)[:10]) > 2 * KV_TOKENS


def test_an_agent_goes_on_where_it_was_while_the_one_that_it_starts_begins_anew() -> None:
    first, second, other, third, fourth = agent_trace("a")["requests"]
    turns = [turn["hash_ids"] for turn in (first, second, third, fourth)]
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
        assert len(after) > len(before)
    begun, goes_on = (turn["hash_ids"] for turn in other["requests"])
    assert goes_on[: len(begun)] == begun
    assert not set(begun) & set(turns[-1])
    assert second["t"] < other["t"] < third["t"]


def test_ratios_are_of_runs_that_were_made_together() -> None:
    runs = {"one": {"with": [run(1.0, 8.0), run(3.0, 4.0)], "without": [run(4.0, 4.0)] * 2}}
    _, figures = summarised(runs)
    assert figures["one_ttft"] == 0.5
    assert figures["one_throughput"] == 1.5


def test_errors_and_counts_that_differ_are_figures() -> None:
    same = run(1.0, 1.0, 50, cached_tokens=150, cancelled=2)
    other = run(1.0, 1.0, 50, cached_tokens=120)
    runs = {"one": {"with": [same, other], "without": [run(1.0, 1.0, errors=3)] * 2}}
    _, figures = summarised(runs)
    assert (figures["errors"], figures["cancelled"], figures["cached_mismatch"]) == (6, 2, 30)
