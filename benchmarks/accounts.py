"""What a run of sessions cost and moved, told alike by an engine and by the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.measuring import figures_of, state_bytes_of
from ownership.simulator.policies import PolicySpec
from ownership.simulator.results import Tally
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

Flows = Mapping[str, Mapping[str, int]]

_FLOWS = {
    "sealed": ("heterocache_saved_bytes", None),
    "written": ("heterocache_spilled_bytes", None),
    "staged": ("heterocache_read_bytes", "ssd"),
    "fetched": ("heterocache_read_bytes", "peer"),
    "loaded": ("heterocache_restored_bytes", None),
}
"""The simulator's flows as the connector counts them: a metric, and a tier of it."""

Counters = Mapping[tuple[str, str, str], float]
"""By metric, tier and state type; "" without such a label."""


RequestName = tuple[int, int]
"""Its session's number, and its own in the session."""


@dataclass(frozen=True)
class Account:
    """Of one run."""

    hit_tokens: Mapping[str, int]
    """By tier; `hbm` is the engine's own prefix cache."""
    state_bytes: Flows
    """By flow, then by state type; what is 0 is left out."""
    ttft_s: Mapping[RequestName, float] = field(compare=False)
    session_s: Sequence[float] = field(compare=False)


def account_of_engine(
    counters: Counters,
    cached_tokens: int,
    ttft_s: Mapping[RequestName, float],
    session_s: Sequence[float],
) -> Account:
    """`cached_tokens`: of all prompts, what was not computed, wherever it came from."""
    hits = {
        tier: int(value)
        for (name, tier, _), value in counters.items()
        if name == "heterocache_hit_tokens"
    }
    hits["hbm"] = cached_tokens - sum(hits.values())
    flows: dict[str, dict[str, int]] = {}
    for flow, (metric, wanted) in _FLOWS.items():
        by_type: defaultdict[str, int] = defaultdict(int)
        for (name, tier, state_type), value in counters.items():
            if name == metric and wanted in (None, tier):
                by_type[state_type] += int(value)
        flows[flow] = by_type
    return Account(_nonzero(hits), _by_flow(flows), ttft_s, session_s)


def account_of_simulation(
    trace: Trace, fleet: FleetSpec, policy: PolicySpec, chunk_tokens: int
) -> Account:
    """Replays the trace as it is recorded."""
    shape = StateShape.of(fleet.model, chunk_tokens)
    run = FleetSimulation(fleet, policy, shape, iter(trace), trace.block_tokens, seed=0)
    run.tally = tally = _NamedTally()
    run.run()
    figures = figures_of(run)
    hits = {tier: getattr(figures, f"{tier}_hit_tokens") for tier in ("hbm", "dram", "ssd", "peer")}
    return Account(_nonzero(hits), _by_flow(state_bytes_of(run)), tally.by_name, list(tally.task_s))


@dataclass
class _NamedTally(Tally):
    """Knows whose each time is."""

    by_name: dict[RequestName, float] = field(default_factory=dict)

    def served(self, request: LiveRequest, now_s: float) -> None:
        super().served(request, now_s)
        self.by_name[request.session, request.index] = request.first_token_s - request.arrived_s


def registered() -> Counters:
    """This process's counters, as of the engine's last step."""
    from prometheus_client import REGISTRY

    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("heterocache_") and sample.name.endswith("_total"):
                name = sample.name.removesuffix("_total")
                labels: Mapping[str, Any] = sample.labels
                found[name, labels.get("tier", ""), labels.get("state_type", "")] += sample.value
    return found


def gained(after: Counters, before: Counters) -> Counters:
    """What was counted between two readings."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def _by_flow(flows: Flows) -> Flows:
    return {flow: _nonzero(by_type) for flow, by_type in flows.items() if any(by_type.values())}


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
