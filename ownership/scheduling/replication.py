"""Read-only replicas of hot prefixes: the one case in which a second copy is wanted.

The owner stays the owner. A replica is transient (`Directory.replicate_readonly`): it spreads the
reads of a prefix that many sessions share, and is dropped when it is no longer used.
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
    """A prefix that many requests share: a hot group's chain, and how much of it workers have."""

    name: str
    heat: float
    """Recent uses, as `HotGroup` counts them."""
    tokens: int
    prefixes: Mapping[str, WorkerPrefix]


class ReplicaOrder(NamedTuple):
    """An order to a worker: read a prefix and keep it for `ttl_s` seconds."""

    prefix: str
    source: str
    target: str
    ttl_s: float


class ReplicaPolicy(Protocol):
    """Orders replicas of hot prefixes; called from time to time."""

    def orders(self, hot: Sequence[HotPrefix], fleet: FleetView) -> list[ReplicaOrder]:
        """Return the replicas to make now."""
        ...


@dataclass(frozen=True)
class NoReplicas:
    """Order no replicas."""

    def orders(self, hot: Sequence[HotPrefix], fleet: FleetView) -> list[ReplicaOrder]:
        return []


@dataclass(frozen=True)
class HotSpotReplicas:
    """Order one copy for every `heat_per_copy` uses if reading is faster than computing.

    Copies go to the workers with the shortest queues, from the holder with the least to send.
    """

    heat_per_copy: float = 32.0
    max_copies: int = 4
    """Including the owner's. A directory lists a bounded number of replicas."""
    ttl_s: float = 600.0

    def __post_init__(self) -> None:
        if not (self.heat_per_copy > 0.0 and self.max_copies >= 1 and self.ttl_s > 0.0):
            raise ValueError(f"heat_per_copy, max_copies and ttl_s are above 0: {self}")

    def orders(self, hot: Sequence[HotPrefix], fleet: FleetView) -> list[ReplicaOrder]:
        """Return the replicas to make now, the hottest prefix's first."""
        ranked = sorted(hot, key=lambda prefix: (-prefix.heat, prefix.name))
        return [order for prefix in ranked for order in self._orders(prefix, fleet)]

    def _orders(self, prefix: HotPrefix, fleet: FleetView) -> Iterator[ReplicaOrder]:
        table, index = fleet.table(), fleet.index
        prefixes = {name: x for name, x in prefix.prefixes.items() if name in index}
        holders = sorted(name for name, x in prefixes.items() if x.dram_tokens >= prefix.tokens)
        wanted = min(self.max_copies, math.ceil(prefix.heat / self.heat_per_copy))
        if not holders or wanted <= len(holders):
            return
        source = min(holders, key=lambda name: table.outgoing_bytes[index[name]])
        # One token more than the prefix, because the last token of a prompt is always computed.
        step = Step(
            prefix.tokens + 1, prefixes={**prefixes, source: WorkerPrefix(0, prefix.tokens)}
        )
        pricing = PrefillPricing(step, fleet, table, PlacementWeights(0.0, 0.0), [index[source]])
        gain_s = pricing.saved_by_reading_s()
        order = np.argsort(table.queued_tokens, kind="stable").tolist()
        targets = [
            fleet.names[i]
            for i in order
            if gain_s[i] > 0.0 and table.accepting[i] and fleet.names[i] not in holders
        ]
        for target in targets[: wanted - len(holders)]:
            yield ReplicaOrder(prefix.name, source, target, self.ttl_s)
