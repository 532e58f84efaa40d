from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownership.simulator.clock import EventLoop


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_time_never_goes_back(events: list[tuple[int, bool]]) -> None:
    loop, seen = EventLoop(), []
    for number, (time_s, begins) in enumerate(events):
        loop.at(time_s, lambda n: seen.append((loop.now_s, n)), number, begins=begins)
    loop.run()
    assert [time_s for time_s, _ in seen] == sorted(time_s for time_s, _ in events)
    # Endings before beginnings, else as announced.
    assert [n for _, n in seen] == sorted(range(len(events)), key=lambda n: (*events[n], n))


def test_an_event_may_announce_others() -> None:
    loop, seen = EventLoop(), []

    def first() -> None:
        loop.at(loop.now_s, seen.append, "at once")
        loop.at(5.0, seen.append, "later")

    loop.at(1.0, first)
    loop.at(1.0, seen.append, "begins", begins=True)
    loop.run()
    assert seen == ["at once", "begins", "later"]
    assert loop.now_s == 5.0


def test_the_past_cannot_be_changed() -> None:
    loop = EventLoop()
    loop.at(2.0, lambda: loop.at(1.0, lambda: None))
    with pytest.raises(ValueError, match="has passed"):
        loop.run()
