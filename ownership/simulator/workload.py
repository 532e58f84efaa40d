"""How a trace is sent: at which rate, with how much in common, with which seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from hetero_connector.errors import SimulationError, TraceError
from ownership.simulator.traces.bootstrap import bootstrap
from ownership.simulator.traces.session import Session, Trace
from ownership.simulator.traces.starts import PoissonStarts


@dataclass(frozen=True)
class Workload:
    """What of a trace is invented or changed."""

    rate: float | None = None
    """Sessions started per second; None: as recorded."""
    sharing: float | None = None
    """Share of each preamble that all sessions have in common, see `bootstrap`; None: sessions are
    not drawn but taken as they are, once each."""
    sessions: int | None = None
    """How many; None: as many as the trace has."""
    seed: int = 0

    def trace(self, recorded: Trace) -> Trace:
        """The trace to replay; every session of it has a start.

        Raises:
            SimulationError: no rate is given and none recorded, or one is and all start at once
                (then by the first session).
            TraceError: a number is out of its range, or the trace is bad.
        """
        if self.sessions is not None and self.sessions < 1:
            raise TraceError("workload", f"{self.sessions} is not above 0", field="sessions")
        if self.sharing is not None:
            number = self.sessions or sum(1 for _ in recorded)
            return bootstrap(
                recorded, num_sessions=number, starts=self._starts(recorded),
                shared_fraction=self.sharing, seed=self.seed,
            )  # fmt: skip
        if not recorded.starts_recorded:
            starts = self._starts(recorded)
            return replace(
                recorded,
                sessions=partial(_started, recorded, self.sessions, starts, self.seed),
                starts_recorded=True,
                caveats=(*recorded.caveats, f"Arrivals are invented: {starts.as_text()}."),
            )
        if self.rate is None:
            return replace(recorded, sessions=partial(_first, recorded, self.sessions))
        PoissonStarts(self.rate)  # says what is wrong with a rate
        return replace(
            recorded,
            sessions=partial(_at_rate, recorded, self.sessions, self.rate),
            caveats=(*recorded.caveats, f"Starts are scaled to {self.rate:g} sessions per second."),
        )

    def _starts(self, recorded: Trace) -> PoissonStarts:
        if self.rate is None:
            raise SimulationError(recorded.source, "no starts are recorded: give a rate", "rate")
        return PoissonStarts(self.rate)


def _first(recorded: Trace, number: int | None) -> Iterator[Session]:
    return islice(recorded, number)


def _started(
    recorded: Trace, number: int | None, starts: PoissonStarts, seed: int
) -> Iterator[Session]:
    """Sessions in file order, one at each start."""
    times = starts.starts_s(np.random.default_rng([seed, 2]))
    for session, start_s in zip(_first(recorded, number), times, strict=False):
        yield replace(session, start_s=start_s)


def _at_rate(recorded: Trace, number: int | None, rate: float) -> Iterator[Session]:
    """The recorded starts, stretched so that their mean rate is another."""
    starts = [s.start_s or 0.0 for s in _first(recorded, number)]
    factor = 1.0
    if len(starts) > 1:
        span_s = starts[-1] - starts[0]
        if not span_s:
            problem = f"all {len(starts)} sessions start at once: that is no rate to change"
            raise SimulationError(recorded.source, problem, "rate")
        factor = (len(starts) - 1) / rate / span_s
    for session, start_s in zip(_first(recorded, number), starts, strict=True):
        yield replace(session, start_s=start_s * factor)
