"""Decides where a request runs: pure policies over plain figures. No I/O, no engine, no clock.

- Input: `step` (a request, its class, and how much of it each worker can resume from; `prefixes`
  derives that from a directory's answer) and `fleet` (a table of figures per worker).
- What a router knows: `ledger` fills that table from what was sent and seen, corrected by reports;
  `session_table` has the sessions. The simulator's routers use the same.
- Price: `step_pricing` prices every route by the planner's own cost models (`prefill_pricing`,
  `footprint`, `weights`, `fullness`).
- Output: `decision`.
- Policies: `ownerserve` takes the cheapest route; `baselines`, `dynamo`, `dynamo_kv`, `conductor`
  and `predicted_latency` are what others do.

May import `hetero_connector`'s planner, artifacts, spec, containers and errors, and
`ownership.directory`; never an engine, redis or the simulator. Add a policy to `registry.POLICIES`;
add a term of the price to `PlacementTerms` and to the pricing.
"""

from ownership.scheduling.decision import (
    Placement,
    PlacementAction,
    PlacementDecision,
)
from ownership.scheduling.fleet import FleetView, Link, Role, WorkerLoad, WorkerView
from ownership.scheduling.footprint import StateFootprint
from ownership.scheduling.ledger import Ledger, LedgerLimits, Work
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.registry import DEFAULT_POLICY, POLICIES, scheduling_policy
from ownership.scheduling.step import Step, WorkerPrefix
from ownership.scheduling.step_pricing import PlacementTerms
from ownership.scheduling.weights import PlacementWeights

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "FleetView",
    "Ledger",
    "LedgerLimits",
    "Link",
    "OwnerServe",
    "Placement",
    "PlacementAction",
    "PlacementDecision",
    "PlacementTerms",
    "PlacementWeights",
    "Role",
    "SchedulingPolicy",
    "StateFootprint",
    "Step",
    "Work",
    "WorkerLoad",
    "WorkerPrefix",
    "WorkerView",
    "scheduling_policy",
]
