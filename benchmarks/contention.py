"""The cost of contention in `benchmarks.faithful_pd`, learned from sessions that were played.

First tokens come later than both engines' steps say, by the time of the handoff: HTTP three times,
the proxy, the prefiller's answer, and the directory until the decoder finds what was claimed. Later
tokens come later because two servers, a proxy and a client share the cores that calibration had
for itself; an idle engine looks for work for a second before it sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from benchmarks.accounts import Account
from hetero_connector.planner.cost_model import HandoffCost
from hetero_connector.planner.profile import CostProfile
from ownership.simulator.traces.session import Trace


class Played(NamedTuple):
    """Sessions whose requests were played one after the other."""

    trace: Trace
    real: Account
    free: Account
    """Simulated without contention."""


def with_contention(profile: CostProfile, played: Sequence[Played]) -> CostProfile:
    """Add to a profile what handoffs and decodes took longer than it says."""
    delays = profile.interference
    assert delays is not None
    step_s = max(0.0, delays.step_s + decoding_late(played))
    return replace(
        profile, handoff=handoff_cost(played), interference=delays._replace(step_s=step_s)
    )


def decoding_late(played: Sequence[Played]) -> float:
    """Return the seconds by which later tokens came late; the median over sessions."""
    late_s = []
    for trace, real, free in played:
        for number, session in enumerate(trace):
            tokens = sum(request.output_tokens - 1 for request in session.requests)
            if tokens:
                real_s, simulated_s = (_decoding_s(account, number) for account in (real, free))
                late_s.append((real_s - simulated_s) / tokens)
    return median(late_s)


def _decoding_s(account: Account, session: int) -> float:
    first_s = sum(s for (number, _), s in account.ttft_s.items() if number == session)
    return account.session_s[session] - first_s


def handoff_cost(played: Sequence[Played]) -> HandoffCost:
    """Fit the cost of a handoff: first tokens as they came, minus as simulated without it."""
    samples: list[tuple[int, float]] = []
    for trace, real, free in played:
        sessions = list(trace)
        samples += [
            (sessions[session].requests[index].input_tokens, s - free.ttft_s[session, index])
            for (session, index), s in real.ttft_s.items()
        ]
    return HandoffCost.fitted(samples)
