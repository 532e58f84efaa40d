"""Simple policies that fleets run today, for comparison.

They price their choice, but do not choose by price.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import accepting_workers
from ownership.scheduling.step import Step, WorkerPrefix
from ownership.scheduling.step_pricing import Route, StepPricing

_NO_PREFIX = WorkerPrefix()


@dataclass(frozen=True)
class Colocated:
    """Prefill and decode at the session's worker, or at the least loaded one.

    The load is that of vLLM's data-parallel balancer: 4 x waiting + running requests
    (`vllm/v1/engine/core_client.py`, `DPLBAsyncMPClient`).
    """

    name: str = "colocated"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        found = accepting_workers(pricing, range(len(fleet)))
        owner = fleet.index.get(step.owner or "")
        if owner in found:
            at = owner
        else:
            load = 4.0 * pricing.table.waiting + pricing.table.running
            at = min(found, key=load.__getitem__)
        return PlacementDecision(step, Route(at, at), fleet.names, pricing)


@dataclass(frozen=True)
class StaticPd:
    """Compute every prompt in a prefill pool and decode it in a decode pool, by role.

    Takes the worker of each pool with the fewest queued tokens, or running decodes. A session stays
    with its decoder, which keeps its state, and computes prompts while no prefill worker accepts.
    """

    name: str = "static_pd"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        decoders = accepting_workers(pricing, fleet.decode_pool)
        decode = fleet.index.get(step.owner or "")
        if decode is None or decode not in decoders:
            decode = min(decoders, key=pricing.table.running.__getitem__)
        prefillers = [i for i in fleet.prefill_pool if pricing.table.accepting[i]] or [decode]
        prefill = min(prefillers, key=pricing.table.queued_tokens.__getitem__)
        return PlacementDecision(step, Route(decode, prefill), fleet.names, pricing)


@dataclass
class RoundRobinPd:
    """Use the workers of the two pools in turn, as vLLM's example proxies do.

    Where one worker is in both pools, another one of the prefill pool prefills for it. Without
    another that accepts, it computes the prompt itself.
    Source: `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` in vLLM.
    """

    name: str = "round_robin_pd"
    _turn: int = field(default=0, init=False)

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        decoders = accepting_workers(pricing, fleet.decode_pool)
        turn, self._turn = self._turn, self._turn + 1
        decode = decoders[turn % len(decoders)]
        accepting = pricing.table.accepting
        others = [i for i in fleet.prefill_pool if accepting[i] and i != decode] or [decode]
        route = Route(decode, others[turn % len(others)])
        return PlacementDecision(step, route, fleet.names, pricing)


@dataclass(frozen=True)
class PrefixAware:
    """Take the longest prefix while loads are balanced, else the least loaded worker.

    The rule and its defaults are those of SGLang's cache-aware router (`--cache-threshold`,
    `--balance-abs-threshold`, `--balance-rel-threshold`; SGLang Model Gateway's load balancing
    documentation). Loads are waiting and running requests. Nothing is moved: the chosen worker
    computes what it lacks, and so becomes another owner of the prefix.
    """

    cache_threshold: float = 0.3
    """Smallest share of the prompt that must match for the longest prefix to decide."""
    balance_abs: float = 64.0
    balance_rel: float = 1.5
    """Unbalanced: most - least > `balance_abs` and most > `balance_rel` x least."""
    name: str = "prefix_aware"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        found = accepting_workers(pricing, range(len(fleet)))
        table = pricing.table
        load = (table.waiting + table.running).tolist()
        matched = {i: step.prefixes.get(fleet.names[i], _NO_PREFIX).local_tokens for i in found}
        at = min(found, key=load.__getitem__)
        most, least = max(load[i] for i in found), load[at]
        unbalanced = most - least > self.balance_abs and most > self.balance_rel * least
        longest = max(matched.values())
        if not unbalanced and longest > self.cache_threshold * step.prompt_tokens:
            holders = [i for i in found if matched[i] == longest]
            at = min(holders, key=load.__getitem__)
        return PlacementDecision(step, Route(at, at), fleet.names, pricing)
