"""`heterocache top`: running engines in a terminal, drawn again every second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hetero_connector.engine.scheduler.session_book import MIN_DIGEST
from hetero_connector.engine.startup.rendezvous import status_paths
from hetero_connector.tools.engines import RunningEngine, Status, ask_all
from hetero_connector.tools.status import broken_parts, make_console, pins_text, state_text
from hetero_connector.units import size_text

_SESSIONS = 8
_BAR = 20
_PATIENCE_S = 1.0
"""The others are drawn so much later while an engine does not answer."""


@dataclass(frozen=True)
class Look:
    """The answer of one engine at one moment."""

    title: str
    status: Status | None
    """None: it does not answer."""
    silent_since: float = 0.0
    """The Unix time, in seconds, since which it does not."""


class Watched:
    """The engines with one name, and those that may have it: they have not answered yet."""

    def __init__(
        self,
        name: str | None,
        running: Sequence[RunningEngine],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`running`: those that are known by now. `clock` returns the Unix time."""
        self._name = name
        self._titles = {x.socket: x.title for x in running}
        self._others: set[Path] = set()
        self._silent_since: dict[Path, float] = {}
        self._clock = clock

    def look(self) -> dict[Path, Look]:
        """Ask all at the same time, also new ones. Those whose socket is gone are left out."""
        # All names of an engine are in its `status` alone, which takes it longer.
        first = "live" if self._name is None else "status"
        known = self._titles.keys() | self._others
        new = [x for x in status_paths() if x not in known]
        questions = dict.fromkeys(self._titles, "live") | dict.fromkeys(new, first)
        answers = ask_all(questions, _PATIENCE_S)
        for path in new:
            if (status := answers.get(path)) is not None:
                self._add(path, status)
        return {x: self._looked(x, y) for x, y in answers.items() if x not in self._others}

    def _add(self, path: Path, status: Status) -> None:
        engine = RunningEngine(path, status)
        if "engine" in status and (self._name is None or engine.is_named(self._name)):
            self._titles[path] = engine.title
        else:
            self._others.add(path)

    def _looked(self, path: Path, status: Status | None) -> Look:
        title = self._titles.get(path, f"the engine at {path}")
        if status is not None:
            self._silent_since.pop(path, None)
            return Look(title, status)
        return Look(title, None, self._silent_since.setdefault(path, self._clock()))


def watch(
    name: str | None,
    running: Sequence[RunningEngine],
    interval_s: float,
    *,
    once: bool,
    console: Console | None = None,
) -> list[str]:
    """Draw the engines with this name until none is left; return the titles of the last ones.

    `running`: those that are known by now. `once`: draw them once, and return no titles.
    """
    console = console or make_console()
    watched = Watched(name, running)
    titles = [x.title for x in running]
    before, after = watched.look(), dict[Path, Look]()
    with Live(console=console, screen=console.is_terminal and not once, auto_refresh=False) as live:
        while not after or not once:
            time.sleep(interval_s)
            after = watched.look()
            if not after:
                return titles
            live.update(draw(before, after), refresh=True)
            before, titles = after, [x.title for x in after.values()]
    return []


def draw(before: Mapping[Path, Look], after: Mapping[Path, Look]) -> RenderableType:
    """Return the engines as they are `after`, with rates since `before`."""
    parts: list[RenderableType] = []
    for path, look in after.items():
        earlier = before.get(path, look).status
        if look.status is None:
            parts += _silent(look)
        else:
            parts += _engine(look.title, earlier or look.status, look.status)
    return Group(*parts)


def _silent(look: Look) -> list[RenderableType]:
    since = time.strftime("%H:%M:%S", time.localtime(look.silent_since))
    text = f"has not answered since {since}: it is busy, hangs or was stopped"
    return [_heading(look.title), Text(text, "red"), Text()]


def _heading(title: str) -> Text:
    return Text(title, "bold", no_wrap=True, overflow="ellipsis")


def _engine(title: str, before: Status, status: Status) -> list[RenderableType]:
    hours = (status["now"] - status["engine"]["started"]) / 3600
    color = "red" if broken_parts(status) else ""
    return [
        _heading(title),
        Text(f"up {hours:.1f} h, {state_text(status)}, {_loads(status)}", color),
        _tokens(before, status),
        _tiers(status),
        *([Text(pins_text(status["pins"]))] if status["pins"]["count"] else []),
        *_sessions(status.get("sessions", [])),  # a `status` has none
        Text(),
    ]


def _loads(status: Status) -> str:
    reading = {k: n for k, n in status["activity"]["reading_bytes"].items() if n}
    if not reading:
        return "no load waits"
    return "loads wait for " + ", ".join(f"{size_text(n)} from {k}" for k, n in reading.items())


def _tokens(before: Status, after: Status) -> Table:
    """Return tokens of prompts by source, in the last interval and since the start."""
    passed_s = after["now"] - before["now"]
    since = {k: n - before["tokens"].get(k, 0) for k, n in after["tokens"].items()}
    most = max(*since.values(), 1)
    table = Table("tokens from", "per second", "", "since the start", box=None, padding=(0, 2))
    for column in (1, 3):
        table.columns[column].justify = "right"
    for source, count in since.items():
        rate = count / passed_s if passed_s > 0 else 0.0
        bar = "█" * round(_BAR * max(0, count) / most)
        total = f"{after['tokens'][source]:,}"
        table.add_row(source.replace("_", " "), f"{rate:,.0f}", f"{bar:<{_BAR}}", total)
    return table


def _tiers(status: Status) -> Table:
    table = Table("tier", "stored", "capacity", "", "artifacts", box=None, padding=(0, 2))
    for tier in status["tiers"]:
        stored, capacity = sum(tier["bytes"].values()), tier["capacity_bytes"]
        share = min(1.0, stored / capacity) if capacity else 0.0
        bar = ("█" * round(_BAR * share)).ljust(_BAR, "░")
        counts = f"{sum(tier['artifacts'].values()):,}"
        table.add_row(tier["tier"], size_text(stored), size_text(capacity), bar, counts)
    return table


def _sessions(sessions: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    if not sessions:
        return []
    running = sum(x["is_running"] for x in sessions)
    title = Text(f"sessions: {running} running of the newest {len(sessions):,}")
    table = Table("session", "tokens", "turns", "in DRAM", "on SSD", "state", box=None)
    for x in sessions[:_SESSIONS]:
        chunks = x["chunks_by_tier"]
        table.add_row(
            _short(x["session"]),
            f"{x['tokens']:,}",
            f"{x['turns']:,}",
            *(f"{chunks.get(tier, 0):,}" for tier in ("dram", "ssd")),
            _state(x),
        )
    return [title, table]


def _short(name: str) -> str:
    """Return as much of a session's name as commands need."""
    return name if name.startswith("recognised-") else name[:MIN_DIGEST]


def _state(session: Mapping[str, Any]) -> str:
    pinned_s = session["pinned_for_s"]
    pinned = "" if pinned_s is None else f", pinned {max(0.0, pinned_s):,.0f} s"
    if session["is_running"]:
        return f"runs{pinned}"
    text = f"idle {session['idle_s']:,.0f} s{pinned}"
    if session["expected_in_s"]:
        first, last = (max(0.0, x) for x in session["expected_in_s"])
        text += f", back in {first:,.0f}-{last:,.0f} s"
    return text
