"""When sessions start: at random, or as they once did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hetero_connector.errors import TraceError
from ownership.simulator.traces.distributions import Distribution, as_text
from ownership.simulator.traces.session import Trace


class StartProcess(Protocol):
    """Where arrivals are invented."""

    def starts_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds since the trace's start, never falling, without end."""
        ...

    def as_text(self) -> str:
        """What is assumed, for a report."""
        ...


@dataclass(frozen=True)
class PoissonStarts:
    """Sessions start independently of each other."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def starts_s(self, rng: np.random.Generator) -> Iterator[float]:
        """The sums of exponential gaps."""
        time_s = 0.0
        while True:
            time_s += float(rng.exponential(1 / self.rate_per_s))
            yield time_s

    def as_text(self) -> str:
        """Its name and rate."""
        return f"Poisson, {self.rate_per_s:g} sessions per second"


@dataclass(frozen=True)
class RenewalStarts:
    """The gaps between starts are drawn from any distribution: burstier or steadier ones."""

    gap_s: Distribution

    def starts_s(self, rng: np.random.Generator) -> Iterator[float]:
        """The sums of the gaps."""
        time_s = 0.0
        while True:
            time_s += self.gap_s.sample(rng)
            yield time_s

    def as_text(self) -> str:
        """The distribution of the gaps."""
        return f"gaps of {as_text(self.gap_s)} seconds"


@dataclass(frozen=True)
class RecordedStarts:
    """The arrivals of another trace with their bursts, sped up or slowed down to a rate.

    After the last one they begin again.
    """

    source: str
    gaps_s: tuple[float, ...]
    rate_per_s: float

    @classmethod
    def of(cls, trace: Trace, rate_per_s: float) -> RecordedStarts:
        """The starts of a trace's sessions.

        Raises:
            TraceError: it does not record them, or all at one time.
        """
        _check_rate(rate_per_s)
        starts = [s.start_s for s in trace if s.start_s is not None]
        if not starts or starts[-1] == starts[0]:
            raise TraceError(trace.source, "records no arrivals to borrow")
        # A gap of the mean length between the last arrival and the first of the next round.
        gaps = np.append(np.diff(starts), (starts[-1] - starts[0]) / (len(starts) - 1))
        return cls(trace.source, tuple((gaps / gaps.mean() / rate_per_s).tolist()), rate_per_s)

    def starts_s(self, rng: np.random.Generator) -> Iterator[float]:
        """As recorded, from a place that is drawn."""
        time_s, place = 0.0, int(rng.integers(len(self.gaps_s)))
        while True:
            yield time_s
            time_s += self.gaps_s[place]
            place = (place + 1) % len(self.gaps_s)

    def as_text(self) -> str:
        """The source and the rate."""
        return f"as in {self.source}, scaled to {self.rate_per_s:g} sessions per second"


def _check_rate(rate_per_s: float) -> None:
    if not 0 < rate_per_s < float("inf"):
        problem = f"{rate_per_s!r} is not a number greater than 0"
        raise TraceError("arrivals", problem, field="rate_per_s")
