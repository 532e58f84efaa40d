"""What is compared: a scheduling policy, with what HeteroCache does at each worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from hetero_connector.errors import SimulationError
from hetero_connector.planner.planner import Mode
from ownership.scheduling.admission import GatedPolicy, TtftObjective
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.registry import POLICIES, scheduling_policy
from ownership.simulator.machine.worker import CachePolicy, WorkerSpec
from ownership.simulator.state.memory import EVICTIONS, TierBytes

_GIB = 1 << 30
_MOST = 1e12


@dataclass(frozen=True)
class PolicySpec:
    """One policy of a comparison, as `parse_policy` reads it."""

    text: str
    scheduling: str
    cache: CachePolicy = field(default_factory=CachePolicy)
    tiers: str = "all"
    """`all`, `dram`: no SSD, `gpu`: only the engine's own prefix cache."""
    state: str = "typed"
    """`paged`: the dense baseline, every layer's pages for every token."""
    answers: str = "lost"
    """`kept`: the state of decoded tokens too, where a prompt that follows can begin with them."""
    peers: str = "named"
    """Whose DRAM engines read: a peer `named` by the scheduling policy, or `any`, by need."""
    handoffs: str = "chunks"
    """The token at which a remote prefill is handed off: its last full chunk's end, or as engines
    do, its last token (`ModelSpec.handoff_end`)."""
    replicas: str = "none"
    """`hot`: read-only copies of prefixes that many sessions share, see `replicating`."""
    copies: float | None = None
    """`ownerserve`'s price of state that is held twice (`PlacementWeights.copy`); None: its own."""
    ttft_objective_s: float | None = None
    """Above it requests are refused."""

    def scheduler(self, rng: random.Random) -> SchedulingPolicy:
        """A new scheduling policy."""
        policy = scheduling_policy(self.scheduling, rng)
        if self.copies is not None and isinstance(policy, OwnerServe):
            policy = replace(policy, weights=replace(policy.weights, copy=self.copies))
        if self.ttft_objective_s is None:
            return policy
        return GatedPolicy(policy, TtftObjective(self.ttft_objective_s))

    def limited(self, workers: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """The workers with only the tiers that the policy uses.

        Raises SimulationError where writes are limited and an SSD has no DRAM before it.
        """
        if self.tiers == "all":
            if self.cache.ssd_bytes_per_day is not None:
                _check_dram(self.text, workers)
            return list(workers)
        return [replace(w, capacity=_without(w, dram=self.tiers == "gpu")) for w in workers]


def parse_policy(text: str) -> PolicySpec:
    """From `ownerserve` or `colocated+eviction=lru+checkpoints=full+tiers=dram`.

    Raises SimulationError that names the part and lists what it may be.
    """
    scheduling, *options = text.split("+")
    if scheduling not in POLICIES:
        raise _unknown(text, f"no scheduling policy {scheduling!r}", POLICIES)
    spec = PolicySpec(text, scheduling)
    for option in options:
        name, _, value = option.partition("=")
        spec = _with(spec, name, value)
    if spec.copies is not None and scheduling != "ownerserve":
        problem = f"{scheduling} has no price of copies, only ownerserve has"
        raise SimulationError(f"policy {text!r}", problem, "copies")
    return spec


def _with(spec: PolicySpec, name: str, value: str) -> PolicySpec:
    read = _OPTIONS.get(name)
    if read is None:
        raise _unknown(spec.text, f"no option {name!r}", _OPTIONS)
    changed: dict[str, Any] = {_FIELDS.get(name, name): read(spec.text, name, value)}
    if changed.keys() <= set(CachePolicy._fields):
        return replace(spec, cache=spec.cache._replace(**changed))
    return replace(spec, **changed)


def _check_dram(text: str, workers: Sequence[WorkerSpec]) -> None:
    """Admission judges what is in DRAM: without any, nothing would ever be written."""
    for worker in workers:
        if worker.capacity.ssd and not worker.capacity.dram:
            problem = f"worker {worker.name!r} has an SSD and no DRAM, from which it is written"
            raise SimulationError(f"policy {text!r}", problem, "ssd_writes")


def _one_of(*known: str) -> Callable[[str, str, str], str]:
    def read(text: str, name: str, value: str) -> str:
        if value not in known:
            raise _unknown(text, f"{name} is {value!r}", known)
        return value

    return read


def _switch(text: str, name: str, value: str) -> bool:
    return _one_of("on", "off")(text, name, value) == "on"


def _checkpoints(text: str, name: str, value: str) -> str:
    kind, _, period = value.partition(":")
    if kind == "periodic" and period.isdecimal() and int(period) > 0:
        return value
    if value not in ("adaptive", "full", "zero"):
        known = ("adaptive", "full", "zero", "periodic:N")
        raise _unknown(text, f"{name} is {value!r}", known)
    return value


def _bytes_per_day(text: str, name: str, value: str) -> int | None:
    return None if value == "all" else int(_above_0(text, name, value) * _GIB) or 1


def _above_0(text: str, name: str, value: str) -> float:
    """Seconds, or GiB a day."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < _MOST:
        problem = f"{value!r} is no number above 0 and below {_MOST:g}"
        raise SimulationError(f"policy {text!r}", problem, name)
    return number


_OPTIONS: dict[str, Callable[[str, str, str], object]] = {
    "checkpoints": _checkpoints,
    "eviction": _one_of(*EVICTIONS),
    "restores": _one_of(*get_args(Mode)),
    "replay": _switch,
    "tiers": _one_of("all", "dram", "gpu"),
    "state": _one_of("typed", "paged"),
    "answers": _one_of("lost", "kept"),
    "peers": _one_of("named", "any"),
    "handoffs": _one_of("chunks", "tokens"),
    "replicas": _one_of("none", "hot"),
    "ssd_writes": _bytes_per_day,
    "prefetch": _switch,
    "copies": _above_0,
    "ttft": _above_0,
}
"""How each option is read: the policy's text, the option's name and value, for what to set."""
_FIELDS = {"ssd_writes": "ssd_bytes_per_day", "ttft": "ttft_objective_s"}
"""What an option sets, where the field of `CachePolicy` or `PolicySpec` has not its name."""


def _unknown(text: str, problem: str, known: Iterable[str]) -> SimulationError:
    return SimulationError(f"policy {text!r}", f"{problem}; there are {', '.join(known)}")


def _without(worker: WorkerSpec, *, dram: bool) -> TierBytes:
    capacity = replace(worker.capacity, ssd=0)
    return replace(capacity, dram=0) if dram else capacity
