"""Hot prefixes get read-only copies, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownership.directory.memory_sessions import MemoryGroups
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.fleet_file import Failure
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace
from tests.ownership.simulator.checked_runs import check, figures, run_of
from tests.ownership.simulator.small_fleets import DENSE, HYBRID, costs, fleet, trace_of

SHARED = BlockRuns(((0, 32),))
FAST = {model: costs(model, bytes_per_s=100e9) for model in (DENSE, HYBRID)}


def sharing(sessions: int, every_s: float = 0.1, shared: int = 32, more: int = 4) -> Trace:
    """Sessions of one prompt each: the same `shared` chunks, then `more` of their own."""

    def one(number: int) -> Session:
        blocks = BlockRuns(((0, shared), (1_000 * (number + 1), more)))
        request = Request(0.0, 256 * (shared + more), 2, blocks)
        return Session(str(number), (request,), every_s * number)

    return trace_of(*(one(number) for number in range(sessions)))


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_a_prefix_that_many_sessions_share_is_copied_before_it_is_asked_for(model: str) -> None:
    """`prefix_aware` sends all sessions to who computed it, until that one has too many."""
    spec = fleet(3, model, cost_model=FAST[model])
    run = run_of(sharing(80), spec, "prefix_aware+replicas=hot")
    assert run.replicating is not None
    assert run.replicating.copies > 0
    holders = [w for w in run.workers.values() if w.memory.dram.find(SHARED).chunks == 32]
    assert len(holders) > 1
    fetched = sum(worker.flows.fetched.chunks for worker in run.workers.values())
    assert fetched == 32 * run.replicating.copies
    readers = [w for w in holders if w.flows.fetched.chunks]
    assert readers
    assert all(w.memory.ssd.find(SHARED).chunks == 0 for w in readers), "a replica is not written"


def test_a_request_that_is_sent_again_counts_as_one_use(monkeypatch: pytest.MonkeyPatch) -> None:
    uses: list[float] = []
    monkeypatch.setattr(MemoryGroups, "use", lambda _, name, key, now_s: uses.append(now_s))
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    spec = replace(fleet(3, roles=roles), failures=(Failure("w1", 5.01, 100.0),))
    run = run_of(sharing(2, every_s=5.0), spec, "round_robin_pd+replicas=hot")
    assert run.tally.resent == 1
    assert uses == [5.0]


def test_without_the_option_nothing_is_copied() -> None:
    run = run_of(sharing(80), fleet(3, cost_model=FAST[DENSE]), "prefix_aware")
    assert sum(worker.flows.fetched.chunks for worker in run.workers.values()) == 0


def test_a_conversation_that_nobody_shares_is_not_copied() -> None:
    turns = [Request(0.0, 8_192, 2, SHARED)]
    turns += [
        Request(0.0, 8_192 + 256 * at, 2, BlockRuns(((0, 32 + at),)), parent=at - 1, think_s=1.0)
        for at in range(1, 60)
    ]
    trace = trace_of(Session("a", tuple(turns), 0.0))
    assert figures(trace, fleet(3, cost_model=FAST[DENSE]), "ownerserve+replicas=hot").replicas == 0


def test_where_computing_is_faster_nothing_is_copied() -> None:
    spec = fleet(3, cost_model=costs(bytes_per_s=1e9))
    assert figures(sharing(80), spec, "prefix_aware+replicas=hot").replicas == 0


@settings(max_examples=15)
@given(
    model=st.sampled_from([DENSE, HYBRID]),
    scheduling=st.sampled_from(sorted(POLICIES)),
    workers=st.integers(2, 3),
    shared=st.integers(1, 40),
    more=st.integers(1, 8),
    every_s=st.floats(0.0, 0.5),
    dies_s=st.floats(0.0, 5.0),
)
def test_no_policy_with_replicas_beats_the_oracle(
    model: str, scheduling: str, workers: int, shared: int, more: int, every_s: float,
    dies_s: float,
) -> None:  # fmt: skip
    trace = sharing(50, every_s, shared, more)
    spec = fleet(workers, model, cost_model=FAST[model])
    check(trace, spec, f"{scheduling}+replicas=hot")
    dying = replace(spec, failures=(Failure("w1", dies_s, 1.0),))
    run = run_of(trace, dying, f"{scheduling}+replicas=hot")
    assert len(run.tally.step_s) == 50
