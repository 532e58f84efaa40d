"""`heterocache status`: prints what running engines say of themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hetero_connector.tools.engines import Status
from hetero_connector.units import size_text

_WIDTH = 1_000
"""Columns where no terminal bounds them."""


def make_console() -> Console:
    """Return a console for stdout. Where that is no terminal, nothing is cut at 80 columns."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def show(engines: Sequence[Status], max_decisions: int, console: Console | None = None) -> None:
    """Print each engine's tiers, health and newest decisions for a terminal."""
    console = console or make_console()
    for status in engines:
        engine = status["engine"]
        hours = (status["now"] - engine["started"]) / 3600
        console.print(
            f"[bold]{escape(engine['model'])}[/bold]  pid {engine['pid']}, up {hours:.1f} h, "
            f"heterocache {engine['heterocache']}, vLLM {engine['vllm']}"
        )
        console.print(Text(state_text(status), "red" if broken_parts(status) else ""))
        console.print(_tiers(status["tiers"]))
        if status["pins"]["count"]:
            console.print(pins_text(status["pins"]))
        decisions = status["decisions"][-max_decisions:] if max_decisions else []
        if decisions:
            console.print(_decisions(decisions))


def broken_parts(status: Status) -> list[str]:
    """Return the parts of the engine's health that do not work."""
    return [name for name in _WORKING if status["health"].get(name) is False]


_WORKING = ("cache_alive", "io_alive", "ssd_writable", "ssd_readable", "directory_joined")
"""Parts of the health that are false if they do not work. None: this engine has no such part."""


def state_text(status: Status) -> str:
    """Return whether all parts work, whether the fleet shares, and what commands have begun."""
    broken = broken_parts(status)
    state = f"not working: {', '.join(broken)}" if broken else "healthy"
    if status["health"].get("shared") is False:
        state += ", shares nothing until the fleet is reset"
    if status["activity"]["draining"]:
        state += ", draining"
    scrub = status["activity"]["scrub"]
    if scrub is not None and scrub["state"] == "running":
        state += f", scrubbing: {progress_text(scrub)}"
    return state


def pins_text(pins: Mapping[str, Any]) -> str:
    """Return how much pins keep, of what they may keep."""
    count, share = pins["count"], pins["bytes"] / pins["max_bytes"]
    kept, most = size_text(pins["bytes"]), size_text(pins["max_bytes"])
    return f"{count:,} {'pin' if count == 1 else 'pins'}: {kept} of at most {most} ({share:.0%})"


def progress_text(progress: Mapping[str, Any]) -> str:
    """Return how far a scrub is."""
    checked, skipped, chunks = (progress[x] for x in ("chunks_checked", "chunks_skipped", "chunks"))
    share = checked / (chunks - skipped) if chunks > skipped else 1.0
    text = f"{share:.0%} of {chunks - skipped:,} chunks checked, {progress['damaged']:,} damaged"
    if skipped:
        text += f", {skipped:,} more without a checksum or gone"
    return f"{text}; {progress['reason']}" if progress["reason"] else text


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("tier", "state", "artifacts", "stored", "capacity", box=None)
    for tier in tiers:
        for kind, artifacts in tier["artifacts"].items():
            stored, capacity = tier["bytes"][kind], tier["capacity_bytes"]
            table.add_row(
                tier["tier"], kind, f"{artifacts:,}", size_text(stored), size_text(capacity)
            )
    return table


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("time", "request", "tokens", "stored", "restored", "from", "choice")
    table = Table(*columns, "predicted", "observed", "computing", box=None)
    for x in decisions:
        restored = x["boundary"] - x["local_tokens"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(x["time"])),
            Text(x["request_id"].encode("unicode_escape").decode()),  # a client chose it
            f"{x['prompt_tokens']:,}",
            f"{x['stored_tokens']:,}",
            f"{restored:,}" + (f" - {x['replayed_tokens']:,}" if x["replayed_tokens"] else ""),
            "+".join(x["restored_tokens"]) or "-",
            x["choice"] + (f": {x['reason'].replace('_', ' ')}" if x["reason"] else ""),
            *(_milliseconds(x[name]) for name in ("predicted_s", "observed_s", "computing_s")),
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"
