"""The judge of histories finds each kind of fault."""

from __future__ import annotations

import pytest

from tests.ownership.history import Cleared, Ended, Event, Granted, Served, faults

SOUND: list[Event] = [
    Granted("a", 1, 10),
    Granted("a", 1, 10),
    Served("a", 1, 10, asked_s=1.0),
    Served("a", 3, 10, asked_s=1.5),
    Ended(1, at_s=2.0),
    Served("a", 1, 10, asked_s=1.9),
    Granted("a", 2, 11),
    Served("a", 2, 11, asked_s=3.0),
    Cleared(at_s=4.0),
    Granted("a", 2, 12),
    Served("a", 2, 12, asked_s=5.0),
    Granted("c", 4, 30),
    Served("c", 4, 30, asked_s=6.0),
    Cleared(at_s=7.0, epoch=4),
    Served("a", 2, 12, asked_s=8.0),
    Served("c", 4, 30, asked_s=6.5),
]


def test_a_sound_history_has_no_faults() -> None:
    assert list(faults(SOUND)) == []


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Granted("a", 3, 11), "the token was"),
        (Granted("b", 2, 11), "the token was"),
        (Granted("b", 1, 20), "its epoch had ended"),
        (Served("a", 1, 12, asked_s=6.0), "its holder had ended"),
        (Served("a", 2, 99, asked_s=6.0), "nobody was granted"),
        (Served("b", 2, 12, asked_s=6.0), "nobody was granted"),
        (Served("a", 2, 11, asked_s=3.5), "a greater token"),
        (Served("a", 2, 11, asked_s=6.0, reader="new"), "before the reset"),
        (Served("c", 4, 30, asked_s=8.0), "before the reset"),
    ],
)
def test_each_fault_is_found(event: Event, says: str) -> None:
    found = list(faults([*SOUND, event]))
    assert len(found) == 1
    assert says in found[0]
