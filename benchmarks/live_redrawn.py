"""`python -m benchmarks.live_redrawn --json`: a comparison on real servers, on more sessions.

`benchmarks.live_policies` plays one draw of sessions on real servers, once or a few times: two runs
of one policy differ by as much as most policies do. The simulator plays many other draws in no
time. It takes the costs that those servers learned, from that benchmark's newest result that has
all setups (or from `--result`), and the model and the sizes from a server that is started and
asked. Only a run with the default draws and number of sessions writes results, as those of the
machine whose costs they have.

`redrawn_over_best`: `ownerserve`'s mean task time over the best policy's, the worse of all setups.
Ratios are to `ownerserve`'s task time, with 95 % intervals over draws. `real` is the ratio on the
real servers, and `simulated` that of the same sessions: how well the simulator ranks policies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.live_policies import (
    AGENTS,
    BOTH,
    EVERYWHERE,
    OWN,
    POOLS,
    SETUPS,
    Setup,
    drawn,
    fleet_of,
    interval,
    limits_of,
)
from benchmarks.live_twin import Machine
from benchmarks.measure import RESULTS, is_default, machine_line, options, publish, table
from examples.serving import stop_servers_on_sigterm
from hetero_connector.planner.profile import CostProfile

_PLAYED_SEED = 0
"""It draws the sessions that the real servers have served."""
_FIRST_SEED = 100


class Times(NamedTuple):
    """Means over the sessions of a draw, each `[draws]`."""

    task_s: np.ndarray
    ttft_s: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the figures as a last line of JSON")
    parser.add_argument("--quick", action="store_true", help="few draws; writes no results")
    parser.add_argument(
        "--result", type=Path, help="of live_policies (default: the newest with all setups)"
    )
    parser.add_argument("--number", type=int, default=30, help="sessions of a draw")
    parser.add_argument(
        "--rate", type=float, help="sessions started per second (default: the result's)"
    )
    parser.add_argument("--draws", type=int, default=40)
    given = parser.parse_args()
    stop_servers_on_sigterm()
    draws = 2 if given.quick else given.draws
    given.result = given.result or newest()
    result = json.loads(given.result.read_text())
    names = _setups_of(result)
    profiles = {name: profile_of(result["details"][name]["twin"]["profile"]) for name in names}
    machine = machine_of(profiles[names[0]].model)
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    texts = []
    for name in names:
        real = result["figures"][name]
        rate = given.rate or real.get("sessions_per_s")
        if rate is None:
            parser.error(f"{given.result} does not tell its rate: give it by --rate")
        seeds = [_PLAYED_SEED, *range(_FIRST_SEED, _FIRST_SEED + draws)]
        times = simulated(machine, SETUPS[name], profiles[name], given.number, rate, seeds)
        figures[name] = compared(times, real["task_over_ownerserve"])
        details[name] = {policy: x.task_s.round(4).tolist() for policy, x in times.items()}
        texts.append(f"{name} servers, {draws} draws\n{_table(figures[name])}")
    over_best = max(figures[name]["redrawn_over_best"] for name in names)
    figures = {"redrawn_over_best": over_best, "draws": draws, **figures}
    text = "\n\n".join(
        [f"{machine_line()}\ncosts: {given.result.name}, {result['machine']}", *texts]
    )
    details |= {"result": given.result.name, "options": options(given)}
    write = is_default(parser, given, free=("json", "rate", "result"))
    publish(
        "live_redrawn",
        text,
        figures,
        details,
        as_json=given.json,
        write=write,
        machine=result["machine"],
    )


def newest() -> Path:
    """Return the newest result of `live_policies` that has all setups."""
    results = RESULTS.glob("live_policies-*.json")
    return max(x for x in results if _setups_of(json.loads(x.read_text())) == list(SETUPS))


def _setups_of(result: Mapping[str, Any]) -> list[str]:
    return [name for name in SETUPS if name in result["figures"]]


def profile_of(told: Mapping[str, Any]) -> CostProfile:
    return CostProfile.from_json(json.dumps(told).encode())


def machine_of(model: str) -> Machine:
    """Start one server and ask it."""
    alone = argparse.Namespace(shared_cores=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        fleet_of(model, Setup("one", (BOTH,)), Path(folder), alone) as fleet,
    ):
        return Machine.of(fleet.servers[0], limits_of(model))


def simulated(
    machine: Machine,
    setup: Setup,
    profile: CostProfile,
    number: int,
    rate: float,
    seeds: Sequence[int],
) -> dict[str, Times]:
    """Play a draw of sessions for each seed, under every policy."""
    workers = [f"w{at}" for at in range(len(setup.pools))]
    found: dict[str, Times] = {}
    for policy in (*EVERYWHERE, *POOLS):
        runs = [
            machine.simulated(
                drawn(AGENTS, number, rate, seed), policy, workers, setup.roles(policy), profile
            )
            for seed in seeds
        ]
        found[policy] = Times(
            np.array([mean(run.task_s) for run in runs]),
            np.array([mean(run.ttft_s.values()) for run in runs]),
        )
        print(f"{setup.name}: {policy}", file=sys.stderr)
    return found


def compared(times: Mapping[str, Times], real: Mapping[str, float]) -> dict[str, Any]:
    """Return ratios to `ownerserve`'s times. The first of the draws is the one that was played."""
    own = times[OWN]
    ratios = {name: float(x.task_s[1:].sum() / own.task_s[1:].sum()) for name, x in times.items()}
    return {
        "redrawn_over_best": round(1.0 / min(ratios.values()), 3),
        "task_over_ownerserve": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "interval": {
            name: interval(x.task_s[None, 1:], own.task_s[None, 1:]) for name, x in times.items()
        },
        "ttft_over_ownerserve": {
            name: round(float(x.ttft_s[1:].sum() / own.ttft_s[1:].sum()), 3)
            for name, x in times.items()
        },
        "simulated": {
            name: round(float(x.task_s[0] / own.task_s[0]), 3) for name, x in times.items()
        },
        "real": dict(real),
    }


def _table(figures: Mapping[str, Any]) -> str:
    header = ("policy", "task time", "95 %", "TTFT", "played: simulated", "real")
    rows = [
        (
            policy,
            f"{ratio:.3f}",
            "{:.3f} to {:.3f}".format(*figures["interval"][policy]),
            f"{figures['ttft_over_ownerserve'][policy]:.3f}",
            f"{figures['simulated'][policy]:.3f}",
            f"{figures['real'][policy]:.3f}",
        )
        for policy, ratio in figures["task_over_ownerserve"].items()
    ]
    return table(header, rows)


if __name__ == "__main__":
    main()
