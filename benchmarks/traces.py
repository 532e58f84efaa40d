"""`python -m benchmarks.traces [--trace FILE] [--json]`: the time per request to read a trace.

Medians of CPU seconds over rounds. `growth_ratio` compares a trace of ten times as many synthetic
sessions with one of `--sessions`: it is 1 if the time per request does not grow with the trace.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.synthetic_sessions import CODING_AGENT, synthetic
from hetero_connector.units import MIB
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace
from ownership.simulator.traces.statistics import TraceStatistics, measure

SESSIONS = 60
GROWTH = 10
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="also time reading and analysing this file")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    if args.trace is not None:
        seconds, found = _timed(open_trace(args.trace))
        figures |= {"file_s": seconds, "file_us_per_request": 1e6 * seconds / found.num_requests}
        figures |= {"file_requests": found.num_requests, "file_hit_rate": found.hit_rate}
    for growth in (1, GROWTH):
        seconds, found = _timed(_made(args.sessions * growth))
        figures[f"us_per_request_x{growth}"] = 1e6 * seconds / found.num_requests
        figures[f"requests_x{growth}"] = found.num_requests
    figures["growth_ratio"] = figures[f"us_per_request_x{GROWTH}"] / figures["us_per_request_x1"]
    figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    for name, value in figures.items():
        print(f"{name:24} {value:12.4g}")
    if args.json:
        print(json.dumps(figures))


def _made(num_sessions: int) -> Trace:
    """Make a synthetic trace, with its sessions drawn before the timing."""
    trace = synthetic(
        CODING_AGENT,
        sessions=num_sessions,
        rate=0.05,
        block_tokens=64,
        seed=0,
    )
    sessions = list(trace)
    return replace(trace, sessions=lambda: iter(sessions))


def _timed(trace: Trace) -> tuple[float, TraceStatistics]:
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        found = measure(trace)
        rounds.append(time.process_time() - started)
    return statistics.median(rounds), found


if __name__ == "__main__":
    main()
