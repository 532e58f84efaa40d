"""The policies that a comparison names: how requests are placed, and what workers do with state."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from hetero_connector.errors import SimulationError
from hetero_connector.planner.planner import Mode
from ownership.scheduling.decision import PlacementAction
from ownership.scheduling.dynamo import Dynamo
from ownership.scheduling.fleet import Role
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.registry import (
    POLICIES,
    POOLED,
    scheduling_policy,
    without_remote_prefills,
)
from ownership.simulator.machine.worker import CachePolicy, WorkerSpec
from ownership.simulator.routers import VIEWS, Knowledge
from ownership.simulator.state.memory import EVICTIONS

_LIMIT = 1e12


def _free(**weights: Any) -> Callable[[OwnerServe], OwnerServe]:
    return lambda policy: replace(policy, weights=replace(policy.weights, **weights))


def _staying(*actions: PlacementAction) -> Callable[[OwnerServe], OwnerServe]:
    return lambda policy: replace(policy, moves=policy.moves - {*actions})


TERMS: Mapping[str, Callable[[OwnerServe], OwnerServe]] = {
    "stalls": _free(stall=0.0),
    "copies": _free(copy=0.0),
    "fullness": _free(fullness=False),
    "roles": _free(role=1.0),
    "remote": _staying(PlacementAction.REMOTE_PREFILL),
    "fetch": _staying(PlacementAction.ARTIFACT_FETCH),
    "migration": _staying(PlacementAction.STATE_MIGRATION),
    "moves": _staying(
        PlacementAction.REMOTE_PREFILL,
        PlacementAction.ARTIFACT_FETCH,
        PlacementAction.STATE_MIGRATION,
    ),
}
"""Parts of `ownerserve`, each by the policy without it: prices, and moves over the network."""


@dataclass(frozen=True)
class PolicySpec:
    """One policy of a comparison, as `parse_policy` reads it."""

    text: str
    scheduling: str
    cache: CachePolicy = field(default_factory=CachePolicy)
    knowledge: Knowledge = field(default_factory=Knowledge)
    """The knowledge of its routers."""
    tiers: str = "all"
    """`all`; `dram`: no SSD; `gpu`: only the engine's own prefix cache."""
    state: str = "typed"
    """`typed`; `paged`: the dense baseline, every layer keeps the pages of all tokens."""
    answers: str = "lost"
    """`lost`; `kept`: the state of decoded tokens is kept if a later prompt can begin with them."""
    prefillers: int | None = None
    """So many workers are the prefill pool and the others the decode pool; None: by the fleet's
    roles. Only for policies with pools."""
    handoffs: str = "chunks"
    """`chunks`: a remote prefill is handed off at the end of its last full chunk; `tokens`: at its
    last token or just before, as engines do (`ModelSpec.handoff_end`)."""
    without: tuple[str, ...] = ()
    """The parts of `TERMS` that `ownerserve` does without. May be given several times."""
    copies: float | None = None
    """The price of duplicates under `ownerserve` (`PlacementWeights.copy`); None: the default."""
    prefill_scale: float | None = None
    """Dynamo's weight of prefills; None: the default."""

    def scheduler(self, rng: random.Random, can_hand_off: bool = True) -> SchedulingPolicy:
        """Return a new scheduling policy. `can_hand_off`: False if some worker has no DRAM, from
        and to which a handoff's state is read."""
        policy = scheduling_policy(self.scheduling, rng)
        if self.copies is not None and isinstance(policy, OwnerServe):
            policy = replace(policy, weights=replace(policy.weights, copy=self.copies))
        for term in self.without:
            assert isinstance(policy, OwnerServe), "the option is of ownerserve only"
            policy = TERMS[term](policy)
        if self.prefill_scale is not None and isinstance(policy, Dynamo):
            policy.prefill_scale = self.prefill_scale
        return policy if can_hand_off else without_remote_prefills(policy)

    def workers(self, fleet: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Return a fleet's workers with the roles and only the tiers that the policy uses.

        Raises SimulationError if the policy needs two pools and there is none or only one, or DRAM
        and a worker has none.
        """
        without = {"all": {}, "dram": {"ssd": 0}, "gpu": {"ssd": 0, "dram": 0}}[self.tiers]
        found = [replace(w, capacity=replace(w.capacity, **without)) for w in fleet]
        if self.prefillers is not None:
            if not self.prefillers < len(found):
                problem = f"{self.prefillers} of {len(found)} workers leaves none to decode"
                raise SimulationError(f"policy {self.text!r}", problem, "prefillers")
            pools = [Role.PREFILL] * self.prefillers + [Role.DECODE] * (
                len(found) - self.prefillers
            )
            found = [replace(w, role=role) for w, role in zip(found, pools, strict=True)]
        if POOLED.get(self.scheduling) and len({worker.role for worker in found}) == 1:
            problem = (
                "needs workers of two roles: set role in the fleet's file, or add +prefillers=N"
            )
            raise SimulationError(f"policy {self.text!r}", problem)
        has_pools = {Role.PREFILL, Role.DECODE} <= {worker.role for worker in found}
        hands_off = self.scheduling in POOLED and (POOLED[self.scheduling] or has_pools)
        if not have_dram(found) and (hands_off or self.knowledge.prefix_lag):
            what = "hands off" if hands_off else "prefix_lag is of"
            problem = f"{what} what is in DRAM: give every worker some, and not tiers=gpu"
            raise SimulationError(f"policy {self.text!r}", problem)
        return found


def have_dram(fleet: Iterable[WorkerSpec]) -> bool:
    """Return True if every worker has DRAM: what others computed is read from and to it."""
    return all(worker.capacity.dram for worker in fleet)


def parse_policy(text: str) -> PolicySpec:
    """Read `ownerserve` or `colocated+eviction=value+checkpoints=full+tiers=dram`.

    Raises SimulationError that names the part and lists what it may be.
    """
    scheduling, *options = text.split("+")
    if scheduling not in POLICIES:
        raise _unknown(text, f"no scheduling policy {scheduling!r}", POLICIES)
    spec, given = PolicySpec(text, scheduling), set[str]()
    for option in options:
        name, _, value = option.partition("=")
        if name in given and name != "without":
            raise SimulationError(f"policy {text!r}", "given twice: give it once", name)
        given.add(name)
        spec = _with(spec, name, value)
    for option, owner in _OF_ONE_POLICY.items():
        if getattr(spec, option) is not None and scheduling != owner:
            problem = f"{scheduling} has no such option, only {owner} has"
            raise SimulationError(f"policy {text!r}", problem, option)
    if spec.prefillers is not None and scheduling not in POOLED:
        problem = f"{scheduling} has no pools; {', '.join(POOLED)} have"
        raise SimulationError(f"policy {text!r}", problem, "prefillers")
    if spec.without and scheduling != "ownerserve":
        problem = f"{scheduling} has no such option, only ownerserve has"
        raise SimulationError(f"policy {text!r}", problem, "without")
    _check_knowledge(spec)
    return spec


def _with(spec: PolicySpec, name: str, value: str) -> PolicySpec:
    read = _OPTIONS.get(name)
    if read is None:
        raise _unknown(spec.text, f"no option {name!r}", _OPTIONS)
    changed: dict[str, Any] = {name: read(spec.text, name, value)}
    if name == "without":
        changed["without"] = (*spec.without, changed["without"])
    if name in CachePolicy._fields:
        return replace(spec, cache=spec.cache._replace(**changed))
    if name in Knowledge._fields:
        return replace(spec, knowledge=spec.knowledge._replace(**changed))
    return replace(spec, **changed)


def _check_knowledge(spec: PolicySpec) -> None:
    knows = spec.knowledge
    given = [
        name for name, value in knows._asdict().items() if value != Knowledge()._asdict()[name]
    ]
    if knows.view == "exact" and len(given) > 1:
        problem = f"an exact view has no {', '.join(x for x in given if x != 'view')}"
        raise SimulationError(f"policy {spec.text!r}", problem, "view")
    if knows.reports is None and (
        knows.view == "reports" or knows.report_lag or knows.lost_reports
    ):
        problem = "there are no reports: add reports=SECONDS"
        raise SimulationError(f"policy {spec.text!r}", problem, "reports")
    if knows.deltas is not None and knows.routers == 1:
        raise SimulationError(
            f"policy {spec.text!r}", "one router has no other: add routers=2", "deltas"
        )


def _one_of(*known: str) -> Callable[[str, str, str], str]:
    def read(text: str, name: str, value: str) -> str:
        if value not in known:
            raise _unknown(text, f"{name} is {value!r}", known)
        return value

    return read


def _checkpoints(text: str, name: str, value: str) -> str:
    kind, _, period = value.partition(":")
    if kind == "periodic" and period.isdecimal() and int(period) > 0:
        return value
    if value not in ("adaptive", "full", "zero"):
        known = ("adaptive", "full", "zero", "periodic:N")
        raise _unknown(text, f"{name} is {value!r}", known)
    return value


def _from_0(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 <= number < _LIMIT:
        problem = f"{value!r} is no number from 0 and below {_LIMIT:g}"
        raise SimulationError(f"policy {text!r}", problem, name)
    return number


def _above_0(text: str, name: str, value: str) -> float:
    number = _from_0(text, name, value)
    if not number:
        raise SimulationError(f"policy {text!r}", f"{value!r} is no number above 0", name)
    return number


def _whole(text: str, name: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < _LIMIT:
        problem = f"{value!r} is no whole number above 0"
        raise SimulationError(f"policy {text!r}", problem, name)
    return int(value)


def _share(text: str, name: str, value: str) -> float:
    share = _from_0(text, name, value)
    if share > 1.0:
        raise SimulationError(f"policy {text!r}", f"{value} is no share of 1", name)
    return share


def _count(text: str, name: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) <= 1_000:
        raise SimulationError(f"policy {text!r}", f"{value!r} is no number from 1 to 1000", name)
    return int(value)


def _term(text: str, name: str, value: str) -> str:
    if value not in TERMS:
        raise _unknown(text, f"{name} is {value!r}", TERMS)
    return value


_OPTIONS: dict[str, Callable[[str, str, str], object]] = {
    "checkpoints": _checkpoints,
    "eviction": _one_of(*EVICTIONS),
    "restores": _one_of(*get_args(Mode)),
    "tiers": _one_of("all", "dram", "gpu"),
    "state": _one_of("typed", "paged"),
    "answers": _one_of("lost", "kept"),
    "prefillers": _whole,
    "handoffs": _one_of("chunks", "tokens"),
    "view": _one_of(*VIEWS),
    "reports": _above_0,
    "report_lag": _from_0,
    "lost_reports": _share,
    "routers": _count,
    "deltas": _from_0,
    "prefix_lag": _from_0,
    "wrong_prefixes": _share,
    "without": _term,
    "copies": _above_0,
    "prefill_scale": _above_0,
}
"""The readers of options: (policy's text, option's name, its value) -> the field's value."""


_OF_ONE_POLICY = {
    "copies": "ownerserve",
    "prefill_scale": "dynamo",
}
"""Options of one scheduling policy."""


def _unknown(text: str, problem: str, known: Iterable[str]) -> SimulationError:
    return SimulationError(f"policy {text!r}", f"{problem}; there are {', '.join(known)}")
