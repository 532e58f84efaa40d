"""A sweep as a Markdown table and as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ownership.simulator.sweeps.pictures import Picture
from ownership.simulator.sweeps.summary import BOUNDED, Estimate, Row

_GIB = float(1 << 30)


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
    Column("of it waiting, mean, s", "task_wait_mean_s", digits=1),
    Column("of it waiting, p95, s", "task_wait_p95_s", digits=1),
    Column("step p95, s", "step_p95_s"),
    Column("step p99, s", "step_p99_s"),
    Column("token, ms", "token_mean_s", 1e3, 1),
    Column("refused", "refused", digits=0),
    Column("sent again", "resent", digits=0),
    Column("HBM per session, GiB", "hbm_gib_per_session"),
    Column("live sessions, most", "most_live_sessions", digits=0),
    Column("running, most", "most_running", digits=0),
    Column("saved, M tokens", "saved_tokens", 1e-6, 1),
    Column("duplicates", "duplicate_factor"),
    Column("moved, GiB", "moved_bytes", 1 / _GIB, 1),
    Column("moved x duplicates, GiB", "moved_bytes_times_copies", 1 / _GIB, 1),
    Column("network, GiB", "network_bytes", 1 / _GIB, 1),
    Column("SSD read, GiB", "ssd_read_bytes", 1 / _GIB, 1),
    Column("SSD written, GiB", "ssd_written_bytes", 1 / _GIB, 1),
    Column("write amplification", "write_amplification"),
    Column("owner hits, %", "owner_hit_rate", 100, 1),
    Column("decodes late, %", "decode_late_share", 100, 1),
    Column("busy, %", "busy_share", 100, 1),
    Column("busy while tools run, %", "tool_idle_busy_share", 100, 1),
    Column("queue, ms", "queue_mean_s", 1e3, 1),
    Column("from peers, ms", "restore_network_mean_s", 1e3, 2),
    Column("from SSD, ms", "restore_ssd_mean_s", 1e3, 2),
    Column("to pages, ms", "restore_exposed_mean_s", 1e3, 2),
    Column("preempted", "preemptions", digits=0),
)
"""Means are over all requests: what a restore from SSD took is divided by those without one."""

_OVERHEAD = "decision, us (measured)"
_ALONE = Column("of it waiting, mean, each alone, s", "task_wait_mean_alone_s", digits=1)
_NONE = "-"
_OVER_ORACLE = tuple(
    zip(
        ("TTFT mean", "TTFT p95", "step p95", "task mean", "task time waiting"),
        (f"{name}_over_oracle" for name in BOUNDED),
        strict=True,
    )
)


def as_markdown(rows: Sequence[Row], about: Sequence[str]) -> str:
    """Headings, the caveats and a table for each setting."""
    lines = ["# Simulation", "", *(f"- {sentence}" for sentence in about), ""]
    for setting, cells in _tables(rows):
        lines += [f"## {setting}", ""]
        lines += [f"| {' | '.join(line)} |" for line in cells]
        lines.insert(len(lines) - len(cells) + 1, f"| --- |{' ---: |' * (len(cells[0]) - 1)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_html(rows: Sequence[Row], about: Sequence[str], pictures: Iterable[Picture]) -> str:
    """The same with pictures, which are inside the file."""
    parts = ["<h1>Simulation</h1>", _list(about)]
    parts += [f"<h2>{html.escape(p.title)}</h2>\n{p.svg}" for p in pictures]
    for setting, cells in _tables(rows):
        parts.append(f"<h2>{html.escape(setting)}</h2>\n{_table(cells)}")
    body = "\n".join(parts)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>Simulation</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def about(results: Sequence[Mapping[str, Any]], command: str) -> list[str]:
    """What the numbers depend on, in sentences."""
    first = results[0]
    seeds = sorted({result["point"]["seed"] for result in results})
    caveats = dict.fromkeys(c for result in results for c in result["caveats"])
    told = [
        f"Command: `{command}`. The same command gives the same figures; only `{_OVERHEAD}` is "
        "measured while simulating.",
        f"Model: {first['model']}. Inputs: {first['inputs']}. Seeds: {', '.join(map(str, seeds))}.",
    ]
    if len(seeds) > 1:
        told.append("± is half of the 95 % confidence interval over seeds (Student).")
    return [*told, *caveats]


_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:110em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2em .5em;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def _tables(rows: Sequence[Row]) -> Iterable[tuple[str, list[list[str]]]]:
    """By setting: a heading, and a table whose rows are figures and whose columns policies."""
    settings = dict.fromkeys(row.setting for row in rows)
    for setting in settings:
        here = [row for row in rows if row.setting == setting]
        cells = [["figure", *(row.policy for row in here)]]
        for column in COLUMNS:
            found = [row.figures.get(column.figure) for row in here]
            cells.append([column.title, *(_cell(estimate, column) for estimate in found)])
        cells += _over_oracle(here)
        cells.append([_OVERHEAD, *(_measured(row.overhead_us) for row in here)])
        named = ", ".join(f"{name} {value:g}" for name, value in setting)
        yield named or "as recorded", cells


def _over_oracle(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The bound of each session alone, and figures over the bound's of the same seed; nothing
    without a bound."""
    alone = [row.figures.get(_ALONE.figure) for row in rows]
    if any(alone):
        yield [_ALONE.title, *(_cell(estimate, _ALONE) for estimate in alone)]
    for title, name in _OVER_ORACLE:
        found = [row.figures.get(name) for row in rows]
        if any(found):
            column = Column(f"{title} over oracle", name, digits=3)
            yield [column.title, *(_cell(estimate, column) for estimate in found)]


def _measured(overhead_us: float | None) -> str:
    return _NONE if overhead_us is None else f"{overhead_us:.0f}"


def _cell(estimate: Estimate | None, column: Column) -> str:
    if estimate is None:
        return _NONE
    text = f"{estimate.mean * column.scale:,.{column.digits}f}"
    if estimate.half:
        text += f" ± {estimate.half * column.scale:,.{column.digits}f}"
    return text


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>"


def _table(cells: Sequence[Sequence[str]]) -> str:
    def line(row: Sequence[str], mark: str) -> str:
        return "<tr>" + "".join(f"<{mark}>{html.escape(x)}</{mark}>" for x in row) + "</tr>"

    head, *rest = cells
    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rest)}</table>"
