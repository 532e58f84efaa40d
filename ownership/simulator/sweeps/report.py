"""The report of a sweep: figures over seeds, as Markdown tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero_connector.units import GIB
from ownership.simulator.sweeps.running import Point

Setting = tuple[tuple[str, float], ...]
_STUDENT = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's distribution for 1 to 30 degrees of freedom."""


class Estimate(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval; 0 of one seed."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from at least one value."""
        freedom = len(values) - 1
        if not freedom:
            return cls(values[0], 0.0)
        student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
        half = student * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)


@dataclass(frozen=True)
class Row:
    """A policy in one setting, over all its seeds."""

    policy: str
    setting: Setting
    seeds: tuple[int, ...]
    figures: Mapping[str, Estimate]
    overhead_us: float | None
    """Measured median of a decision; None: not measured."""


def rows(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each policy and setting, in the order in which they come first."""
    grouped: dict[tuple[Setting, str], list[Mapping[str, Any]]] = {}
    for result in results:
        point = Point(**result["point"])
        grouped.setdefault((point.setting, point.policy), []).append(result)
    return [_row(policy, setting, found) for (setting, policy), found in grouped.items()]


def _row(policy: str, setting: Setting, found: Sequence[Mapping[str, Any]]) -> Row:
    figures = {
        name: Estimate.of([result["figures"][name] for result in found])
        for name in found[0]["figures"]
    }
    decisions = [r["overhead"]["decision_p50_us"] for r in found if "overhead" in r]
    overhead_us = statistics.fmean(decisions) if decisions else None
    return Row(policy, setting, tuple(r["point"]["seed"] for r in found), figures, overhead_us)


class Column(NamedTuple):
    """A figure of the table."""

    title: str
    figure: str
    scale: float = 1.0
    digits: int = 2


COLUMNS = (
    Column("TTFT p50, s", "ttft_p50_s", digits=3),
    Column("TTFT p95, s", "ttft_p95_s"),
    Column("task mean, s", "task_mean_s", digits=1),
    Column("task p95, s", "task_p95_s", digits=1),
    Column("task waiting, mean, s", "task_wait_mean_s", digits=1),
    Column("task waiting, p95, s", "task_wait_p95_s", digits=1),
    Column("step p95, s", "step_p95_s"),
    Column("step p99, s", "step_p99_s"),
    Column("slowdown of tasks, mean", "task_slowdown_mean"),
    Column("slowdown of tasks, p99", "task_slowdown_p99"),
    Column("token, mean, ms", "token_mean_s", 1e3, 1),
    Column("token, p99, ms", "token_p99_s", 1e3, 1),
    Column("within objectives, %", "attained_share", 100, 1),
    Column("goodput, requests/s", "goodput_per_s"),
    Column("unfairness by length", "length_unfairness"),
    Column("refused", "refused", digits=0),
    Column("HBM per session, GiB", "hbm_gib_per_session"),
    Column("live sessions, most", "most_live_sessions", digits=0),
    Column("saved, M tokens", "saved_tokens", 1e-6, 1),
    Column("duplicates", "duplicate_factor"),
    Column("network, GiB", "network_bytes", 1 / GIB, 1),
    Column("SSD read, GiB", "ssd_read_bytes", 1 / GIB, 1),
    Column("SSD written, GiB", "ssd_written_bytes", 1 / GIB, 1),
    Column("owner hits, %", "owner_hit_rate", 100, 1),
    Column("decodes late, %", "decode_late_share", 100, 1),
    Column("busy, %", "busy_share", 100, 1),
    Column("queue, ms", "queue_mean_s", 1e3, 1),
    Column("from peers, ms", "restore_network_mean_s", 1e3, 2),
    Column("from SSD, ms", "restore_ssd_mean_s", 1e3, 2),
    Column("to pages, ms", "restore_exposed_mean_s", 1e3, 2),
    Column("preempted", "preemptions", digits=0),
)
"""Means are over all requests, also those without a restore."""

_OVERHEAD = "decision, us (measured)"
_NONE = "-"


def as_markdown(rows: Sequence[Row], about: Sequence[str]) -> str:
    """Return headings, the caveats and a table for each setting."""
    lines = ["# Simulation", "", *(f"- {sentence}" for sentence in about), ""]
    for setting, cells in _tables(rows):
        lines += [f"## {setting}", ""]
        lines += [f"| {' | '.join(line)} |" for line in cells]
        lines.insert(len(lines) - len(cells) + 1, f"| --- |{' ---: |' * (len(cells[0]) - 1)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def about(results: Sequence[Mapping[str, Any]], command: str) -> list[str]:
    """Return sentences that say what the figures depend on."""
    first = results[0]
    seeds = sorted({result["point"]["seed"] for result in results})
    caveats = dict.fromkeys(c for result in results for c in result["caveats"])
    sentences = [
        f"Command: `{command}`. The same command gives the same figures; only `{_OVERHEAD}` is "
        "measured while simulating.",
        f"Model: {first['model']}. Inputs: {first['inputs']}. Seeds: {', '.join(map(str, seeds))}.",
    ]
    if len(seeds) > 1:
        sentences.append("± is half of the 95 % confidence interval over seeds (Student).")
    return [*sentences, *caveats]


def _tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a heading and a table for each setting: a row for a figure, a column for a policy."""
    settings = dict.fromkeys(row.setting for row in rows)
    for setting in settings:
        here = [row for row in rows if row.setting == setting]
        cells = [["figure", *(row.policy for row in here)]]
        for column in COLUMNS:
            found = [row.figures.get(column.figure) for row in here]
            cells.append([column.title, *(_cell(estimate, column) for estimate in found)])
        cells.append([_OVERHEAD, *(_measured(row.overhead_us) for row in here)])
        named = ", ".join(f"{name} {value:g}" for name, value in setting)
        yield named or "as recorded", cells


def _measured(overhead_us: float | None) -> str:
    return _NONE if overhead_us is None else f"{overhead_us:.0f}"


def _cell(estimate: Estimate | None, column: Column) -> str:
    if estimate is None:
        return _NONE
    text = f"{estimate.mean * column.scale:,.{column.digits}f}"
    if estimate.half:
        text += f" ± {estimate.half * column.scale:,.{column.digits}f}"
    return text
