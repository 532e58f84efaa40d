"""The report of many simulations: means over seeds, and paired ratios, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero_connector.units import GIB
from ownership.simulator.figures import Objectives
from ownership.simulator.pairing import MEANS, BlockSums, Ratio, paired_ratio

Setting = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """A policy in one setting, over all its seeds."""

    policy: str
    setting: Setting
    seeds: tuple[int, ...]
    figures: Mapping[str, float]
    """Means over seeds."""
    ratios: Mapping[str, Ratio | str]
    """Figures of `MEANS` over those of the setting's first policy, on the same sessions, each or
    the reason why there is none."""
    overhead_us: float | None
    """Measured median of a decision; None: not measured."""


def rows(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each policy and setting, in the order in which they come first."""
    settings: dict[Setting, dict[str, list[Mapping[str, Any]]]] = {}
    for result in results:
        policy = result["point"]["policy"]
        settings.setdefault(setting_of(result["point"]), {}).setdefault(policy, []).append(result)
    return [
        _row(policy, setting, found, next(iter(policies.values())))
        for setting, policies in settings.items()
        for policy, found in policies.items()
    ]


def setting_of(point: Mapping[str, Any]) -> Setting:
    """Return the given values of a point, without policy and seed."""
    return tuple(
        (name, value)
        for name, value in point.items()
        if name not in ("policy", "seed") and value is not None
    )


def _row(
    policy: str,
    setting: Setting,
    found: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
) -> Row:
    names = [name for name in found[0]["figures"] if all(name in x["figures"] for x in found)]
    figures = {name: statistics.fmean(x["figures"][name] for x in found) for name in names}
    decisions = [r["overhead"]["decision_p50_us"] for r in found if "overhead" in r]
    overhead_us = statistics.fmean(decisions) if decisions else None
    seeds = tuple(x["point"]["seed"] for x in found)
    return Row(policy, setting, seeds, figures, _ratios(found, reference), overhead_us)


def _ratios(
    found: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> dict[str, Ratio | str]:
    """Compare with the reference, unless it is the same or refused other numbers of requests.

    A prompt that fits no worker is refused under every policy. Empty if there are no sums.
    """
    served = [
        [(x["point"]["seed"], x["figures"].get("refused", 0.0)) for x in side]
        for side in (found, reference)
    ]
    has_blocks = all("blocks" in x for x in [*found, *reference])
    if found is reference or not has_blocks:
        return {}
    if served[0] != served[1]:
        return dict.fromkeys(MEANS, "refused others")
    ours, theirs = ([BlockSums(**x["blocks"]) for x in side] for side in (found, reference))
    return {name: paired_ratio(ours, theirs, name) for name in MEANS}


class Column(NamedTuple):
    """A figure of the table."""

    title: str
    figure: str
    scale: float = 1.0
    digits: int = 2


_OBJECTIVES = f"{Objectives().ttft_s:g} s and {1e3 * Objectives().token_s:g} ms"
COLUMNS = (
    Column("TTFT mean, s", "ttft_mean_s", digits=3),
    Column("TTFT p50, s", "ttft_p50_s", digits=3),
    Column("TTFT p95, s", "ttft_p95_s"),
    Column("TTFT p99, s", "ttft_p99_s"),
    Column("task mean, s", "task_mean_s", digits=1),
    Column("task p95, s", "task_p95_s", digits=1),
    Column("task waiting, mean, s", "task_wait_mean_s", digits=2),
    Column("task waiting over the bound", "task_wait_mean_s_over_oracle", digits=3),
    Column("task waiting, p95, s", "task_wait_p95_s", digits=1),
    Column("slowdown of tasks, mean", "task_slowdown_mean"),
    Column("slowdown of tasks, p99", "task_slowdown_p99"),
    Column("step p95, s", "step_p95_s"),
    Column("step p99, s", "step_p99_s"),
    Column("token, mean, ms", "token_mean_s", 1e3, 1),
    Column("token, p99, ms", "token_p99_s", 1e3, 1),
    Column(f"within {_OBJECTIVES}, %", "attained_share", 100, 1),
    Column(f"goodput: within {_OBJECTIVES}, requests/s", "goodput_per_s"),
    Column("unfairness by length", "length_unfairness"),
    Column("refused", "refused", digits=0),
    Column("HBM per session, GiB", "hbm_gib_per_session"),
    Column("live sessions, most", "most_live_sessions", digits=0),
    Column(f"sessions per GPU, 90 % within {_OBJECTIVES}", "sessions_per_gpu_90", digits=1),
    Column(f"sessions per GPU, 99 % within {_OBJECTIVES}", "sessions_per_gpu_99", digits=1),
    Column("saved, M tokens", "saved_tokens", 1e-6, 1),
    Column("network, GiB", "network_bytes", 1 / GIB, 1),
    Column("SSD written, GiB", "ssd_written_bytes", 1 / GIB, 1),
    Column("copies", "duplicate_factor"),
    Column("SSD read, GiB", "ssd_read_bytes", 1 / GIB, 1),
    Column("owner hits, %", "owner_hit_rate", 100, 1),
    Column("decodes late, %", "decode_late_share", 100, 1),
    Column("busy, %", "busy_share", 100, 1),
    Column("queue, ms", "queue_mean_s", 1e3, 1),
    Column("from peers, ms", "restore_network_mean_s", 1e3, 2),
    Column("from SSD, ms", "restore_ssd_mean_s", 1e3, 2),
    Column("to pages, ms", "restore_exposed_mean_s", 1e3, 2),
    Column("preempted", "preemptions", digits=0),
)
"""Means are over all requests, also those without a restore. What nothing has is left out."""

RATIOS = {
    "task_wait_s": "task waiting",
    "task_slowdown": "slowdown",
    "ttft_s": "TTFT",
    "attained": f"within {_OBJECTIVES}",
}
_OVERHEAD = "decision, us (measured)"
_NONE = "-"


def as_markdown(rows: Sequence[Row], about: Sequence[str], title: str = "Simulation") -> str:
    """Return headings, the caveats and a table for each setting."""
    lines = [f"# {title}", "", *(f"- {sentence}" for sentence in about), ""]
    for heading, cells in _tables(rows):
        lines += [f"## {heading}", "", *as_table(cells), ""]
    return "\n".join(lines).rstrip() + "\n"


def as_table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the first row is its heading."""
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return [lines[0], f"| --- |{' ---: |' * (len(cells[0]) - 1)}", *lines[1:]]


def about(results: Sequence[Mapping[str, Any]], command: str) -> list[str]:
    """Return sentences that say what the figures depend on."""
    models = ", ".join(dict.fromkeys(result["model"] for result in results))
    seeds = sorted({result["point"]["seed"] for result in results})
    caveats = dict.fromkeys(c for result in results for c in result["caveats"])
    return [
        f"Command: `{command}`. The same command gives the same figures; only `{_OVERHEAD}` is "
        "measured while simulating.",
        f"Model: {models}. Inputs: {results[0]['inputs']}. Seeds: {', '.join(map(str, seeds))}.",
        "Figures are means over seeds. Ratios are to the first policy on the same sessions, with "
        "95 % confidence intervals (bootstrap over blocks of sessions).",
        *caveats,
    ]


def _tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a heading and a table for each setting: a row for a figure, a column for a policy."""
    for setting in dict.fromkeys(row.setting for row in rows):
        here = [row for row in rows if row.setting == setting]
        cells = [["figure", *(row.policy for row in here)]]
        for name, title in RATIOS.items():
            ratios = [told_ratio(row.ratios.get(name, _NONE)) for row in here]
            cells.append([f"{title} over {here[0].policy}", *ratios])
        for column in COLUMNS:
            found = [row.figures.get(column.figure) for row in here]
            cells.append([column.title, *(_cell(value, column) for value in found)])
        decisions = [_NONE if x.overhead_us is None else f"{x.overhead_us:.0f}" for x in here]
        cells.append([_OVERHEAD, *decisions])
        some = [line for line in cells if any(cell != _NONE for cell in line[1:])]
        yield named(setting), some


def named(setting: Setting) -> str:
    """Return a setting as a heading."""
    told = (f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in setting)  # fmt: skip
    return ", ".join(told) or "as recorded"


def told_ratio(ratio: Ratio | str) -> str:
    """Return a ratio with its interval, bold if that is on one side of 1; or why there is none."""
    if isinstance(ratio, str):
        return ratio
    text = f"{ratio.value:.3f}"
    return f"{f'**{text}**' if ratio.is_sure else text} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _cell(value: float | None, column: Column) -> str:
    return _NONE if value is None else f"{value * column.scale:,.{column.digits}f}"
