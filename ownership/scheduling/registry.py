"""Policies by name, for a command line or a configuration file."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from ownership.scheduling.baselines import Colocated, PrefixAware, RoundRobinPd, StaticPd
from ownership.scheduling.conductor import Conductor
from ownership.scheduling.decision import PlacementAction
from ownership.scheduling.dynamo import Dynamo
from ownership.scheduling.dynamo_kv import DynamoKv
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.predicted_latency import PredictedLatency

POLICIES: Mapping[str, Callable[[random.Random], SchedulingPolicy]] = {
    "ownerserve": lambda rng: OwnerServe(),
    "colocated": lambda rng: Colocated(),
    "static_pd": lambda rng: StaticPd(),
    "round_robin_pd": lambda rng: RoundRobinPd(),
    "prefix_aware": lambda rng: PrefixAware(),
    "dynamo": lambda rng: Dynamo(rng),
    "dynamo_kv": lambda rng: DynamoKv(),
    "conductor": lambda rng: Conductor(),
    "predicted_latency": lambda rng: PredictedLatency(rng),
}
"""Each with its defaults. Policies that draw use the generator they are given."""

POOLED: Mapping[str, bool] = {
    "static_pd": True,
    "round_robin_pd": True,
    "conductor": True,
    "dynamo": False,
}
"""The policies that send prefills and decodes to pools by role; True: they need both."""

DEFAULT_POLICY = "ownerserve"


def scheduling_policy(name: str, rng: random.Random) -> SchedulingPolicy:
    """Return a new policy of that name. Raises ValueError with the known names."""
    if name not in POLICIES:
        raise ValueError(f"no scheduling policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](rng)


def without_remote_prefills(policy: SchedulingPolicy) -> SchedulingPolicy:
    """Return the policy for requests that cannot be handed off: `ownerserve` considers no remote
    prefills. What another policy prefills elsewhere is made whole by `decision.whole`."""
    if not isinstance(policy, OwnerServe):
        return policy
    moves = policy.moves - {PlacementAction.REMOTE_PREFILL}
    # Roles are for fleets that prefill and decode apart.
    return replace(policy, moves=moves, weights=replace(policy.weights, role=1.0))
