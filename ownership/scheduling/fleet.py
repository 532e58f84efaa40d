"""The fleet as a scheduler sees it: a table of figures, one column per worker.

A router fills it by its `Ledger`. Workers are kept in the order of their names, so that no decision
depends on the order in which they were added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_model import CostModel
from ownership.scheduling.footprint import StateFootprint
from ownership.scheduling.fullness import copy_factor

Floats = NDArray[np.float64]
Number = TypeVar("Number")

_LEAST_S = 1e-12
"""Seconds that count as none."""
_ONE_STEP = 2.0**53
"""Tokens of a step if there is no limit."""


def least(values: Floats) -> float:
    """Return the least value. For a hundred of them `min` takes four times as long."""
    return values.item(values.argmin())


def most(values: Floats) -> float:
    """Return the greatest value."""
    return values.item(values.argmax())


class Role(StrEnum):
    """The kind of work that policies with fixed roles send a worker. Any worker can do both."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerLoad(NamedTuple):
    """The present load of a worker."""

    queued_tokens: int = 0
    """Prompt tokens scheduled or waiting, not yet computed."""
    waiting_requests: int = 0
    running_requests: int = 0
    """Counted as vLLM does: requests whose prompt is being computed are included."""
    context_tokens: int = 0
    """Sum of their tokens: what they attend to."""
    hbm_used_bytes: int = 0
    """KV pages of running requests on one rank. Cached pages that may be evicted do not count."""
    residence_s: float = 0.0
    """Mean seconds for which recent requests occupied their pages; 0 if unknown."""
    peer_bytes: int = 0
    """Bytes it is reading from peers."""
    ssd_bytes: int = 0
    """Bytes it is reading from its SSD."""
    outgoing_bytes: int = 0
    """Bytes that peers are reading from it."""
    accepting: bool = True
    """False while it is draining. It may still be read from."""
    returning: float = 0.0
    """Expected number of idle sessions that come back and decode here."""
    returning_tokens: float = 0.0
    """Their expected tokens."""


IDLE = WorkerLoad()


@dataclass(frozen=True)
class WorkerView:
    """One worker: its costs and its load."""

    name: str
    costs: CostModel
    """Calibrated or learned. A `FleetView` reads it when it gets this view."""
    hbm_bytes: int
    """Size of the KV pages of one rank."""
    role: Role = Role.BOTH
    load: WorkerLoad = IDLE
    cache_bytes: int = 0
    """Room for stored state in its memory, all ranks together; 0 if unknown."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a worker needs a name")
        if self.hbm_bytes <= 0:
            raise ValueError(f"worker {self.name!r}: hbm_bytes is above 0, got {self.hbm_bytes}")


class Link(NamedTuple):
    """The network between two workers, where it is slower than the reader's cost model says."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    """The slower of this and the reader's own rate counts."""


class Machine(NamedTuple, Generic[Number]):
    """Figures of a worker besides its load; or of all workers, as a `WorkerTable` has them."""

    hbm_bytes: Number
    cache_bytes: Number
    step_s: Number
    token_s: Number
    attention_s: Number
    step_tokens: Number
    dram_latency_s: Number
    dram_token_s: Number
    dram_checkpoint_s: Number
    ssd_latency_s: Number
    ssd_token_s: Number
    ssd_checkpoint_s: Number
    ssd_ahead_s: Number
    peer_latency_s: Number
    peer_token_s: Number
    peer_checkpoint_s: Number
    peer_ahead_s: Number
    decode_step_s: Number
    decode_s: Number
    context_s: Number
    mixed_s: Number
    delay_token_s: Number
    delay_attention_s: Number
    joining_s: Number
    """Seconds that a request takes longer because another worker prefilled it: the handoff, and a
    second front end and scheduling. Per request, then per token of its prompt."""
    joining_token_s: Number


class MachineTerms(NamedTuple):
    """The terms of prices that follow from machines alone, each `[workers]`."""

    prefill_step_s: Floats
    """`[2, 1, workers]`: of computing, and of the delay of one decode by it."""
    prefill_token_s: Floats
    half_attention_s: Floats
    full_step_s: Floats
    """A full step that has no context before it."""
    context_step_s: Floats
    """The part that each token of context adds to it."""
    dram_start_s: Floats
    """A load from DRAM of no tokens."""
    shared: Floats
    """The part of a decode step, of one request, that further requests would share."""

    @classmethod
    def of(cls, machine: Machine[Floats]) -> MachineTerms:
        size, attention_s = machine.step_tokens, machine.attention_s
        half_s = 0.5 * np.array(((attention_s,), (machine.delay_attention_s,)))
        return cls(
            np.array(((machine.step_s,), (machine.mixed_s,))),
            np.array(((machine.token_s,), (machine.delay_token_s,))),
            half_s,
            machine.step_s + size * (machine.token_s + 0.5 * size * attention_s),
            size * attention_s,
            machine.dram_checkpoint_s + machine.dram_latency_s,
            1.0 - machine.decode_s / (machine.decode_step_s + machine.decode_s + _LEAST_S),
        )


class LoadTerms(NamedTuple, Generic[Number]):
    """The terms of prices that follow from a worker's load, whatever the step is."""

    queue_s: Number
    """`CostModel.queue_s`: until the queued tokens are computed."""
    free_bytes: Number
    """Pages that are not in use."""
    batch_s: Number
    """A decode step of its requests. Those that wait will decode, too."""
    ssd_wait_s: Number
    """Before a load from SSD moves its first byte."""
    peer_wait_s: Number
    copy_factor: Number
    """The factor of the price of a copy (`fullness`)."""
    closed_s: Number
    """Infinite if it accepts no requests, else 0."""

    @classmethod
    def of(cls, load: WorkerLoad, machine: Machine[float], token_bytes: float) -> LoadTerms[float]:
        """`token_bytes`: a token's state, all ranks together."""
        queued, context = load.queued_tokens, load.context_tokens
        requests = load.running_requests + load.waiting_requests
        decoding_s = requests * machine.decode_s + context * machine.context_s
        return LoadTerms(
            math.ceil(queued / machine.step_tokens) * machine.step_s + queued * machine.token_s,
            machine.hbm_bytes - load.hbm_used_bytes,
            machine.decode_step_s + decoding_s,
            machine.ssd_latency_s + load.ssd_bytes * machine.ssd_ahead_s,
            machine.peer_latency_s + load.peer_bytes * machine.peer_ahead_s,
            copy_factor(context + load.returning_tokens, machine.cache_bytes, token_bytes),
            0.0 if load.accepting else math.inf,
        )


class WorkerTable(NamedTuple):
    """The fleet's figures at one moment: each is `[workers] float64`, in the order of names."""

    machine: Machine[Floats]
    machine_terms: MachineTerms
    load_terms: LoadTerms[Floats]
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
    returning: Floats
    returning_tokens: Floats


_NUM_LOADS = len(WorkerLoad._fields)
_ACCEPTING = WorkerLoad._fields.index("accepting")
_IDLE = np.array(IDLE, np.float64)


class FleetView:
    """All workers of one model. Not thread-safe. `update` and `set_load` change one column each."""

    def __init__(
        self,
        footprint: StateFootprint,
        workers: Iterable[WorkerView],
        links: Mapping[tuple[str, str], Link] | None = None,
    ) -> None:
        """`links`: by (from, to), where the network is slower than the reader's cost model says.

        Raises ValueError for an empty fleet, a name given twice, or a link to an unknown worker.
        """
        ordered = sorted(workers, key=lambda worker: worker.name)
        self._set_workers(footprint, [(worker.name, worker.role) for worker in ordered])
        for worker in ordered:
            self.update(worker)
        self.links = self._links(links) if links else None
        """`[2, from, to] float64`: latencies and seconds per byte."""

    @classmethod
    def of_figures(
        cls,
        footprint: StateFootprint,
        roles: Mapping[str, Role],
        figures: Mapping[str, Sequence[float]],
    ) -> FleetView:
        """Return an idle fleet with the `figures` of another one, without links.

        Raises ValueError for an empty fleet or figures that no worker has, KeyError for a worker
        without figures.
        """
        fleet = cls.__new__(cls)
        fleet._set_workers(footprint, sorted(roles.items()))
        for name in fleet.names:
            told = figures[name]
            if len(told) != len(Machine._fields) or not all(0.0 <= x < math.inf for x in told):
                raise ValueError(f"not the figures of worker {name!r}")
            fleet._machines[name] = machine = Machine(*told)
            if not machine.step_tokens:
                raise ValueError(f"worker {name!r} computes no token in a step")
            fleet.set_load(name, IDLE)
        fleet.links = None
        return fleet

    def _set_workers(self, footprint: StateFootprint, workers: Sequence[tuple[str, Role]]) -> None:
        """Set all but the figures. `workers`: in the order of their names."""
        self.footprint = footprint
        self.names = tuple(name for name, _ in workers)
        self.index = {name: i for i, name in enumerate(self.names)}
        if not workers or len(self.index) < len(workers):
            raise ValueError(f"a fleet has at least one worker, each with its own name: {workers}")
        self.roles = tuple(role for _, role in workers)
        self.prefill_pool = _pool(self.roles, Role.PREFILL)
        self.decode_pool = _pool(self.roles, Role.DECODE)
        self._machines: dict[str, Machine[float]] = {}
        self._known: tuple[Machine[Floats], MachineTerms] | None = None
        """The part that tables share; None if a machine has changed."""
        self._loads: Floats = np.zeros((_NUM_LOADS + len(LoadTerms._fields), len(workers)))
        """Loads and their terms: these are computed when a load changes, because between two
        decisions few do."""
        self.prefill_demand = 0.0
        """Workers that the prefills placed lately keep busy (`roles.PrefillDemand`)."""
        self.groups: Mapping[str, int] | None = None
        """The workers that read each other's state have the same number; one without a number
        reads no other's. None: all read each other's."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def accepting(self) -> Floats:
        """`[workers]`: 1 if it accepts requests now, else 0."""
        accepting: Floats = self._loads[_ACCEPTING]
        return accepting

    def update(self, worker: WorkerView) -> None:
        """Copy a worker's figures, and the present ones of its cost model.

        Raises KeyError for an unknown worker.
        """
        costs = worker.costs
        dram, ssd, peer = (self.footprint.pace(costs.load.rates(tier)) for tier in Tier)
        paces = (*dram[:3], *ssd, *peer)  # copies to pages do not queue
        compute = costs.compute.coefficients
        step_tokens = costs.step_tokens or _ONE_STEP
        sizes = (worker.hbm_bytes, worker.cache_bytes)
        joining_s = costs.joining_s(0)
        joining = (joining_s, costs.joining_s(1) - joining_s)
        machine = Machine(*sizes, *compute, step_tokens, *paces, *costs.delays(), *joining)
        if worker.name not in self.index:
            raise KeyError(worker.name)
        self._machines[worker.name], self._known = machine, None
        self.set_load(worker.name, worker.load)

    def set_load(self, name: str, load: WorkerLoad) -> None:
        """Set only the load, which changes all the time. Raises KeyError for an unknown worker."""
        terms = LoadTerms.of(load, self._machines[name], self.footprint.all_token_bytes)
        self._loads[:, self.index[name]] = load + terms

    def hbm_bytes(self, name: str) -> int:
        """Return the size of a worker's KV pages. Raises KeyError for an unknown worker."""
        return int(self._machines[name].hbm_bytes)

    def compute_s(self, name: str, prompt_tokens: int, new_tokens: int) -> float:
        """Return the seconds in which a worker computes the last `new_tokens` of a prompt.

        Raises KeyError for an unknown worker.
        """
        machine = self._machines[name]
        attention_s = machine.attention_s * (prompt_tokens - 0.5 * new_tokens)
        steps = math.ceil(new_tokens / machine.step_tokens)
        return new_tokens * (machine.token_s + attention_s) + steps * machine.step_s

    def figures(self) -> dict[str, list[float]]:
        """Return all figures of each worker but its load, in the order of `Machine`."""
        return {name: [float(x) for x in machine] for name, machine in self._machines.items()}

    def busy_loads(self) -> dict[str, list[float]]:
        """Return the loads of the workers that are not idle, each in the order of `WorkerLoad`."""
        loads = self._loads[:_NUM_LOADS]
        busy = np.flatnonzero((loads.T != _IDLE).any(axis=1))
        rows = loads[:, busy].T.tolist()
        return {self.names[at]: row for at, row in zip(busy.tolist(), rows, strict=True)}

    def set_busy_loads(self, loads: Mapping[str, Sequence[float]]) -> None:
        """Set all loads: these, and the other workers idle.

        Raises KeyError for an unknown worker, ValueError for a load that is none.
        """
        for name in self.names:
            self.set_load(name, IDLE)
        for name, load in loads.items():
            if len(load) != _NUM_LOADS or not all(0.0 <= x < math.inf for x in load):
                raise ValueError(f"not a load of worker {name!r}: {load}")
            self.set_load(name, WorkerLoad(*load))  # type: ignore[arg-type]

    def machines(self) -> tuple[Machine[Floats], MachineTerms]:
        """Return the part of a table that does not depend on loads."""
        if self._known is None:
            columns = [self._machines[name] for name in self.names]
            machine = Machine(*np.array(columns, np.float64).T.copy())
            self._known = machine, MachineTerms.of(machine)
        return self._known

    def table(self) -> WorkerTable:
        """Return the present figures. They stay so, that a decision can be explained later."""
        loads = self._loads.copy()
        return WorkerTable(*self.machines(), LoadTerms(*loads[_NUM_LOADS:]), *loads[:_NUM_LOADS])

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
    """Return the workers of a role, by index; those of both roles if there is none."""
    own = tuple(i for i, x in enumerate(roles) if x is role)
    return (
        own or tuple(i for i, x in enumerate(roles) if x is Role.BOTH) or tuple(range(len(roles)))
    )
