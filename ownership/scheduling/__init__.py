"""Where a request runs: pure policies over plain figures. No I/O, no engine, no clock.

Owns what a scheduler knows of a request (`step`: its class, who holds how much of it) and of the
fleet (`fleet`: a table that a router or a simulator fills), the price of every placement by the
planner's own cost models (`prefill_pricing`, `step_pricing`, `footprint`, `terms`), what comes
out (`decision`, printed by `explain`), and the policies: `ownerserve` takes the cheapest,
`baselines`, `dynamo_kv` and `conductor` are what others do. `admission` and `replication` are
policies of their own. `held` turns a directory's answer into figures. May import
`hetero_connector`'s planner, artifacts and spec, and the directory's types; never an engine,
redis or the simulator. A new policy goes into `registry.POLICIES`; a new term of the price into
`PlacementTerms` and the pricing.
"""

from ownership.scheduling.decision import (
    Placement,
    PlacementAction,
    PlacementCandidate,
    PlacementDecision,
    Refusal,
)
from ownership.scheduling.fleet import FleetView, Link, Role, WorkerLoad, WorkerView
from ownership.scheduling.footprint import StateFootprint
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.registry import DEFAULT_POLICY, POLICIES, scheduling_policy
from ownership.scheduling.step import ClassThresholds, Step, StepClass, WorkerPrefix, classify
from ownership.scheduling.terms import PlacementTerms
from ownership.scheduling.weights import PlacementWeights

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "ClassThresholds",
    "FleetView",
    "Link",
    "OwnerServe",
    "Placement",
    "PlacementAction",
    "PlacementCandidate",
    "PlacementDecision",
    "PlacementTerms",
    "PlacementWeights",
    "Refusal",
    "Role",
    "SchedulingPolicy",
    "StateFootprint",
    "Step",
    "StepClass",
    "WorkerLoad",
    "WorkerPrefix",
    "WorkerView",
    "classify",
    "scheduling_policy",
]
