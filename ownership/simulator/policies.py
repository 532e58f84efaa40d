"""What is compared: a scheduling policy, with what HeteroCache does at each worker."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast, get_args

from hetero_connector.errors import SimulationError
from hetero_connector.planner.restore_planner import Mode
from ownership.scheduling.admission import Admitting, TtftObjective
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.registry import POLICIES, scheduling_policy
from ownership.simulator.machine.worker import CachePolicy, WorkerSpec
from ownership.simulator.state.memory import EVICTIONS, Eviction, TierBytes

_GIB = 1 << 30
_OPTIONS = (
    "checkpoints", "eviction", "restores", "replay", "tiers", "state", "answers", "peers",
    "handoffs", "replicas", "ssd_writes", "prefetch", "ttft",
)  # fmt: skip
_TIERS = ("all", "dram", "gpu")
_STATE = ("typed", "paged")
_SWITCH = ("on", "off")
_ANSWERS = ("lost", "kept")
_PEERS = ("named", "any")
_HANDOFFS = ("chunks", "tokens")
_REPLICAS = ("none", "hot")


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
    """Where a remote prefill is handed over: at its last full chunk's end, or as engines do it, at
    its last token (`ModelSpec.handoff_end`)."""
    replicas: str = "none"
    """`hot`: read-only copies of prefixes that many sessions share, see `replicating`."""
    ttft_objective_s: float | None = None
    """Above it requests are refused."""

    def scheduler(self, rng: random.Random) -> SchedulingPolicy:
        """A new scheduling policy."""
        policy = scheduling_policy(self.scheduling, rng)
        if self.ttft_objective_s is None:
            return policy
        return Admitting(policy, TtftObjective(self.ttft_objective_s))

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
    return spec


def _with(spec: PolicySpec, name: str, value: str) -> PolicySpec:
    match name:
        case "checkpoints":
            _check_checkpoints(spec.text, value)
            return replace(spec, cache=spec.cache._replace(checkpoints=value))
        case "eviction":
            _check(spec.text, name, value, EVICTIONS)
            return replace(spec, cache=spec.cache._replace(eviction=cast(Eviction, value)))
        case "restores":
            _check(spec.text, name, value, get_args(Mode))
            return replace(spec, cache=spec.cache._replace(restores=cast(Mode, value)))
        case "replay":
            _check(spec.text, name, value, _SWITCH)
            return replace(spec, cache=spec.cache._replace(replay=value == "on"))
        case "tiers":
            _check(spec.text, name, value, _TIERS)
            return replace(spec, tiers=value)
        case "state":
            _check(spec.text, name, value, _STATE)
            return replace(spec, state=value)
        case "answers":
            _check(spec.text, name, value, _ANSWERS)
            return replace(spec, answers=value)
        case "peers":
            _check(spec.text, name, value, _PEERS)
            return replace(spec, peers=value)
        case "handoffs":
            _check(spec.text, name, value, _HANDOFFS)
            return replace(spec, handoffs=value)
        case "replicas":
            _check(spec.text, name, value, _REPLICAS)
            return replace(spec, replicas=value)
        case "prefetch":
            _check(spec.text, name, value, _SWITCH)
            return replace(spec, cache=spec.cache._replace(prefetch=value == "on"))
        case "ssd_writes":
            per_day = None if value == "all" else int(_above_0(spec.text, name, value) * _GIB)
            return replace(spec, cache=spec.cache._replace(ssd_bytes_per_day=per_day))
        case "ttft":
            return replace(spec, ttft_objective_s=_above_0(spec.text, name, value))
    raise _unknown(spec.text, f"no option {name!r}", _OPTIONS)


def _check(text: str, name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise _unknown(text, f"{name} is {value!r}", known)


def _check_dram(text: str, workers: Sequence[WorkerSpec]) -> None:
    """Admission judges what is in DRAM: without any, nothing would ever be written."""
    for worker in workers:
        if worker.capacity.ssd and not worker.capacity.dram:
            problem = f"worker {worker.name!r} has an SSD and no DRAM, from which it is written"
            raise SimulationError(f"policy {text!r}", problem, "ssd_writes")


def _check_checkpoints(text: str, value: str) -> None:
    kind, _, period = value.partition(":")
    if kind == "periodic" and period.isdecimal() and int(period) > 0:
        return
    if value not in ("adaptive", "full", "zero"):
        raise _unknown(
            text, f"checkpoints is {value!r}", ("adaptive", "full", "zero", "periodic:N")
        )


def _above_0(text: str, name: str, value: str) -> float:
    """Seconds, or GiB a day."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise SimulationError(f"policy {text!r}", f"{value!r} is no number above 0", name)
    return number


def _unknown(text: str, problem: str, known: Iterable[str]) -> SimulationError:
    return SimulationError(f"policy {text!r}", f"{problem}; there are {', '.join(known)}")


def _without(worker: WorkerSpec, *, dram: bool) -> TierBytes:
    capacity = replace(worker.capacity, ssd=0)
    return replace(capacity, dram=0) if dram else capacity
