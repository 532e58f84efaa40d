"""What servers' company costs `benchmarks.faithful_pd`: learned from sessions that were played.

First tokens come later than both engines' steps say by the time of the handoff: HTTP three times,
the proxy, the prefiller's answer, and the directory until the decoder finds what it claims. Later
tokens come later because two servers, a proxy and a client share the cores that calibration had
for itself; an engine that has nothing to do looks for work for a second before it rests.
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
    """Sessions whose requests came one after the other."""

    trace: Trace
    real: Account
    free: Account
    """Simulated as if company cost nothing."""


def in_company(profile: CostProfile, played: Sequence[Played]) -> CostProfile:
    """The profile with what handoffs and decodes took more than it says."""
    delays = profile.interference
    assert delays is not None
    step_s = max(0.0, delays.step_s + decoding_late(played))
    return replace(
        profile, handoff=handoff_cost(played), interference=delays._replace(step_s=step_s)
    )


def decoding_late(played: Sequence[Played]) -> float:
    """Seconds by which tokens after the first came later than simulated; by session, the median."""
    late_s = []
    for trace, real, free in played:
        for number, session in enumerate(trace):
            tokens = sum(request.output_tokens - 1 for request in session.requests)
            if tokens:
                took_s, said_s = (_decoding_s(account, number) for account in (real, free))
                late_s.append((took_s - said_s) / tokens)
    return median(late_s)


def _decoding_s(account: Account, session: int) -> float:
    first_s = sum(s for (number, _), s in account.ttft_s.items() if number == session)
    return account.session_s[session] - first_s


def handoff_cost(played: Sequence[Played]) -> HandoffCost:
    """From first tokens: what they took, and what they would if the handoff were free."""
    samples: list[tuple[int, float]] = []
    for trace, real, free in played:
        sessions = list(trace)
        samples += [
            (sessions[session].requests[index].input_tokens, s - free.ttft_s[session, index])
            for (session, index), s in real.ttft_s.items()
        ]
    return HandoffCost.fitted(samples)
