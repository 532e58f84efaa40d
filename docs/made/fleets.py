"""Tables of the simulated fleets, from the report of the newest campaign."""

from __future__ import annotations

import re
from collections.abc import Mapping

from made import ROOT, table

_REPORTS = ROOT / "benchmarks" / "results"
_WAITING, _WITHIN = "task waiting over ownerserve", "within objectives over ownerserve"
_COLUMNS = {
    "task waiting": _WAITING,
    "TTFT": "TTFT over ownerserve",
    "within objectives": _WITHIN,
    "goodput, /s": "goodput, requests/s",
    "network, GiB": "network, GiB",
    "copies": "copies",
}
_POLICIES = (
    "ownerserve",
    "ownerserve+without=fullness",
    "ownerserve+copies=1+without=fullness",
    "dynamo+prefill_scale=16",
    "dynamo",
    "dynamo_kv",
    "predicted_latency",
    "prefix_aware",
    "colocated",
    "conductor",
    "static_pd",
    "round_robin_pd",
)
_RIVALS = _POLICIES[3:]
_AGENTS = "sharing 0.5, study agents"
_SETTINGS = {
    "agents, 4 workers, 0.05 sessions/s": f"rate 0.05, sessions 80, {_AGENTS}-rate, workers 4",
    "0.2": f"rate 0.2, sessions 80, {_AGENTS}-rate, workers 4",
    "0.8": f"rate 0.8, sessions 80, {_AGENTS}-rate, workers 4",
    "0.2, nothing shared": "rate 0.2, sessions 80, sharing 0, study agents-sharing, workers 4",
    "0.2, all preambles shared": (
        "rate 0.2, sessions 80, sharing 1, study agents-sharing, workers 4"
    ),
    "16 workers": f"rate 0.8, sessions 100, {_AGENTS}-workers, workers 16",
    "64 workers": f"rate 3.2, sessions 150, {_AGENTS}-workers, workers 64",
    "4 workers, Llama": f"rate 0.1, sessions 50, {_AGENTS}-dense, workers 4",
    "50 sessions a worker": (
        f"begin_s 900, end_s 2700, population 50, {_AGENTS}-population, workers 2"
    ),
    "100 sessions a worker": (
        f"begin_s 900, end_s 2700, population 100, {_AGENTS}-population, workers 2"
    ),
    "chat, 4 workers, 1.7 requests/s": "rate 1.7, sessions 2000, study mooncake-rate, workers 4",
    "3.3": "rate 3.3, sessions 2000, study mooncake-rate, workers 4",
    "4.2": "rate 4.2, sessions 2000, study mooncake-rate, workers 4",
    "16 workers, 13.3": "rate 13.28, sessions 2500, study mooncake-workers, workers 16",
    "64 workers, 53": "rate 53.12, sessions 3000, study mooncake-workers, workers 64",
    "the hour as recorded": "begin_s 300, sessions 12031, speed 1, study mooncake-hour, workers 4",
    "a quarter faster": "begin_s 300, sessions 12031, speed 1.25, study mooncake-hour, workers 4",
    "four times faster, 16 workers": (
        "begin_s 75, sessions 12031, speed 4, study mooncake-hour-workers, workers 16"
    ),
    "on DeepSeek-V4, 6 requests/s": "rate 6, sessions 2000, study mooncake-hybrid, workers 4",
}
_ONE_BY_ONE = {
    "chat-1.7": "chat, 4 workers, 1.7 requests/s",
    "chat-3.3": "3.3",
    "chat-4.2": "4.2",
    "chat-hour": "the hour as recorded",
    "agents-50": "50 sessions a worker",
    "agents-100": "100 sessions a worker",
}
"""The settings of which the page has all policies, by the name of the region."""
_TERMS = {
    "chat, 3.3/s": "rate 3.3, sessions 2000, study mooncake-terms, workers 4",
    "4.2/s": "rate 4.2, sessions 2000, study mooncake-terms, workers 4",
    "16 workers": "rate 13.28, sessions 2500, study mooncake-terms, workers 16",
    "agents": "rate 0.8, sessions 150, sharing 0.5, study agents-terms, workers 2",
    "agents, Llama": "rate 1, sessions 120, sharing 0.5, study agents-dense-terms, workers 4",
}
_CACHES = {
    "agents": "rate 0.05, sessions 40, sharing 0.5, study agents-cache, workers 1",
    "chat": "rate 0.7, sessions 1500, study mooncake-cache, workers 1",
}
_CACHE_COLUMNS = ("task waiting over the bound", "saved, M tokens", "refused")
_CAPACITY = {"DeepSeek-V4-Flash": "hybrid", "Llama-3.1-8B": "dense"}
_SHARES = {f"{share} %": f"sessions per GPU, {share} % within objectives" for share in (90, 99)}
_PERCENT_WITHIN = "within objectives, %"
_INTERVAL = re.compile(r" \[.*?\]")
_POOLS = re.compile(r"(\w+)\+prefillers=\d+")

Figures = Mapping[str, str]
"""A policy's cells, by the figure's title."""


def regions() -> dict[str, str]:
    """Return the tables of the page, by the name of their region."""
    path = max(_REPORTS.glob("simulated_fleets-????-??-??.md"))
    report = _Report(path.read_text())
    found = {region: _compact(report, _SETTINGS[name]) for region, name in _ONE_BY_ONE.items()}
    found["waiting"] = _across(report, _WAITING)
    found["objectives"] = _across(report, _WITHIN)
    found["terms"] = _terms(report)
    found["capacity"] = _capacity(report)
    found["caches"] = _caches(report)
    found["costs"] = report.lines("Ranking under other costs")
    found["eviction"] = report.lines("Eviction against Belady's MIN")
    told = f"All tables of {path.stem[-10:]} are in `benchmarks/results/{path.name}`."
    return found | {"report": told}


class _Report:
    """The sections of a report: a table for each setting, a column for each policy."""

    def __init__(self, text: str) -> None:
        parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
        self._sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    def lines(self, heading: str) -> str:
        """Return the table of a section as it is."""
        rows = [line for line in self._sections[heading].splitlines() if line.startswith("|")]
        return "\n".join(rows)

    def columns(self, setting: str) -> dict[str, dict[str, str]]:
        """Return the figures of each policy of a setting."""
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in self.lines(setting).splitlines()
        )
        found: dict[str, dict[str, str]] = {name: {} for name in head[1:]}
        for title, *cells in rows:
            for name, cell in zip(head[1:], cells, strict=True):
                found[name][title] = cell
        return found

    def policies(self, setting: str) -> dict[str, dict[str, str]]:
        """Return the same with one column for each policy that needs two pools.

        It is that of the number of prefill workers with the most requests within objectives.
        """
        best: dict[str, dict[str, str]] = {}
        for name, figures in self.columns(setting).items():
            pools = _POOLS.fullmatch(name)
            key = pools[1] if pools else name
            if key not in best or float(figures[_PERCENT_WITHIN]) > float(
                best[key][_PERCENT_WITHIN]
            ):
                best[key] = figures | {"policy": name}
        return best


def _compact(report: _Report, setting: str) -> str:
    """Return a row for each policy."""
    policies = report.policies(setting)
    rows = [["`ownerserve`", "1", "1", "1", *_plain(policies["ownerserve"])]]
    for name in _POLICIES[1:]:
        if name in policies:
            figures = policies[name]
            ratios = [figures[title] for title in list(_COLUMNS.values())[:3]]
            rows.append([f"`{figures['policy']}`", *ratios, *_plain(figures)])
    return table(["policy", *_COLUMNS], rows)


def _plain(figures: Figures) -> list[str]:
    """Return the cells that are no ratios; bytes without decimals."""
    goodput, network, copies = (figures[title] for title in list(_COLUMNS.values())[3:])
    return [goodput, f"{float(network.replace(',', '')):,.0f}", copies]


def _across(report: _Report, figure: str) -> str:
    """Return a row for each setting, with the ratio of each rival."""
    rows = []
    for name, setting in _SETTINGS.items():
        policies = report.policies(setting)
        cells = [policies[rival][figure] if rival in policies else "-" for rival in _RIVALS]
        rows.append([name, *(_INTERVAL.sub("", cell) for cell in cells)])
    return table(["", *(f"`{rival}`" for rival in _RIVALS)], rows)


def _terms(report: _Report) -> str:
    """Return a row for each part of `ownerserve`, with the waiting without it."""
    by_setting = {name: report.policies(setting) for name, setting in _TERMS.items()}
    names = [name for name in next(iter(by_setting.values())) if "+without=" in name]
    rows = [
        [f"`{name.partition('=')[2]}`", *(by_setting[x][name][_WAITING] for x in by_setting)]
        for name in names
    ]
    return table(["without", *by_setting], rows)


def _capacity(report: _Report) -> str:
    """Return a row for each way to keep state, with the sessions that a GPU serves."""
    sections = {
        model: report.columns(
            f"begin_s 900, end_s 1800, sharing 0.5, study agents-capacity-{name}, workers 2"
        )
        for model, name in _CAPACITY.items()
    }
    head = [f"{model}, {share}" for model in sections for share in _SHARES]
    names = next(iter(sections.values()))
    rows = [
        [f"`{name}`", *(sections[x][name][title] for x in sections for title in _SHARES.values())]
        for name in names
    ]
    return table(["", *head], rows)


def _caches(report: _Report) -> str:
    """Return a row for each way to use one worker's caches."""
    sections = {trace: report.columns(setting) for trace, setting in _CACHES.items()}
    rows = []
    for name in next(iter(sections.values())):
        if name != "oracle":
            cells = [
                sections[x][name].get(title, "0") for x in sections for title in _CACHE_COLUMNS
            ]
            rows.append([f"`{name.partition('+')[2] or 'defaults'}`", *cells])
    return table(["", *(f"{x}, {title}" for x in sections for title in _CACHE_COLUMNS)], rows)
