"""Lines of a decision log: from one alone the decision can be made again."""

from __future__ import annotations

import json
import math
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.cost_model import HandoffCost
from ownership.decisions.records import DecisionRecord, FleetRecord, NewerFormatError, decode
from ownership.scheduling import (
    POLICIES,
    FleetView,
    Role,
    Step,
    WorkerLoad,
    WorkerView,
    scheduling_policy,
)
from ownership.scheduling.decision import whole
from ownership.scheduling.fleet import Machine
from tests.ownership.scheduling.fleets import (
    BYTE_A_TOKEN,
    costs_of,
    fleet_of,
    steps,
    worker,
    workers,
)


def written(step: Step, fleet: FleetView, policy: str) -> tuple[DecisionRecord, FleetRecord]:
    """Return a decision and its fleet as a reader of their lines gets them."""
    decision = scheduling_policy(policy, Random(1)).decide(step, fleet)
    told = FleetRecord.of(fleet)
    record = DecisionRecord.of(decision, decision.placement, policy, "chat", 1.0)
    record.note_fleet(fleet, told.fleet)
    found = [decode(msgspec.json.encode(x)) for x in (record, told)]
    assert isinstance(found[0], DecisionRecord)
    assert isinstance(found[1], FleetRecord)
    return found[0], found[1]


@pytest.mark.parametrize("policy", POLICIES)
@given(st.data())
def test_the_same_policy_decides_the_same_on_what_was_written(
    policy: str, data: st.DataObject
) -> None:
    fleet = FleetView(BYTE_A_TOKEN, data.draw(workers()))
    fleet.prefill_demand = data.draw(st.sampled_from([0.0, 1.5]))
    step = data.draw(steps())
    record, told = written(step, fleet, policy)
    again = told.view()
    again.set_busy_loads(
        {name: [9.0] * len(WorkerLoad._fields) for name in again.names}
    )  # of a decision before
    record.set_loads(again)
    assert (again.figures(), again.busy_loads()) == (fleet.figures(), fleet.busy_loads())
    assert (again.names, again.roles) == (fleet.names, fleet.roles)
    decision = scheduling_policy(policy, Random(1)).decide(record.step(), again)
    assert decision.placement.decode_worker == record.worker
    assert decision.placement.prefill_worker == record.prefill_worker
    assert decision.placement.source_worker == record.source


@pytest.mark.parametrize("policy", ["static_pd", "conductor", "dynamo"])
def test_what_is_predicted_is_what_is_carried_out(policy: str) -> None:
    """A remote prefill that is not possible is computed where it decodes, which is busy."""
    busy = WorkerLoad(queued_tokens=5_000)
    fleet = fleet_of(worker("a", role=Role.PREFILL), worker("b", busy, role=Role.DECODE))
    decision = scheduling_policy(policy, Random(1)).decide(Step(3_000), fleet)
    assert (decision.placement.prefill_worker, decision.placement.decode_worker) == ("a", "b")
    apart = DecisionRecord.of(decision, decision.placement, policy, "chat", 1.0)
    assert apart.predicted == decision.predicted._asdict()
    assert apart.predicted["network_s"] == pytest.approx(0.2999)
    record = DecisionRecord.of(decision, whole(decision.placement), policy, "chat", 1.0)
    assert record.predicted["queue_s"] == pytest.approx(5.0)
    assert record.predicted["network_s"] == 0.0
    assert record.predicted_ttft_s == pytest.approx(5.0 + 3.0)
    assert record.wanted_prefill_at == "a"


def test_only_workers_that_are_not_idle_are_written() -> None:
    record, told = written(
        Step(10), fleet_of(worker("a"), worker("b", WorkerLoad(running_requests=2))), "colocated"
    )
    assert list(record.loads) == ["b"]
    assert list(told.figures) == ["a", "b"]


def test_fleets_of_equal_figures_have_one_name() -> None:
    def name(*views: WorkerView) -> str:
        return FleetRecord.of(fleet_of(*views)).fleet

    assert name(worker("a")) == name(worker("a", WorkerLoad(queued_tokens=5)))
    assert len({name(worker("a")), name(worker("b")), name(worker("a", hbm_bytes=5))}) == 3


def test_a_fleet_of_the_format_before_has_no_costs_of_handoffs() -> None:
    costs = costs_of()
    costs.handoff = HandoffCost(0.5, 1e-3)
    fleet = fleet_of(worker("a", costs=costs), worker("b"))
    _, told = written(Step(10), fleet, "colocated")
    assert told.view().table().machine.joining_s.tolist() == [0.5, 0.0]
    told.format, told.figures = 3, {name: known[:-2] for name, known in told.figures.items()}
    again = told.view().table().machine
    assert again.joining_s.tolist() == again.joining_token_s.tolist() == [0.0, 0.0]
    assert again.token_s.tolist() == fleet.table().machine.token_s.tolist()


def test_what_a_line_may_be() -> None:
    record, told = written(Step(10), fleet_of(worker("a")), "colocated")
    plain = json.loads(msgspec.json.encode(record))
    first_format = {k: v for k, v in plain.items() if k not in ("kind", "fleet", "loads")}
    old = decode(json.dumps(first_format | {"format": 1}).encode())
    assert isinstance(old, DecisionRecord)
    assert old.fleet == ""
    with pytest.raises(NewerFormatError, match="format 5, this version reads up to 4"):
        decode(json.dumps({"format": 5, "kind": "other"}).encode())
    for torn in (b"", b"{", b"[]", b'{"format": 2}', msgspec.json.encode(record)[:-9]):
        with pytest.raises(ValueError, match=r"."):
            decode(torn)
    (figures,) = told.figures.values()
    at = Machine._fields.index("step_tokens")
    for wrong in (
        [0.0] * len(figures), [-1.0, *figures[1:]], [math.inf, *figures[1:]],
        [math.nan, *figures[1:]], figures[1:], [*figures[:at], 0.0, *figures[at + 1 :]],
    ):  # fmt: skip
        told.figures = {"a": wrong}
        with pytest.raises(ValueError, match="worker 'a'"):
            told.view()
    told.figures = {}
    with pytest.raises(ValueError, match="no figures of worker 'a'"):
        told.view()
    record.loads = {"z": [0.0] * len(WorkerLoad._fields)}
    with pytest.raises(ValueError, match="'z', which is not of its fleet"):
        record.set_loads(fleet_of(worker("a")))
    record.loads = {"a": [0.0] * (len(WorkerLoad._fields) + 1)}
    with pytest.raises(ValueError, match="not a load of worker 'a'"):
        record.set_loads(fleet_of(worker("a")))
    record.loads = {"a": [-1.0] * len(WorkerLoad._fields)}
    with pytest.raises(ValueError, match="not a load of worker 'a'"):
        record.set_loads(fleet_of(worker("a")))
