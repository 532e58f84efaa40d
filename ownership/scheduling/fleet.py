"""The fleet as a scheduler sees it: a table of plain figures, one column of workers each.

Whoever runs a policy fills it: a router from what its workers report, a simulator from its own
state. Workers are kept in the order of their names, so that no answer depends on the order in
which they were told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostModel
from ownership.scheduling.footprint import StateFootprint

Floats = NDArray[np.float64]

_ONE_STEP = 2.0**53
"""Tokens a step computes where no limit is told."""


class Role(StrEnum):
    """What policies with fixed roles send a worker. Any stock server can do either."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerLoad(NamedTuple):
    """What a worker is busy with at this moment."""

    queued_tokens: int = 0
    """Prompt tokens scheduled or waiting, not yet computed."""
    waiting_requests: int = 0
    running_requests: int = 0
    """As vLLM counts them: those whose prompt is being computed decode next, beside the rest."""
    context_tokens: int = 0
    """Their tokens, summed: what they attend to."""
    hbm_used_bytes: int = 0
    """KV pages of running requests on one rank; cached pages that may be evicted do not count."""
    residence_s: float = 0.0
    """Mean seconds for which requests hold their pages lately; 0 if that is not known."""
    peer_bytes: int = 0
    """Bytes it is reading from peers."""
    ssd_bytes: int = 0
    """Bytes it is reading from its SSD."""
    outgoing_bytes: int = 0
    """Bytes that peers are reading from it."""
    accepting: bool = True
    """False: it is draining. It may still be read from."""
    sessions: int = 0
    """Sessions that decode here, those that think or run tools among them."""


IDLE = WorkerLoad()


@dataclass(frozen=True)
class WorkerView:
    """One worker: what it can do and what it is doing."""

    name: str
    costs: CostModel
    """As calibrated or learned; read when the view is handed to a `FleetView`."""
    hbm_bytes: int
    """KV pages of one rank."""
    role: Role = Role.BOTH
    load: WorkerLoad = IDLE

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a worker needs a name")
        if self.hbm_bytes <= 0:
            raise ValueError(f"worker {self.name!r}: hbm_bytes is above 0, got {self.hbm_bytes}")


class Link(NamedTuple):
    """What the network between two workers adds to what the reader's cost model says."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    """The slower of this and the reader's own pace counts."""


class WorkerTable(NamedTuple):
    """The fleet's figures at one moment: each `[workers] float64`, by name."""

    queued_tokens: Floats
    waiting: Floats
    running: Floats
    context_tokens: Floats
    hbm_used: Floats
    residence_s: Floats
    peer_bytes: Floats
    ssd_bytes: Floats
    outgoing_bytes: Floats
    accepting: Floats
    """1 or 0."""
    sessions: Floats
    hbm_bytes: Floats
    step_s: Floats
    token_s: Floats
    attention_s: Floats
    step_tokens: Floats
    dram_latency_s: Floats
    dram_token_s: Floats
    dram_checkpoint_s: Floats
    ssd_latency_s: Floats
    ssd_token_s: Floats
    ssd_checkpoint_s: Floats
    ssd_ahead_s: Floats
    peer_latency_s: Floats
    peer_token_s: Floats
    peer_checkpoint_s: Floats
    peer_ahead_s: Floats
    decode_step_s: Floats
    decode_s: Floats
    context_s: Floats
    mixed_s: Floats
    delay_token_s: Floats
    delay_attention_s: Floats


_NUM_LOADS = len(WorkerLoad._fields)


class FleetView:
    """All workers of one model. Not thread-safe; `update` and `set_load` touch one column each."""

    def __init__(
        self,
        footprint: StateFootprint,
        workers: Iterable[WorkerView],
        links: Mapping[tuple[str, str], Link] | None = None,
    ) -> None:
        """`links`: by (from, to), where the network is slower than the reader's model says.

        Raises ValueError for an empty fleet, a name twice, a link to nobody.
        """
        ordered = sorted(workers, key=lambda worker: worker.name)
        self.footprint = footprint
        self.names = tuple(worker.name for worker in ordered)
        self.index = {name: i for i, name in enumerate(self.names)}
        if not ordered or len(self.index) < len(ordered):
            raise ValueError(f"a fleet has at least one worker, each with its own name: {ordered}")
        self.roles = tuple(worker.role for worker in ordered)
        self.prefill_pool = _pool(self.roles, Role.PREFILL)
        self.decode_pool = _pool(self.roles, Role.DECODE)
        self._table: Floats = np.zeros((len(WorkerTable._fields), len(ordered)))
        for worker in ordered:
            self.update(worker)
        self.links = self._links(links) if links else None
        """`[2, from, to] float64`: latencies and seconds per byte."""

    def __len__(self) -> int:
        return len(self.names)

    def update(self, worker: WorkerView) -> None:
        """Take over a worker's figures, its cost model's as they are now.

        Raises KeyError for a worker that is not of this fleet.
        """
        costs = worker.costs
        dram, ssd, peer = (
            self.footprint.pace(costs.load.rates(tier)) for tier in (Tier.DRAM, Tier.SSD, Tier.PEER)
        )
        paces = (*dram[:3], *ssd, *peer)  # copies to pages do not queue behind each other
        compute = costs.compute.coefficients
        step_tokens = costs.step_tokens or _ONE_STEP
        figures = (*worker.load, worker.hbm_bytes, *compute, step_tokens, *paces, *costs.delays())
        self._table[:, self.index[worker.name]] = figures

    def set_load(self, name: str, load: WorkerLoad) -> None:
        """Only what changes by the moment. Raises KeyError for a worker not of this fleet."""
        self._table[:_NUM_LOADS, self.index[name]] = load

    def table(self) -> WorkerTable:
        """A copy of this moment: what is decided by it can be explained later."""
        return WorkerTable(*self._table.copy())

    def _links(self, links: Mapping[tuple[str, str], Link]) -> Floats:
        table = np.zeros((2, len(self), len(self)))
        for (source, target), link in links.items():
            if source not in self.index or target not in self.index:
                raise ValueError(f"a link from {source!r} to {target!r}: no such worker")
            if not all(0.0 <= x < math.inf for x in link):
                raise ValueError(f"link {source!r} to {target!r} is finite and at least 0: {link}")
            table[:, self.index[source], self.index[target]] = link
        return table


def _pool(roles: Sequence[Role], role: Role) -> tuple[int, ...]:
    """Workers of a role, by index; those of either role if it has none of its own."""
    own = tuple(i for i, x in enumerate(roles) if x is role)
    return (
        own or tuple(i for i, x in enumerate(roles) if x is Role.BOTH) or tuple(range(len(roles)))
    )
