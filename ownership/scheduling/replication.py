"""Read-only replicas of hot prefixes: the one case in which a second copy is wanted.

The owner stays the owner. A replica is transient (`Directory.replicate_readonly`), spreads the
reads of a prefix that many sessions share, and is let go when nobody uses it any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ownership.scheduling.fleet import FleetView
from ownership.scheduling.prefill_pricing import PrefillPricing
from ownership.scheduling.step import Step, WorkerPrefix
from ownership.scheduling.weights import PlacementWeights


class HotPrefix(NamedTuple):
    """A prefix that many requests share: a hot group's chain and who holds it."""

    name: str
    heat: float
    """Uses lately, as `sessions.HotGroup` counts them."""
    tokens: int
    prefixes: Mapping[str, WorkerPrefix]


class ReplicaOrder(NamedTuple):
    """A worker should read a prefix and keep it for a while."""

    prefix: str
    source: str
    target: str
    ttl_s: float


class ReplicaPolicy(Protocol):
    """Looks at hot prefixes now and then and orders replicas."""

    def orders(self, hot: Sequence[HotPrefix], fleet: FleetView) -> list[ReplicaOrder]:
        """Replicas to be made now."""
        ...


@dataclass(frozen=True)
class NoReplicas:
    """Never."""

    def orders(self, hot: Sequence[HotPrefix], fleet: FleetView) -> list[ReplicaOrder]:
        """None."""
        return []


@dataclass(frozen=True)
class HotSpotReplicas:
    """One copy for every `heat_per_copy` uses, where reading is faster than computing.

    Copies go to the workers with the shortest queues, from the holder with the least to send.
    """

    heat_per_copy: float = 32.0
    max_copies: int = 4
    """With the owner's; a directory lists a bounded number of replicas."""
    ttl_s: float = 600.0

    def __post_init__(self) -> None:
        if not (self.heat_per_copy > 0.0 and self.max_copies >= 1 and self.ttl_s > 0.0):
            raise ValueError(f"heat_per_copy, max_copies and ttl_s are above 0: {self}")

    def orders(self, hot: Sequence[HotPrefix], fleet: FleetView) -> list[ReplicaOrder]:
        """Replicas to be made now, the hottest prefix's first."""
        ranked = sorted(hot, key=lambda prefix: (-prefix.heat, prefix.name))
        return [order for prefix in ranked for order in self._orders(prefix, fleet)]

    def _orders(self, prefix: HotPrefix, fleet: FleetView) -> Iterator[ReplicaOrder]:
        table, index = fleet.table(), fleet.index
        held = {name: x for name, x in prefix.prefixes.items() if name in index}
        holders = sorted(name for name, x in held.items() if x.dram_tokens >= prefix.tokens)
        wanted = min(self.max_copies, math.ceil(prefix.heat / self.heat_per_copy))
        if not holders or wanted <= len(holders):
            return
        source = min(holders, key=lambda name: table.outgoing_bytes[index[name]])
        # One token more than the prefix: the last one of a prompt is always computed.
        step = Step(prefix.tokens + 1, prefixes={**held, source: WorkerPrefix(0, prefix.tokens)})
        pricing = PrefillPricing(
            step, fleet, table, PlacementWeights(0.0, 0.0, 0.0), [index[source]]
        )
        gain_s = pricing.saved_by_reading_s()
        order = np.argsort(table.queued_tokens, kind="stable").tolist()
        targets = [
            fleet.names[i]
            for i in order
            if gain_s[i] > 0.0 and table.accepting[i] and fleet.names[i] not in holders
        ]
        for target in targets[: wanted - len(holders)]:
            yield ReplicaOrder(prefix.name, source, target, self.ttl_s)
