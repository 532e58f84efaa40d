"""`heterocache top`: running engines in a terminal, drawn again every second."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hetero_connector.engine.scheduler.session_book import MIN_DIGEST
from hetero_connector.engine.scheduler.status_socket import ask
from hetero_connector.tools.engines import Status, find
from hetero_connector.tools.status import broken_parts, make_console, pins_text, state_text
from hetero_connector.units import size_text

_SESSIONS = 8
_BAR = 20


@dataclass(frozen=True)
class Look:
    """The answer of one engine at one moment."""

    title: str
    status: Status


def watch(
    name: str | None, interval_s: float, *, once: bool, console: Console | None = None
) -> None:
    """Draw the engines with this name until none is left, or `once`."""
    console = console or make_console()
    before, after = _look(name), dict[Path, Look]()
    with Live(console=console, screen=console.is_terminal and not once, auto_refresh=False) as live:
        while not after or not once:
            time.sleep(interval_s)
            after = _look(name)
            if not after:
                break
            live.update(draw(before, after), refresh=True)
            before = after


def draw(before: Mapping[Path, Look], after: Mapping[Path, Look]) -> RenderableType:
    """Return the engines as they are `after`, with rates since `before`."""
    parts: list[RenderableType] = []
    for path, look in after.items():
        parts += _engine(before.get(path, look), look)
    return Group(*parts)


def _look(name: str | None) -> dict[Path, Look]:
    found = {}
    for engine in find(name):
        try:
            found[engine.socket] = Look(engine.title, ask(engine.socket, {"get": "live"}))
        except (OSError, ValueError):
            continue  # it has ended meanwhile
    return found


def _engine(before: Look, after: Look) -> list[RenderableType]:
    status = after.status
    hours = (status["now"] - status["engine"]["started"]) / 3600
    color = "red" if broken_parts(status) else ""
    heading = Text(after.title, "bold", no_wrap=True, overflow="ellipsis")
    return [
        heading,
        Text(f"up {hours:.1f} h, {state_text(status)}, {_loads(status)}", color),
        _tokens(before.status, status),
        _tiers(status),
        *([Text(pins_text(status["pins"]))] if status["pins"]["count"] else []),
        *_sessions(status["sessions"]),
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
