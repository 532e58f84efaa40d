"""`python -m examples.disaggregated_prefill.run`: separate prefill and decode on this machine.

For each model it starts an embedded Redis, stock servers that prefill, one that decodes, and the
proxy. It plays a session through the proxy and prints the tokens that the decoder restored from
its peers, the bytes moved, the copies per artifact, the times to the first token, and the largest
difference between the answers and those of a single server's own prefix hit. It ends with status 1
if no model could run, nothing was restored or an answer differs. It needs no Docker, no root and no
GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.checkpoints import add_models
from examples.cpu_kernels import runnable
from examples.disaggregated_prefill.fleet import fleet_of
from examples.disaggregated_prefill.session import Outcome, play
from examples.serving import stop_servers_on_sigterm
from examples.tables import table

MODELS = ("dense", "gemma3", "deepseek_v4")
_MB = 1e6


def print_report(outcome: Outcome) -> None:
    """Print the session turn by turn, and the fleet's bytes after it."""
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
    print(table(header, rows))
    print(
        "cached: prompt tokens that the decoder did not compute. from its peer: those that it "
        "restored over\nNIXL in this turn. to prefillers: tokens that prefillers restored from "
        "other servers. one server:\nTTFT of a server that prefills and decodes itself.\n"
        f"all DRAM tiers: {outcome.stored_bytes / _MB:.2f} MB, "
        f"{outcome.distinct_bytes / _MB:.2f} MB of it distinct, "
        f"duplicate factor {outcome.duplicate_factor:.2f}; "
        f"moved {outcome.moved_bytes / _MB:.2f} MB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.disaggregated_prefill.run", description=__doc__
    )
    add_models(parser, MODELS)
    parser.add_argument("--prefillers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="checkpoints and logs")
    given = parser.parse_args()
    if given.prefillers < 1 or given.turns < 1:
        parser.error("--prefillers and --turns must be at least 1")
    stop_servers_on_sigterm()
    directory = given.dir.absolute()
    problems = []
    models = runnable(given.models)
    for model in models:
        logs = directory / "disaggregated_prefill" / model
        print(f"{model}: starting {given.prefillers} + 1 servers, logs in {logs}", flush=True)
        with fleet_of(model, directory / "checkpoints", logs, given.prefillers) as fleet:
            outcome = play(fleet, turns=given.turns)
        print_report(outcome)
        problems += outcome.problems()
    for problem in problems:
        print(f"FAILED  {problem}")
    return 0 if models and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
