"""The simulated tables of small workloads, under every placement policy, are what they were.

`python -m tests.ownership.simulator.test_golden` writes `golden.json` anew, after a change that is
meant to change them. Counts are equal, seconds are equal to eight digits: a fit of the planner may
round its last ones in another way. The sessions are drawn from whole numbers only, so every machine
draws the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace, Trigger
from tests.ownership.simulator.small_fleets import DENSE, GIB, HYBRID, fleet, trace_of

GOLDEN = Path(__file__).parent / "golden.json"
ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
BLOCK = 256
ROOM = {
    DENSE: TierBytes(3 * GIB, GIB, 3 * GIB),
    HYBRID: TierBytes(GIB // 3, GIB // 10, GIB // 5),
}
"""Each tier has room for some of the prompts."""


def chat(number: int = 150) -> Trace:
    """Single requests; half of them begin with one of three common prompts."""
    rng = Random(1)
    sessions = []
    for index in range(number):
        own = (1_000 * (index + 10), rng.randint(1, 24))
        common = ((1_000 * rng.randint(0, 2), rng.randint(2, 8)),) if rng.randint(0, 1) else ()
        blocks = BlockRuns.of_runs((*common, own))
        tokens = BLOCK * blocks.num_blocks + rng.randint(0, BLOCK - 1)
        request = Request(0.0, tokens, rng.randint(1, 200), blocks)
        sessions.append(Session(str(index), (request,), start_s=index * 0.125))
    return trace_of(*sessions)


def agents(number: int = 16) -> Trace:
    """Sessions of several turns behind one preamble; some turns fork, most answer a tool."""
    rng = Random(2)
    sessions = [
        Session(str(index), tuple(turns(rng, 10_000 * (index + 1))), start_s=index * 1.0)
        for index in range(number)
    ]
    return trace_of(*sessions)


def turns(rng: Random, first_id: int) -> Iterator[Request]:
    """Each prompt begins with one before it and adds blocks of its own."""
    prompts: list[BlockRuns] = []
    for index in range(rng.randint(3, 9)):
        parent = None if not index else rng.choice((index - 1, index - 1, index - 1, 0))
        before = ((0, 6),) if parent is None else prompts[parent].runs
        blocks = BlockRuns.of_runs((*before, (first_id, rng.randint(1, 14))))
        first_id += 100
        prompts.append(blocks)
        yield Request(
            offset_s=float(index),
            input_tokens=BLOCK * blocks.num_blocks + rng.randint(0, BLOCK - 1),
            output_tokens=rng.randint(1, 120),
            blocks=blocks,
            parent=parent,
            think_s=None if parent is None else rng.randint(1, 24) / 4,
            trigger=Trigger.TOOL_RESULT if rng.randint(0, 2) else Trigger.USER,
        )


def results(workload: str, policy: str) -> dict[str, Any]:
    """Simulate one workload under one policy: every figure, and bytes by flow and state type."""
    if workload == "chat":
        trace, spec = chat(), fleet(3, DENSE, ROOM[DENSE], roles=ROLES)
    else:
        model = HYBRID if workload == "agents, hybrid" else DENSE
        trace, spec = agents(), fleet(3, model, ROOM[model], roles=ROLES)
    found = simulate(trace, spec, parse_policy(policy))
    return {**asdict(found.figures), **{f"{k} bytes": v for k, v in found.state_bytes.items()}}


WORKLOADS = ("chat", "agents, dense", "agents, hybrid")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_simulated_tables_are_what_they_were(workload: str, policy: str) -> None:
    golden = json.loads(GOLDEN.read_text())[workload][policy]
    found = results(workload, policy)
    assert found.keys() == golden.keys()
    for name, value in golden.items():
        assert found[name] == same_as(value), name


def same_as(value: Any) -> Any:
    """Return what equals a value of the table: itself, or seconds to eight digits."""
    return pytest.approx(value, rel=1e-8) if isinstance(value, float) else value


def main() -> None:
    """Write the tables; values that are the same stay as they are, digit by digit."""
    golden = json.loads(GOLDEN.read_text())
    tables = {w: {p: results(w, p) for p in sorted(POLICIES)} for w in WORKLOADS}
    for workload, policy in product(WORKLOADS, sorted(POLICIES)):
        table = tables[workload][policy]
        before = golden.get(workload, {}).get(policy, {})
        table |= {k: v for k, v in before.items() if k in table and table[k] == same_as(v)}
    GOLDEN.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
