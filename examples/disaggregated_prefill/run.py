"""`python -m examples.disaggregated_prefill.run`: prefill and decode apart, on this machine.

For each model it starts an embedded Redis, stock servers that prefill, one that decodes, and
the proxy; plays a session through the proxy; and prints what the decoder restored from its
peers, what was moved, how often the fleet holds the same bytes, the times to first token, and
how far the answers are from those of a single server's own prefix hit. It ends with status 1 if
nothing was restored or an answer differs. No Docker, no root, no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.cpu_kernels import runnable
from examples.demo_report import print_table
from examples.disaggregated_prefill.fleet import fleet_of
from examples.disaggregated_prefill.session import Outcome, play
from examples.serving import stop_servers_on_sigterm

MODELS = ("dense", "gemma3", "deepseek_v4")
_MB = 1e6


def print_report(outcome: Outcome) -> None:
    """The session turn by turn, and what it left behind."""
    header = (
        "turn",
        "prompt tokens",
        "cached",
        "from its peer",
        "to prefillers",
        "MB moved",
        "TTFT",
        "one server",
        "own prefix hit",
        "max |delta logprob|",
    )
    rows = []
    for number, turn in enumerate(outcome.turns, 1):
        assert turn.hit is not None
        rows.append(
            (
                str(number),
                f"{len(turn.prompt):,}",
                f"{turn.reply.cached_tokens or 0:,}",
                f"{turn.from_peer:,}",
                f"{turn.prefillers_from_peers:,}",
                f"{turn.moved_bytes / _MB:.2f}",
                f"{turn.reply.ttft_s * 1e3:,.0f} ms",
                f"{turn.alone_ttft_s * 1e3:,.0f} ms",
                f"{turn.hit.ttft_s * 1e3:,.0f} ms",
                f"{turn.distance:.1e}",
            )
        )
    print(f"\n== {outcome.model} ==")
    print_table(header, rows)
    print(
        "cached: prompt tokens the decoder did not compute; of these from its peer: restored "
        "over NIXL in\nthis turn. to prefillers: tokens they restored from others. one server: "
        "its TTFT when it\nprefills and decodes itself.\n"
        f"all DRAM tiers: {outcome.held_bytes / _MB:.2f} MB, "
        f"{outcome.distinct_bytes / _MB:.2f} MB of it distinct, "
        f"duplicate factor {outcome.duplicate_factor:.2f}; "
        f"moved {outcome.moved_bytes / _MB:.2f} MB"
    )


def main() -> int:
    """Play and report."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.disaggregated_prefill.run", description=__doc__
    )
    parser.add_argument("models", nargs="*", default=MODELS, help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--prefillers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="checkpoints and logs")
    given = parser.parse_args()
    if given.prefillers < 1 or given.turns < 1:
        parser.error("--prefillers and --turns must be at least 1")
    stop_servers_on_sigterm()
    directory = given.dir.absolute()
    complaints = []
    for model in runnable(given.models):
        logs = directory / "disaggregated_prefill" / model
        print(f"{model}: starting {given.prefillers} + 1 servers, logs in {logs}", flush=True)
        with fleet_of(model, directory / "checkpoints", logs, given.prefillers) as fleet:
            outcome = play(fleet, turns=given.turns)
        print_report(outcome)
        complaints += outcome.complaints()
    for problem in complaints:
        print(f"FAILED  {problem}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
