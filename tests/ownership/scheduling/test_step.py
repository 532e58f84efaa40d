"""One request as the scheduler sees it."""

from __future__ import annotations

import pytest

from ownership.scheduling import Step, WorkerPrefix


def step(tokens: int, known: int = 0, resident: int | None = None, forked: bool = False) -> Step:
    resident = known if resident is None else resident
    held = {"a": WorkerPrefix(dram_tokens=resident)} if resident else {}
    return Step(tokens, held, "s", "a" if known else None, known, forked=forked)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (step(50_016, known=50_000), True),
        (step(50_017, known=50_000), False),
        (step(50_017, known=50_000, resident=50_001), True),
        (step(50_016, known=50_000, resident=49_920), True),
        (step(50_016, known=50_000, resident=25_000), True),
        (step(50_016, known=50_000, resident=24_999), False),
        (step(50_010, known=50_000, forked=True), False),
        (step(10), False),
        (step(10, resident=9), False),
    ],
)
def test_a_session_that_continues_to_decode(given: Step, expected: bool) -> None:
    assert given.is_continuation is expected


def test_what_another_worker_has_lets_no_session_continue() -> None:
    """Its owner has evicted its state, or has ended."""
    held = {"b": WorkerPrefix(50_000, 50_000, 50_000)}
    assert not Step(50_010, held, "s", "a", 50_000).is_continuation
    assert not Step(50_010, held, "s", None, 50_000).is_continuation
    assert Step(50_010, held, "s", "b", 50_000).is_continuation


def test_state_on_ssd_only_has_to_come_back_first() -> None:
    held = {"a": WorkerPrefix(ssd_tokens=50_000)}
    assert not Step(50_010, held, "s", "a", 50_000).is_continuation


@pytest.mark.parametrize(
    ("tokens", "boundary", "output", "message"),
    [(0, 0, 0.0, "one token"), (5, 6, 0.0, "boundary"), (5, 0, -1.0, "output")],
)
def test_an_impossible_step_is_refused(
    tokens: int, boundary: int, output: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Step(tokens, boundary_tokens=boundary, output_tokens=output)
