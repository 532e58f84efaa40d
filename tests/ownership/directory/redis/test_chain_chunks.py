"""The workers of a chain that was looked up, as the answer of a Redis that others can write to."""

from __future__ import annotations

import pytest

from ownership.directory import EpochStatus
from ownership.directory.contract import WorkerState
from ownership.directory.identifiers import Epoch
from ownership.directory.redis.chain_chunks import WorkerStates
from ownership.directory.redis.encoding import pack

NOW_S = 100.0


def epoch(name: str, deadline_s: float, *, retired: bool = False) -> bytes:
    return pack([name, "disk", 10.0, deadline_s, retired])


def test_workers_are_live_retired_or_ended() -> None:
    fields = [b"1", epoch("a", 101.0), b"2", epoch("b", 101.0, retired=True)]
    states = WorkerStates([*fields, b"3", epoch("c", NOW_S)], NOW_S)
    assert states[Epoch(1)] == WorkerState("a", "disk", EpochStatus.LIVE)
    assert states[Epoch(2)] == WorkerState("b", "disk", EpochStatus.RETIRED)
    assert states[Epoch(3)] == WorkerState("c", "disk", EpochStatus.ENDED)
    assert states[Epoch(1)] is states[Epoch(1)]
    assert dict(states).keys() == {1, 2, 3}


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", pack(["a"]), pack([1, "disk", 10.0, 101.0, False]), pack(["a", 5, "", 1])],
)
def test_what_is_no_epoch_counts_as_ended(value: bytes) -> None:
    states = WorkerStates([b"1", value, b"x", epoch("b", 101.0), b"2", epoch("c", 101.0)], NOW_S)
    assert states.get(Epoch(1)) is None
    assert Epoch(7) not in states
    assert list(states) == [2]
    assert len(states) == 1
