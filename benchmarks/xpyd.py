"""How often a fleet holds the same bytes, and what it moves: one owner, or a copy everywhere.

    python -m benchmarks.xpyd --json

Sessions of `examples.disaggregated_prefill` through stock servers, prefill and decode apart, each
with an SSD directory of its own, twice: with one owner for every artifact, as it is; and with
servers that keep all they read as their own, on SSD too (`benchmarks.copies_everywhere`).
Bytes, not seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_process import CHECKPOINTS
from benchmarks.measure import machine_line, save, table
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
"""What is sealed is written within about two seconds, also where nobody has said whose it is."""
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
    print(text)
    if not given.quick:
        print(f"\nwritten: {save('xpyd', text, headline(figures), {'figures': figures})}")
    if given.json:
        print(json.dumps(headline(figures)))


def measure(model: str, prefillers: int, mode: str, turns: int) -> dict[str, float]:
    """What one fleet holds and has moved after a session."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {"ssd_gib": 0.25, "checkpoints": "full"}  # what is kept must not depend on time
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
    """By fleet and mode; `duplicate_factor` is of DRAM."""
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
