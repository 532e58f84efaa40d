"""The times, hits and bytes moved of a run of sessions, from an engine or the simulator."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from examples.serving import Server
from hetero_connector.timeline import Timeline
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.request import Hits, LiveRequest
from ownership.simulator.policies import PolicySpec
from ownership.simulator.recording import Recording
from ownership.simulator.simulate import state_bytes_of
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

Flows = Mapping[str, Mapping[str, int]]

_FLOWS = {
    "sealed": ("heterocache_saved_bytes", None),
    "written": ("heterocache_ssd_written_bytes", None),
    "staged": ("heterocache_read_bytes", "ssd"),
    "fetched": ("heterocache_read_bytes", "peer"),
    "loaded": ("heterocache_restored_bytes", None),
}
"""The connector's metric for each of the simulator's flows, and the tier to count."""

CACHED_TOKENS = "vllm:prompt_tokens_cached"
"""vLLM's counter of prompt tokens that were not computed."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TIERS = ("hbm", "dram", "ssd", "peer")

Counters = Mapping[tuple[str, str, str], float]
"""Values by (metric, tier, state type); "" for a label that the metric lacks."""


RequestName = tuple[int, int]
"""The number of the session, and of the request in it."""


@dataclass(frozen=True)
class Account:
    """The counts and times of one run."""

    hit_tokens: Mapping[str, int]
    """Tokens by tier; `hbm` is the engine's own prefix cache."""
    state_bytes: Flows
    """Bytes by flow, then by state type, without zeros."""
    ttft_s: Mapping[RequestName, float] = field(compare=False)
    session_s: Sequence[float] = field(compare=False)
    """Seconds of each session; the sum of its answers if its requests are sent one by one."""


def account_of_engine(
    counters: Counters,
    cached_tokens: int,
    ttft_s: Mapping[RequestName, float],
    session_s: Sequence[float],
) -> Account:
    """Make the account of an engine from its counters.

    `cached_tokens`: tokens of all prompts that were not computed, from any source.
    """
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
    """Replay the trace as recorded, and make the account."""
    run, answers = _simulated(trace, fleet, policy, chunk_tokens)
    hits = Hits(*run.tally.hits)
    flows = _by_flow(state_bytes_of(run.shape, run.totals()))
    return Account(_by_tier(hits), flows, answers.ttft_s, list(run.tally.task_s))


def accounts_apart(
    trace: Trace, fleet: FleetSpec, policy: PolicySpec, chunk_tokens: int
) -> tuple[Account, Account]:
    """Make the accounts of a fleet's prefill worker and of its decode worker.

    Times are in the second one, from the moment that requests were sent to the fleet.
    """
    run, answers = _simulated(trace, fleet, policy, chunk_tokens)
    hits_apart = Hits(*run.tally.hits), answers.decoder_hits
    parts = zip(run.totals(), hits_apart, strict=True)
    prefill, decode = (
        Account(_by_tier(hits), _by_flow(state_bytes_of(run.shape, [worker])), {}, ())
        for worker, hits in parts
    )
    session_s = by_session(answers.answer_s)
    return prefill, replace(decode, ttft_s=answers.ttft_s, session_s=session_s)


def by_session(answer_s: Mapping[RequestName, float]) -> list[float]:
    """Return the seconds of all requests of each session, in the order of sessions."""
    total_s: defaultdict[int, float] = defaultdict(float)
    for (session, _), seconds in answer_s.items():
        total_s[session] += seconds
    return [seconds for _, seconds in sorted(total_s.items())]


def _simulated(
    trace: Trace, fleet: FleetSpec, policy: PolicySpec, chunk_tokens: int
) -> tuple[FleetSimulation, Answers]:
    shape = StateShape.of(fleet.model, chunk_tokens)
    answers = Answers()
    run = FleetSimulation(
        fleet, policy, shape, iter(trace), trace.block_tokens, seed=0, recording=answers
    )
    run.run()
    return run, answers


class Answers(Recording):
    """Keeps where and when each request of a simulation was answered."""

    def __init__(self) -> None:
        super().__init__(Timeline())
        self.workers: dict[RequestName, str] = {}
        """The worker that decoded."""
        self.ttft_s: dict[RequestName, float] = {}
        self.answer_s: dict[RequestName, float] = {}
        self.decoder_hits = Hits()
        """The decoder's hits in all remote prefills."""

    def add_request(self, worker: str, request: LiveRequest, now_s: float) -> None:
        """Keep it; the decoder of a handoff comes last."""
        name = request.session, request.index
        self.workers[name] = worker
        self.ttft_s[name] = request.first_token_s - request.arrived_s
        self.answer_s[name] = now_s - request.arrived_s
        decoder = request.decoder_hits or Hits()
        for tier in _TIERS:
            tokens = getattr(self.decoder_hits, tier) + getattr(decoder, tier)
            setattr(self.decoder_hits, tier, tokens)


def registered() -> Counters:
    """Return this process's counters, as of the engine's last step."""
    from prometheus_client import REGISTRY

    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("heterocache_") and sample.name.endswith("_total"):
                name = sample.name.removesuffix("_total")
                labels: Mapping[str, Any] = sample.labels
                found[name, labels.get("tier", ""), labels.get("state_type", "")] += sample.value
    return found


def scraped(server: Server) -> Counters:
    """Return a server's counters, including vLLM's counter of cached prompt tokens."""
    server.complete([1, 2, 3], max_tokens=1)  # an engine publishes metrics with a step
    found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for key, value in server.metrics().items():
        name, _, labels = key.partition("{")
        label = dict(_LABEL.findall(labels))
        if name.endswith("_total") and name.startswith(("heterocache_", CACHED_TOKENS)):
            name = name.removesuffix("_total")
            found[name, label.get("tier", ""), label.get("state_type", "")] += value
    return found


def gained(after: Counters, before: Counters) -> Counters:
    """Return the increase of each counter between two readings."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def compared(real: Account, twin: Account) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name of each count, both values, and the ratio of the second to the first."""
    for tier in sorted({*real.hit_tokens, *twin.hit_tokens}):
        pair = (x.hit_tokens.get(tier, 0) for x in (real, twin))
        yield (f"hit tokens, {tier}", *_pair(*pair))
    for flow in sorted({*real.state_bytes, *twin.state_bytes}):
        one, other = (x.state_bytes.get(flow, {}) for x in (real, twin))
        for kind in sorted({*one, *other}):
            yield (f"bytes {flow}, {kind}", *_pair(one.get(kind, 0), other.get(kind, 0)))


def _pair(count: int, other: int) -> tuple[str, str, str]:
    ratio = "equal" if count == other else f"{other / count if count else 0:.3f}"
    return f"{count:,}", f"{other:,}", ratio


def _by_tier(hits: Hits) -> dict[str, int]:
    return _nonzero({tier: getattr(hits, tier) for tier in _TIERS})


def _by_flow(flows: Flows) -> Flows:
    return {flow: _nonzero(by_type) for flow, by_type in flows.items() if any(by_type.values())}


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
