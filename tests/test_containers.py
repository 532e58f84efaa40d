"""The bounded dictionary and the heap of due times, each against a plain model."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.containers import BoundedDict, ExpiringHeap

KEYS = st.integers(0, 9)


def test_the_key_set_longest_ago_is_dropped() -> None:
    known = BoundedDict[str, int](2)
    known["a"], known["b"], known["a"] = 1, 2, 3
    assert known["b"] == 2  # reading does not keep it
    known["c"] = 4
    assert dict(known) == {"a": 3, "c": 4}
    assert known.setdefault("a", 9) == 3
    assert known.setdefault("d", 5) == 5
    assert list(known) == ["c", "d"]


@given(st.lists(st.tuples(KEYS, st.integers(0, 20))), st.integers(0, 20))
def test_keys_come_in_the_order_in_which_they_are_due(
    pushed: list[tuple[int, int]], now_s: int
) -> None:
    current: dict[int, object] = {}
    due: dict[int, int] = {}
    heap = ExpiringHeap[int, object](current)
    for key, due_s in pushed:
        current[key] = object()
        heap.push(due_s, key, current[key])
        due[key] = due_s
    for key in [k for k in due if k % 3 == 0]:
        del current[key], due[key]
    heap.prune()
    assert heap.next_s == min(due.values(), default=math.inf)
    found = []
    while (key := heap.pop_due(now_s)) is not None:
        found.append(key)
    assert [due[key] for key in found] == sorted(x for x in due.values() if x <= now_s)


def test_entries_that_do_not_count_are_swept() -> None:
    current = {"a": object()}
    heap = ExpiringHeap[str, object](current)
    for number in range(1_000):
        current["a"] = object()
        heap.push(1_000 - number, "a", current["a"])
        heap.push(2_000, "gone", object())
    assert len(heap) < 200
