"""The class of a step."""

from __future__ import annotations

import pytest

from ownership.scheduling import ClassThresholds, Step, StepClass, WorkerPrefix, classify

T = ClassThresholds()


def step(tokens: int, known: int = 0, resident: int | None = None, **more: bool) -> Step:
    resident = known if resident is None else resident
    held = {"a": WorkerPrefix(dram_tokens=resident)} if resident else {}
    return Step(tokens, held, "s", "a" if known else None, known, **more)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (step(100), StepClass.INCREMENTAL_TURN),
        (step(8_191), StepClass.INCREMENTAL_TURN),
        (step(8_192), StepClass.NEW_LONG_PREFIX),
        (step(20_000, resident=15_000), StepClass.INCREMENTAL_TURN),
        (step(50_000, known=49_300), StepClass.INCREMENTAL_TURN),
        (step(58_192, known=50_000), StepClass.NEW_LONG_PREFIX),
        (step(52_047, known=50_000, from_tool=True), StepClass.INCREMENTAL_TURN),
        (step(52_048, known=50_000, from_tool=True), StepClass.LONG_TOOL_OUTPUT),
        (step(70_000, known=50_000, from_tool=True), StepClass.LONG_TOOL_OUTPUT),
        (step(50_016, known=50_000), StepClass.DECODE_CONTINUATION),
        (step(50_017, known=50_000), StepClass.INCREMENTAL_TURN),
        (step(10), StepClass.INCREMENTAL_TURN),
        (step(50_700, known=50_000, resident=24_999), StepClass.COLD_RESUME),
        (step(50_700, known=50_000, resident=25_000), StepClass.INCREMENTAL_TURN),
        (step(50_010, known=50_000, resident=1), StepClass.COLD_RESUME),
        (step(50_700, known=50_000, resident=1, forked=True), StepClass.FORKED_ROLLOUT),
        (step(10, forked=True), StepClass.FORKED_ROLLOUT),
    ],
)
def test_classes(given: Step, expected: StepClass) -> None:
    assert classify(given, T) is expected


def test_state_on_ssd_only_is_cold() -> None:
    on_ssd = Step(50_700, {"a": WorkerPrefix(ssd_tokens=50_000)}, "s", "a", 50_000)
    assert classify(on_ssd, T) is StepClass.COLD_RESUME


def test_thresholds_can_be_moved() -> None:
    early = ClassThresholds(continuation_tokens=1, long_tool_tokens=10, long_prefix_tokens=10)
    assert classify(step(10), early) is StepClass.NEW_LONG_PREFIX


@pytest.mark.parametrize(
    "bad",
    [
        {"continuation_tokens": -1},
        {"continuation_tokens": 2_048},
        {"long_tool_tokens": 9_000},
        {"cold_share": 1.5},
    ],
)
def test_thresholds_are_in_order(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="continuation_tokens < long_tool_tokens"):
        ClassThresholds(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "boundary", "output", "message"),
    [(0, 0, 0.0, "one token"), (5, 6, 0.0, "boundary"), (5, 0, -1.0, "output")],
)
def test_an_impossible_step_is_refused(
    tokens: int, boundary: int, output: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Step(tokens, boundary_tokens=boundary, output_tokens=output)
