"""The goals of all benchmarks: the page of figures and the benchmarks' own tables show them."""

from __future__ import annotations

from collections.abc import Mapping

from examples.tables import table

GOALS: Mapping[str, Mapping[str, str]] = {
    "restore": {
        "dram_over_memcpy": "<= 1.15",
        "ssd_over_dd": ">= 0.9",
        "prefill_save_ratio": "<= 1.03",
        "decode_ratio": "<= 1.01",
    },
    "scheduler_hook": {"hook_ms_131k": "<= 1", "hash_ms_131k": "<= 10"},
    "planner": {
        "decision_us_131k": "<= 100",
        "decision_us_1m": "<= 1000",
        "cost_error_median": "<= 0.15",
        "cost_error_p95": "<= 0.4",
    },
    "planner_grid": {
        "worst_cell_over_best": "<= 1.05",
        "surely_over": "<= 0",
        "geomean_over_single": "<= 0.85",
        "regret_p95": "<= 0.1",
    },
    "peer": {"peer_over_memcpy": ">= 0.8"},
    "directory": {
        "lookup_ms_1m": "<= 2",
        "claims_per_s": ">= 20000",
        "redis_bytes_per_artifact": "<= 300",
    },
    "router": {
        "added_ms_p50": "<= 1",
        "added_ms_p99": "<= 5",
        "streams_per_s_core": ">= 500",
        "page_ratio": ">= 0.98",
        "memory_growth": "<= 1.05",
        "decision_us_64": "<= 200",
        "cores_at_100_rps_100k": "<= 4",
    },
    "router_overload": {"goodput_of_capacity": ">= 0.95", "silent": "<= 0", "hung": "<= 0"},
    "router_clients": {"errors": "<= 0", "uncounted": "<= 0", "cached_mismatch": "<= 0"},
    "faults": {"wrong_answers": "<= 0", "hangs": "<= 0", "engine_deaths": "<= 0", "stuck": "<= 0"},
    "scheduling": {"scheduling_decision_us_64": "<= 200", "ledger_us_64": "<= 20"},
    "live_policies": {
        "live_over_best": "<= 1.03",
        "transfers_where_it_loses": "<= 0",
        "decided_again": ">= 1",
    },
    "live_redrawn": {"redrawn_over_best": "<= 1.03"},
    "side_by_side": {"restore_fixed_ms": "<= 1.5"},
    "shared_prefixes": {"blocks_per_session": "<= 1.1"},
    "checkpoint_policies": {
        "over_hull_gemma-3-27b": "<= 1",
        "objective_gemma-3-27b": "<= 1",
        "over_hull_deepseek-v4-flash": "<= 1",
        "objective_deepseek-v4-flash": "<= 1",
    },
    "simulator": {
        "mooncake_requests_per_s": ">= 5000",
        "agent_file_s": "<= 60",
        "simulator_decision_us_64": "<= 200",
        "growth_ratio": "<= 1.1",
        "peak_gib": "<= 4",
    },
}
"""By benchmark and figure."""


def is_met(value: float, goal: str) -> bool:
    """Return whether the value meets a goal such as `<= 1.05`; True without one."""
    if not goal:
        return True
    sense, _, limit = goal.partition(" ")
    return value <= float(limit) if sense == "<=" else value >= float(limit)


def goal_table(benchmark: str, figures: Mapping[str, float]) -> str:
    """Return a table of figures, with the goals that they met or missed."""
    rows = []
    for name, value in figures.items():
        goal = GOALS[benchmark].get(name, "")
        met = ("met" if is_met(value, goal) else "missed") if goal else ""
        rows.append([name, f"{value:,.0f}" if value >= 1e4 else f"{value:,.4g}", goal, met])
    return table(["figure", "value", "goal", ""], rows)
