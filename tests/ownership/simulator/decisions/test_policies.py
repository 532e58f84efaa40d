"""Policies asked about the decisions of a log."""

from __future__ import annotations

from random import Random

import pytest

from ownership.decisions.records import DecisionRecord
from ownership.scheduling import Step, WorkerLoad, WorkerPrefix, scheduling_policy
from ownership.scheduling.registry import without_remote_prefills
from ownership.simulator.decisions.policies import OtherPolicies
from ownership.simulator.traces.decision_file import Decided
from tests.ownership.scheduling.fleets import fleet_of, worker


@pytest.mark.parametrize("fetches", [False, True])
def test_a_policy_is_asked_for_what_the_router_could_have_done(fetches: bool) -> None:
    """The worker with the prefix is busy: it is read from another one, if that is possible."""
    policy = without_remote_prefills(scheduling_policy("ownerserve", Random(0)))
    busy = WorkerLoad(queued_tokens=100_000)
    fleet, step = fleet_of(worker("a", busy), worker("b")), Step(1_000, {"a": WorkerPrefix(0, 900)})
    fleet.groups = {"a": 0, "b": 0} if fetches else {"a": 0}
    decision = policy.decide(step, fleet)
    assert decision.placement.source_worker == ("a" if fetches else None)
    record = DecisionRecord.of(decision, decision.placement, "ownerserve", "chat", 1.0)
    record.note_fleet(fleet, "f")
    fleet.groups = None
    record.set_loads(fleet)
    asked = OtherPolicies(["ownerserve"])
    asked.add(Decided(record, step, fleet))
    [row] = asked.rows()
    assert (row.decisions, row.equal_share) == (1, 1.0)
