"""`python -m benchmarks.live_policies --json`: scheduling policies on real servers.

Three, then four stock CPU servers with HeteroConnector share a cache, each with a fixed part of the
machine's CPU time (`benchmarks.cpu_shares`, so run it as root). Clients play agent sessions
through `heterocache router`, the same sessions at the same times under each policy, by turns; all
stored state is forgotten in between. Policies with pools get 2P1D, then 2P2D. Ratios are those of
the mean task time over `ownerserve`'s, with 95 % intervals over sessions (`interval`). Sessions
start at such a rate (`sessions_per_s`) that the servers are busy for about three quarters of their
time on this machine; `--rate` gives another.

With `--rounds` every policy plays the first round, and those whose task time was at most `_CLOSE`
times `ownerserve`'s the further ones. Only a run with the default sessions, model, policies, setups
and parts of the cores, and with the losing case, writes results.

`live_over_best`: `ownerserve`'s task time over the best policy's, the worse of both setups.
`ownerserve` plays first and once more last. `last_over_first` is how far two runs of one policy are
apart; smaller differences between policies say nothing. No other figure but the twin's has that
last run.
`transfers_where_it_loses`: what `ownerserve` read from peers or prefilled elsewhere where computing
is cheaper, over a network of 100 Mbit/s (`benchmarks.slow_network`, root too). 0 is right;
`transfer_loses_by` is the time to first token of a policy that transfers there over `ownerserve`'s.
`decided_again`: share of `ownerserve`'s placements that come out again on the views of its log.
This and the next ones are of the setup in which they are farthest from 1.
`simulated_over_real_*`: the simulator plays the same sessions, with the costs that the servers
learned (`benchmarks.live_twin`). `placements_equal`: it follows the real placements, and its own
decisions are compared with them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.faithful import SESSIONS
from benchmarks.live_client import Played, play
from benchmarks.live_fleet import Gained, LiveFleet
from benchmarks.live_twin import Machine, compared, measured, placements
from benchmarks.measure import is_default, machine_line, options, publish, rounded, table
from benchmarks.scaled_sessions import scaled
from benchmarks.slow_network import SlowNetwork, slow_network
from benchmarks.synthetic_sessions import Geometric, LogNormal, SyntheticSpec, synthetic
from examples.serving import engine_arguments, stop_servers_on_sigterm
from ownership.scheduling.fleet import Role
from ownership.simulator.decisions.policies import OtherPolicies
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.traces.decision_file import DecisionFile
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
OWN = "ownerserve"
EVERYWHERE = (OWN, "dynamo", "prefix_aware", "dynamo_kv", "colocated", "predicted_latency")
POOLS = ("static_pd", "conductor")
CHUNK = 64
EXTRA = {"dram_gib": 0.5, "chunk_tokens": CHUNK}
AGENTS = replace(
    SESSIONS,
    turns=Geometric(5),
    output_tokens=LogNormal(20, 40),
    tool_latency_s=LogNormal(1.0, 2.5),
    think_s=LogNormal(2.0, 4.0),
)
_SLOW_MBIT = 100.0
"""The network where transfer loses: 12 MB/s, for state of 25 KB a token."""
_OTHER_SEED = 1
"""For the sessions that warm the servers up, from which the simulator gets its costs."""
_BUSY = 0.75
"""Share of the servers' CPU time that sessions are to take: queues form, and they end."""
_FIRST_RATE = 0.15
"""Sessions per second of the first trial. Even a slow machine does not fall behind."""
_CLOSE = 1.2
"""Ratio of task times. Two runs of one policy are less far apart."""
_DRAWS = 2_000
_TRANSFERS = ("artifact_fetch", "state_migration", "remote_prefill")
"""The actions that read state from another worker."""
_OTHERS_CORES = 0.5
"""For the router, the clients and Redis."""


class Setup(NamedTuple):
    """So many servers, and the roles of those of policies with pools."""

    name: str
    pools: tuple[Role, ...]

    def roles(self, policy: str) -> tuple[Role, ...]:
        return self.pools if policy in POOLS else (BOTH,) * len(self.pools)


SETUPS = {"three": Setup("three", (P, P, D)), "four": Setup("four", (P, P, D, D))}


@dataclass(frozen=True)
class Run:
    """One policy's run of the sessions."""

    played: Played
    gained: Gained
    actions: Counter[str]
    busy: float
    """Share of the servers' CPU time that they used."""
    machine: float
    """Share of the machine's cores that was busy."""
    own: float
    """The part of it that was busy for the fleet, the router and the clients."""
    decided_again: float
    """Share of the placements that the policy makes again, asked on the views of the log."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the figures as a last line of JSON")
    parser.add_argument("--quick", action="store_true", help="few sessions; writes no results")
    parser.add_argument("--model", default="dense-bench")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[*EVERYWHERE, *POOLS],
        metavar="POLICY",
        choices=EVERYWHERE + POOLS,
        help="next to ownerserve (default: all)",
    )
    parser.add_argument("--setups", nargs="+", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--sessions", type=Path, metavar="FILE", help="a recorded trace, scaled")
    parser.add_argument("--number", type=int, default=30, help="sessions of a run")
    parser.add_argument(
        "--rate", type=float, help="sessions started per second (default: as the machine is fast)"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--shared-cores",
        action="store_true",
        help="no part for each, which needs root",
    )
    parser.add_argument(
        "--no-losing-case", action="store_true", help="no slow network: it needs root"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for logs and decisions")
    given = parser.parse_args()
    stop_servers_on_sigterm()
    if given.quick:
        given.number, given.setups = 4, given.setups[:1]
    if not given.no_losing_case:
        with slow_network(_SLOW_MBIT):  # what is refused is told now, not after all other runs
            pass
    begin = machine_line()
    texts, figures, details = [], dict[str, Any](), dict[str, Any]()
    for setup in (SETUPS[name] for name in given.setups):
        found = compare(given.model, setup, given)
        texts.append(f"{setup.name} servers, {given.model}\n{found.text}")
        figures[setup.name], details[setup.name] = found.figures, found.details
    if not given.no_losing_case:
        losing = losing_case(given, min(x["sessions_per_s"] for x in figures.values()))
        texts.append(losing.text)
        figures |= losing.figures
        details["losing"] = losing.details
    best = [figures[name]["live_over_best"] for name in given.setups]
    twin = worst([figures[name]["twin"] for name in given.setups])
    figures = {"live_over_best": max(best), **figures, **twin}
    details["options"] = options(given)
    text = "\n\n".join([f"begin: {begin}\nend: {machine_line()}", *texts])
    write = is_default(parser, given, free=("json", "keep", "rate", "rounds"))
    publish("live_policies", text, figures, details, as_json=given.json, write=write)


def worst(twins: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure of the setup in which it is farthest from 1."""
    return {
        name: max((twin[name] for twin in twins), key=lambda x: abs(x - 1)) for name in twins[0]
    }


@contextmanager
def files(keep: Path | None, name: str) -> Iterator[Path]:
    """Yield a folder for logs and decisions; it is removed afterwards unless it is to be kept."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        (keep / name).mkdir(parents=True, exist_ok=True)
        yield keep / name


class Found(NamedTuple):
    """The outcome of one setup."""

    text: str
    figures: dict[str, Any]
    details: dict[str, Any]


def sessions_of(given: argparse.Namespace, rate: float, seed: int) -> Trace:
    """Return the sessions to play: recorded ones, or else synthetic ones."""
    if given.sessions is None:
        return drawn(AGENTS, given.number, rate, seed)
    return scaled(
        open_trace(given.sessions),
        sessions=given.number,
        rate=rate,
        block_tokens=CHUNK,
        factor=24.0,
        think_factor=10.0,
        longest_think_s=5.0,
        max_turns=8,
        context_tokens=3900,
        seed=seed,
    )


def drawn(spec: SyntheticSpec, sessions: int, rate: float, seed: int) -> Trace:
    return synthetic(spec, sessions=sessions, rate=rate, block_tokens=CHUNK, seed=seed)


def engine_args(model: str) -> dict[str, Any]:
    """Return limits by which pages hold a part of the sessions under way, and DRAM holds these."""
    return engine_arguments(model) | {"max_model_len": 4096, "num_gpu_blocks_override": 400}


def fleet_of(
    model: str,
    setup: Setup,
    folder: Path,
    given: argparse.Namespace,
    network: SlowNetwork | None = None,
) -> LiveFleet:
    """Return servers that each have an equal part of the machine, unless they are to share it."""
    count, cores = len(setup.pools), None
    if not given.shared_cores:
        cores = min(1.0, ((psutil.cpu_count() or 1) - _OTHERS_CORES) / count)
    return LiveFleet(model, count, folder, EXTRA, engine_args(model), cores, network)


def limits_of(model: str) -> EngineLimits:
    arguments = engine_args(model)
    return EngineLimits(
        arguments["max_num_batched_tokens"],
        arguments["max_num_seqs"],
        arguments.get("prefix_cache_retention_interval", 0),
    )


def fitting_rate(tried: Run, cores: float) -> float:
    """Return the sessions per second that take `_BUSY` of so many cores, as a trial tells."""
    session_s = tried.busy * cores * tried.played.span_s / len(tried.played.task_s)
    return round(_BUSY * cores / session_s, 3)


def tried_rate(fleet: LiveFleet, setup: Setup, folder: Path, given: argparse.Namespace) -> float:
    """Return the rate that a trial finds."""
    other = sessions_of(given, _FIRST_RATE, _OTHER_SEED)
    return fitting_rate(run(fleet, OWN, setup, other, folder, _OTHER_SEED), fleet.cores)


def compare(model: str, setup: Setup, given: argparse.Namespace) -> Found:
    """Play sessions under all policies, and in the simulator under `ownerserve`."""
    count = len(setup.pools)
    policies = (OWN, *(x for x in (*EVERYWHERE[1:], *POOLS) if x in given.policies))
    with (
        files(given.keep, setup.name) as folder,
        fleet_of(model, setup, folder, given) as fleet,
    ):
        machine = Machine.of(fleet.servers[0], limits_of(model))
        rate = given.rate or tried_rate(fleet, setup, folder, given)
        trace, other = (sessions_of(given, rate, seed) for seed in (0, _OTHER_SEED))
        warm = run(fleet, OWN, setup, other, folder, _OTHER_SEED)
        costs = fleet.costs(count)
        runs: dict[str, list[Run]] = {policy: [] for policy in policies}
        for number in range(given.rounds):
            turn = number * 3 % len(policies)
            for policy in policies[turn:] + policies[:turn]:
                if number == 0 or is_close(runs[policy][0], runs[OWN][0]):
                    runs[policy].append(run(fleet, policy, setup, trace, folder, 0))
        runs[OWN].append(run(fleet, OWN, setup, trace, folder, 0))
    profile = measured(costs, machine, other, warm.played, fleet.names)
    twin = machine.simulated(trace, OWN, fleet.names, setup.roles(OWN), profile)
    alike = [
        compared(
            own.played,
            twin,
            machine.simulated(
                trace, OWN, fleet.names, setup.roles(OWN), profile, placements(trace, own.played)
            ),
        )
        for own in runs[OWN]
    ]
    figures = {"sessions_per_s": rate, **headline(runs, given.rounds)}
    figures["twin"] = rounded({name: median(x[name] for x in alike) for name in alike[0]})
    figures["twin"]["decided_again"] = median(own.decided_again for own in runs[OWN])
    details: dict[str, Any] = {
        policy: [plain(one) for one in found] for policy, found in [*runs.items(), ("warm", [warm])]
    }
    details["twin"] = {
        "task_s": [round(x, 4) for x in twin.task_s],
        "profile": {**profile.as_json(), "model": model},
    }
    return Found(report(runs, figures), figures, details)


def is_close(first: Run, own: Run) -> bool:
    """True if, by its first run, a policy may still turn out to be the best."""
    return mean(first.played.task_s) <= _CLOSE * mean(own.played.task_s)


def run(fleet: LiveFleet, policy: str, setup: Setup, trace: Trace, folder: Path, seed: int) -> Run:
    """Play a trace on a fleet that has forgotten everything."""
    fleet.reset()
    decisions = folder / f"{policy}-{time.monotonic_ns()}.jsonl"
    count = len(setup.pools)
    with fleet.router(policy, setup.roles(policy), decisions) as (url, router):
        before = fleet.read(count)
        servers, others = fleet.processes(), [fleet.directory(), router, psutil.Process()]
        spent_s, others_s, machine = _cpu_s(servers), _cpu_s(others), psutil.cpu_times()
        played = asyncio.run(play(url, fleet.model, trace, seed))
        spent_s, others_s = _cpu_s(servers) - spent_s, _cpu_s(others) - others_s
        machine_busy = _busy_share(machine)
        gained = fleet.gained(before)
    actions, again = Counter[str](), OtherPolicies([policy])
    for decided in DecisionFile(decisions):
        if decided.record.session:
            actions[decided.record.action.value] += 1
            again.add(decided)
    busy = spent_s / (fleet.cores * played.span_s)
    own = (spent_s + others_s) / ((psutil.cpu_count() or 1) * played.span_s)
    print(f"{policy}: task {mean(played.task_s):.2f} s, busy {busy:.0%}", file=sys.stderr)
    return Run(played, gained, actions, busy, machine_busy, own, again.rows()[0].equal_share)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(x.user + x.system for x in times)


def _busy_share(before: Any) -> float:
    spent = np.subtract(psutil.cpu_times(), before)
    fields = before._fields
    idle = spent[fields.index("idle")] + spent[fields.index("iowait")]
    return float(1.0 - idle / spent[: fields.index("steal") + 1].sum())


def losing_case(given: argparse.Namespace, rate: float) -> Found:
    """Play the sessions on three servers with a network that is slower than computing."""
    setup = SETUPS["three"]
    trace, other = (sessions_of(given, rate, seed) for seed in (0, _OTHER_SEED))
    with (
        files(given.keep, "losing") as folder,
        slow_network(_SLOW_MBIT) as network,
        fleet_of(given.model, setup, folder, given, network) as fleet,
    ):
        run(fleet, "static_pd", setup, other, folder, _OTHER_SEED)
        own = run(fleet, OWN, setup, trace, folder, 0)
        there = run(fleet, "static_pd", setup, trace, folder, 0)
    runs = {OWN: [own], "static_pd": [there]}
    moves = sum(own.actions[action] for action in _TRANSFERS)
    figures = {
        "transfers_where_it_loses": moves,
        "peer_bytes_where_it_loses": own.gained.peer_bytes,
        "transfer_loses_by": round(_ttft(there) / _ttft(own), 3),
    }
    text = f"where transfer loses: three servers, {_SLOW_MBIT:.0f} Mbit/s\n{_table(runs)}"
    return Found(text, figures, {name: [plain(x) for x in found] for name, found in runs.items()})


def _ttft(run: Run) -> float:
    return mean(x.ttft_s for x in run.played.requests.values())


def headline(runs: Mapping[str, Sequence[Run]], rounds: int) -> dict[str, Any]:
    """Return ratios to `ownerserve`'s task time, and that over the best policy's.

    A policy is compared with `ownerserve` over the rounds that both played, because the machine's
    speed changes from one to the next. A run of `ownerserve` after the rounds only says how far two
    of its runs are apart.
    """
    first, last = runs[OWN][0], runs[OWN][-1]
    by_turns = {policy: found[:rounds] for policy, found in runs.items()}
    tasks = {
        policy: np.array([x.played.task_s for x in found]) for policy, found in by_turns.items()
    }
    own = {policy: tasks[OWN][: len(found)] for policy, found in by_turns.items()}
    own_ttft_s = [_ttft(one) for one in by_turns[OWN]]
    ratios = {policy: float(s.mean() / own[policy].mean()) for policy, s in tasks.items()}
    return {
        "live_over_best": round(1.0 / min(ratios.values()), 3),
        "task_over_ownerserve": {policy: round(ratio, 3) for policy, ratio in ratios.items()},
        "interval": {policy: interval(seconds, own[policy]) for policy, seconds in tasks.items()},
        "ttft_over_ownerserve": {
            policy: round(mean(map(_ttft, found)) / mean(own_ttft_s[: len(found)]), 3)
            for policy, found in by_turns.items()
        },
        "last_over_first": round(mean(last.played.task_s) / mean(first.played.task_s), 3),
        "busy": round(mean(x.busy for found in by_turns.values() for x in found), 3),
        "machine": round(mean(x.machine for found in by_turns.values() for x in found), 3),
        "own": round(mean(x.own for found in by_turns.values() for x in found), 3),
    }


def interval(seconds: np.ndarray, own: np.ndarray) -> list[float]:
    """Return the 95 % interval of the ratio of means; sessions are drawn with replacement."""
    rng = np.random.default_rng(0)
    drawn_ = rng.integers(0, own.shape[1], (_DRAWS, own.shape[1]))
    ratios = seconds.mean(axis=0)[drawn_].mean(axis=1) / own.mean(axis=0)[drawn_].mean(axis=1)
    return [round(float(x), 3) for x in np.percentile(ratios, (2.5, 97.5))]


_HEADER = (
    "policy",
    "task s",
    "TTFT mean",
    "p50",
    "p95",
    "token p99 ms",
    "peer MB",
    "copies",
    "hit hbm",
    "dram",
    "peer",
    "exact",
    "busy",
    "machine",
    "own",
    "actions",
)


def _table(runs: Mapping[str, Sequence[Run]]) -> str:
    return table(_HEADER, [_row(policy, one) for policy, found in runs.items() for one in found])


def _row(policy: str, one: Run) -> tuple[str, ...]:
    requests = list(one.played.requests.values())
    ttft_s = [x.ttft_s for x in requests]
    gaps_s = [gap for x in requests for gap in x.gaps_s]
    hits = one.gained.hit_tokens
    exact = mean(x.placement.startswith("exact") for x in requests)
    return (
        policy,
        f"{mean(one.played.task_s):.3f}",
        f"{mean(ttft_s):.3f}",
        *(f"{x:.3f}" for x in np.percentile(ttft_s, (50, 95))),
        f"{1e3 * float(np.percentile(gaps_s, 99)):.0f}",
        f"{one.gained.peer_bytes / 1e6:.1f}",
        f"{one.gained.copies:.2f}",
        *(f"{hits.get(tier, 0):,}" for tier in ("hbm", "dram", "peer")),
        f"{exact:.0%}",
        f"{one.busy:.0%}",
        f"{one.machine:.0%}",
        f"{one.own:.0%}",
        ", ".join(f"{name} {n}" for name, n in one.actions.most_common()),
    )


def report(runs: Mapping[str, Sequence[Run]], figures: Mapping[str, Any]) -> str:
    ratios = [
        (policy, f"{ratio:.3f}", "{:.3f} to {:.3f}".format(*figures["interval"][policy]))
        for policy, ratio in figures["task_over_ownerserve"].items()
    ]
    twin = [(name, f"{value:.3f}") for name, value in figures["twin"].items()]
    return "\n\n".join(
        [
            _table(runs),
            f"sessions started per second: {figures['sessions_per_s']:.3f}",
            table(("task time over ownerserve's", "", "95 %"), ratios),
            f"ownerserve's last run over its first: {figures['last_over_first']:.3f}",
            table(("the same sessions simulated", ""), twin),
        ]
    )


def plain(one: Run) -> dict[str, Any]:
    """Return a run as JSON values."""
    return {
        "task_s": [round(x, 4) for x in one.played.task_s],
        "span_s": round(one.played.span_s, 2),
        "gained": asdict(one.gained),
        "actions": dict(one.actions),
        "busy": round(one.busy, 3),
        "machine": round(one.machine, 3),
        "own": round(one.own, 3),
        "decided_again": one.decided_again,
    }


if __name__ == "__main__":
    main()
