"""`python -m benchmarks.faithful --json`: compare the simulator with a real engine.

Agent sessions (`SESSIONS`: closed loops with think times, forks and a shared preamble) are played
on the stock CPU engine with HeteroConnector, whose pages hold only a few prompts. Then the
simulator plays them with the same model, chunks, capacities and policies, and the costs that
`heterocache calibrate` measured just before. Tokens hit by tier and bytes moved by state type are
equal if the simulator is right; times are compared as simulated over real.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accounts import Account, account_of_simulation, compared
from benchmarks.engine_process import CHECKPOINTS, EngineProcess
from benchmarks.faithful_engine import EngineFacts, FaithfulEngine, policy_of
from benchmarks.measure import is_default, machine_line, publish, rounded, table
from benchmarks.synthetic_sessions import CODING_AGENT, Constant, Geometric, LogNormal, synthetic
from examples.checkpoints import write_checkpoint
from examples.serving import engine_arguments, engine_environment
from hetero_connector.planner.cost_model import CostModel, RequestOverhead
from hetero_connector.planner.profile import CostProfile
from ownership.simulator.traces.session import Trace

SESSIONS = replace(
    CODING_AGENT,
    num_preambles=2,
    preamble_tokens=Constant(300),
    first_tokens=LogNormal(1000, 1600),
    turns=Geometric(5),
    tool_tokens=LogNormal(250, 500),
    user_tokens=LogNormal(250, 500),
    output_tokens=LogNormal(30, 60),
    tool_latency_s=LogNormal(0.8, 2.0),
    think_s=LogNormal(1.5, 3.0),
    fork_fraction=0.1,
    fork_width=Constant(1),
    fork_turns=Constant(1),
    context_tokens=3900,
    summary_tokens=Constant(300),
)


class Setting(NamedTuple):
    """The settings of one model."""

    num_blocks: int
    """KV blocks, with room for a few prompts."""
    extra: Mapping[str, Any]
    """Configuration of HeteroConnector."""


SETTINGS = {
    "dense": Setting(160, {"chunk_tokens": 32}),
    "gemma3": Setting(1500, {"chunk_tokens": 32}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the figures as a last line of JSON")
    parser.add_argument("--quick", action="store_true", help="few sessions; writes no results")
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3, help="each with a calibration of its own")
    given = parser.parse_args()
    sessions, rounds = (3, 1) if given.quick else (8, given.rounds)
    found: dict[str, list[Pair]] = {model: [] for model in given.models}
    for _ in range(rounds):  # by turns, because a machine is busy for minutes
        for model, pairs in found.items():
            pairs.append(compare(model, sessions))
    figures = {model: headline(pairs) for model, pairs in found.items()}
    tables = [
        f"{model}, round {number}\n{report(*pair)}"
        for model, pairs in found.items()
        for number, pair in enumerate(pairs, 1)
    ]
    text = "\n\n".join([f"{machine_line()}; {sessions} sessions", *tables])
    details = {m: [list(map(plain, pair)) for pair in pairs] for m, pairs in found.items()}
    write = is_default(parser, given, free=("json",))
    publish("faithful", text, figures, details, as_json=given.json, write=write)


Pair = tuple[Account, Account]
"""The account of an engine, and of the simulator."""


def compare(model: str, sessions: int) -> Pair:
    """Play one model's sessions on an engine and in the simulator."""
    setting = SETTINGS[model]
    extra = {"dram_gib": 0.25, "checkpoints": "full", **setting.extra}
    arguments = engine_arguments(model) | {
        "max_model_len": 4096,
        "num_gpu_blocks_override": setting.num_blocks,
    }
    with tempfile.TemporaryDirectory() as folder:
        profile = calibrated(model, arguments, setting.extra, Path(folder))
        with EngineProcess(model, extra, FaithfulEngine, **arguments) as engine:
            facts: EngineFacts = engine.call("facts")
            trace = trace_of(facts.chunk_tokens, sessions)
            real: Account = engine.call("play", trace)
    costs = profile.cost_model(facts.model.state_types, step_tokens=facts.limits.step_tokens)
    return real, simulated(facts, costs, trace, extra["checkpoints"])


def trace_of(block_tokens: int, sessions: int, seed: int = 0) -> Trace:
    """Draw the sessions to play."""
    return synthetic(SESSIONS, sessions=sessions, rate=1.0, block_tokens=block_tokens, seed=seed)


def calibrated(
    model: str, arguments: Mapping[str, Any], connector: Mapping[str, Any], folder: Path
) -> CostProfile:
    """Return the profile that `heterocache calibrate` measures on this machine."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "hetero_connector.tools.cli", "calibrate"]
    command += [str(write_checkpoint(model, CHECKPOINTS)), "--out", str(path)]
    command += ["--dram-gib", "0.25", "--engine-args", json.dumps(dict(arguments))]
    command += ["--connector-args", json.dumps(dict(connector))]
    command += ["--ssd-dir", str(folder)]
    environment = engine_environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the calibration failed:\n{done.stderr[-4000:]}")
    return CostProfile.read(path)


def simulated(facts: EngineFacts, costs: CostModel, trace: Trace, checkpoints: str) -> Account:
    """Return the simulator's account."""
    # The engine core runs in the benchmark's own process, so the front end blocks it, too.
    frontend_s, frontend_token_s, scheduling_s, token_s = costs.overhead
    blocking = RequestOverhead(0.0, 0.0, frontend_s + scheduling_s, frontend_token_s + token_s)
    fleet = facts.fleet((facts.worker(replace(costs, overhead=blocking)),))
    return account_of_simulation(trace, fleet, policy_of(checkpoints), facts.chunk_tokens)


def headline(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return simulated over real: of each round, and the median."""
    by_round = {
        "ttft": [
            median(twin.ttft_s.values()) / median(real.ttft_s.values()) for real, twin in pairs
        ],
        "session": [median(twin.session_s) / median(real.session_s) for real, twin in pairs],
    }
    return {
        **rounded({name: median(ratios) for name, ratios in by_round.items()}),
        "rounds": {name: [round(x, 3) for x in ratios] for name, ratios in by_round.items()},
        "hit_tokens_equal": all(real.hit_tokens == twin.hit_tokens for real, twin in pairs),
        "state_bytes_equal": all(real.state_bytes == twin.state_bytes for real, twin in pairs),
    }


def plain(account: Account) -> dict[str, Any]:
    """Return an account as JSON values."""
    ttft_s = {f"{session}-{index}": s for (session, index), s in sorted(account.ttft_s.items())}
    return {**vars(account), "ttft_s": ttft_s}


def report(real: Account, twin: Account) -> str:
    rows: list[Sequence[str]] = []
    for name, one, other in (
        ("TTFT, median", real.ttft_s.values(), twin.ttft_s.values()),
        ("session, median", real.session_s, twin.session_s),
    ):
        a, b = median(one), median(other)
        rows.append((name, f"{a:.4g} s", f"{b:.4g} s", f"{b / a:.2f}"))
    rows += compared(real, twin)
    return table(("", "engine", "simulated", "ratio"), rows)


if __name__ == "__main__":
    main()
