from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from hetero_connector.errors import TraceError
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.distributions import Constant, Exponential
from ownership.simulator.traces.session import Request, Session, Trace
from ownership.simulator.traces.starts import (
    PoissonStarts,
    RecordedStarts,
    RenewalStarts,
    StartProcess,
)


def trace(*starts_s: float | None) -> Trace:
    request = Request(0.0, 1, 1, BlockRuns())
    sessions = [Session(str(i), (request,), start_s) for i, start_s in enumerate(starts_s)]
    return Trace("some file", "none", 16, lambda: iter(sessions))


def times(process: StartProcess, count: int = 5000, seed: int = 1) -> list[float]:
    return list(islice(process.starts_s(np.random.default_rng(seed)), count))


@pytest.mark.parametrize(
    "process",
    [
        PoissonStarts(2.0),
        RenewalStarts(Exponential(0.5)),
        RenewalStarts(Constant(0.5)),
        RecordedStarts.of(trace(3.0, 3.0, 5.0, 13.0), 2.0),
    ],
    ids=lambda process: process.as_text(),
)
def test_starts_never_fall_and_come_at_the_rate(process: StartProcess) -> None:
    found = times(process)
    assert found == sorted(found)
    assert len(found) / found[-1] == pytest.approx(2.0, rel=0.05)
    assert found == times(process), "the seed decides"


def test_recorded_starts_keep_their_bursts_at_another_rate() -> None:
    process = RecordedStarts.of(trace(3.0, 3.0, 5.0, 13.0), 0.5)
    found = np.diff(times(process, 9))
    mean = 10 / 3  # recorded gaps: 0, 2, 8, and the mean from the last to the first again
    cycle = [gap / mean / 0.5 for gap in (0.0, 2.0, 8.0, mean)]
    place = next(i for i in range(4) if found[0] == pytest.approx(cycle[i]))
    assert found == pytest.approx([cycle[(place + i) % 4] for i in range(8)])
    assert process.as_text() == "as in some file, scaled to 0.5 sessions per second"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_a_number_greater_than_0(rate: float) -> None:
    with pytest.raises(TraceError, match=r"rate_per_s: .* is not a number greater than 0"):
        PoissonStarts(rate)
    with pytest.raises(TraceError, match="rate_per_s"):
        RecordedStarts.of(trace(0.0, 1.0), rate)


@pytest.mark.parametrize("starts", [(), (None, None), (4.0,), (4.0, 4.0)])
def test_arrivals_that_were_not_recorded_cannot_be_borrowed(starts: tuple[float | None]) -> None:
    with pytest.raises(TraceError, match="some file: records no arrivals to borrow"):
        RecordedStarts.of(trace(*starts), 1.0)
