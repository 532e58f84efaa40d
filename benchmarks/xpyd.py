"""`python -m benchmarks.xpyd --json`: the copies that a fleet holds, and the bytes it moves.

Sessions of `examples.disaggregated_prefill` are played through stock servers with separate prefill
and decode, each with its own SSD directory, twice: with one owner for every artifact, as usual; and
with servers that keep everything they read as their own, also on SSD (`copies_everywhere`). Bytes
are counted, not seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_process import CHECKPOINTS
from benchmarks.measure import is_default, machine_line, publish, table
from examples.disaggregated_prefill.fleet import Fleet, fleet_of, value
from examples.disaggregated_prefill.session import play, warm_up
from examples.serving import stop_servers_on_sigterm

MODES: dict[str, dict[str, Any]] = {
    "one owner": {},
    "a copy everywhere": {
        "kv_connector": "CopiesEverywhere",
        "kv_connector_module_path": "benchmarks.copies_everywhere",
    },
}
_WRITTEN_S = 3.0
"""Sealed artifacts are written within about two seconds, also if their claim was not answered."""
_MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the figures as a last line of JSON")
    parser.add_argument("--quick", action="store_true", help="a short session; writes no results")
    parser.add_argument("--model", default="gemma3")
    parser.add_argument("--prefillers", type=int, nargs="+", default=[1, 2], metavar="N")
    given = parser.parse_args()
    stop_servers_on_sigterm()
    turns = 2 if given.quick else 6
    figures = {
        f"{n}p1d": {mode: measure(given.model, n, mode, turns) for mode in MODES}
        for n in given.prefillers
    }
    text = f"{machine_line()}; {given.model}, one session of {turns} turns\n\n{report(figures)}"
    details, write = {"figures": figures}, is_default(parser, given, free=("json",))
    publish("xpyd", text, headline(figures), details, as_json=given.json, write=write)


def measure(model: str, prefillers: int, mode: str, turns: int) -> dict[str, float]:
    """Play a session; return the bytes that the fleet holds and has moved."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {"ssd_gib": 0.25, "checkpoints": "full"}  # independent of measured times
        fleet = fleet_of(
            model, CHECKPOINTS, Path(folder), prefillers, extra=extra, connector=MODES[mode]
        )
        with fleet as running:
            warm_up(running)
            time.sleep(_WRITTEN_S)
            before = written_bytes(running)
            outcome = play(running, turns=turns, alone=False)
            time.sleep(_WRITTEN_S)
            written = written_bytes(running) - before
    if problems := outcome.problems():
        raise RuntimeError("; ".join(problems))
    return {
        "distinct_bytes": outcome.distinct_bytes,
        "dram_bytes": outcome.stored_bytes,
        "ssd_bytes": written,
        "bytes_moved": outcome.moved_bytes,
        "duplicate_factor": outcome.duplicate_factor,
        "ssd_duplicate_factor": written / outcome.distinct_bytes,
    }


def written_bytes(fleet: Fleet) -> float:
    return sum(value(server, "ssd_written_bytes") for server in fleet.servers)


def headline(figures: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return the figures by fleet and mode; `duplicate_factor` is that of DRAM."""
    return {
        name: {
            fleet: {mode: round(row[name], 3) for mode, row in modes.items()}
            for fleet, modes in figures.items()
        }
        for name in ("duplicate_factor", "ssd_duplicate_factor", "bytes_moved", "ssd_bytes")
    }


def report(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        (
            f"{fleet}, {mode}",
            f"{row['distinct_bytes'] / _MB:.2f}",
            f"{row['dram_bytes'] / _MB:.2f}",
            f"{row['duplicate_factor']:.2f}",
            f"{row['ssd_bytes'] / _MB:.2f}",
            f"{row['ssd_duplicate_factor']:.2f}",
            f"{row['bytes_moved'] / _MB:.2f}",
        )
        for fleet, modes in figures.items()
        for mode, row in modes.items()
    ]
    header = ("", "distinct MB", "in DRAM", "factor", "written to SSD", "factor", "MB moved")
    return table(header, rows)


if __name__ == "__main__":
    main()
