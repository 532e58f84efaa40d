"""Traces small enough to try every placement."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from ownership.simulator.traces.session import Session, Trace
from tests.ownership.simulator.small_fleets import prompt, trace_of


@st.composite
def few_requests(draw: st.DrawFn) -> Trace:
    """Three, some of which share their beginning or follow each other."""
    tokens = st.sampled_from([512, 2_048, 6_144, 12_288])
    starts = st.sampled_from([0.0, 0.05, 0.3])
    place = st.sampled_from([0, 1_000])
    first = prompt(draw(place), draw(tokens), output=draw(st.sampled_from([1, 30])))
    follower = replace(
        prompt(first.blocks.runs[0][0], first.input_tokens + draw(tokens), output=2),
        parent=0,
        think_s=draw(starts),
    )
    other = Session("b", (prompt(draw(place), draw(tokens)),), draw(starts))
    return trace_of(Session("a", (first, follower), 0.0), other)
