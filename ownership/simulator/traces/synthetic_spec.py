"""What made-up agent sessions are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hetero_connector.errors import TraceError
from ownership.simulator.traces.distributions import (
    Constant,
    Distribution,
    Geometric,
    LogNormal,
    as_text,
    parse_distribution,
)

_WHOLE = {"num_preambles": (1, 1e6), "context_tokens": (2, 1e12)}
"""Parameters that are numbers, and their ranges; the others are distributions."""
_FRACTIONAL = {"preamble_skew": (0, 100), "tool_fraction": (0, 1), "fork_fraction": (0, 1)}


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """Every distribution of `synthetic`. Lengths are tokens; draws are rounded, and at least 1."""

    num_preambles: int
    """Different tools and system prompts; each session begins with one of them."""
    preamble_skew: float
    """Zipf's exponent of how often each is drawn; 0: all alike."""
    preamble_tokens: Distribution
    first_tokens: Distribution
    """Of the first prompt, behind the preamble."""
    turns: Distribution
    """Requests of a session, those of forks not counted."""
    tool_fraction: float
    """Part of the turns that answer a tool; the others answer a person."""
    tool_tokens: Distribution
    """What a tool's turn adds to the prompt, beside the answer before it."""
    user_tokens: Distribution
    output_tokens: Distribution
    tool_latency_s: Distribution
    think_s: Distribution
    """What a person takes."""
    answer_s: Distribution
    """What the imagined server takes; decides the offsets, which a closed loop ignores."""
    fork_fraction: float
    """Part of the turns whose answer more than one request continues."""
    fork_width: Distribution
    """Further requests that continue it, beside the session's own next turn."""
    fork_turns: Distribution
    """Length of each such branch."""
    context_tokens: int
    """A prompt that would be longer is compacted: what follows its preamble is replaced."""
    summary_tokens: Distribution
    """By so much."""

    def __post_init__(self) -> None:
        for name, (least, most) in (_WHOLE | _FRACTIONAL).items():
            value = getattr(self, name)
            if not least <= value <= most:
                problem = f"{value!r} is not between {least:g} and {most:g}"
                raise TraceError("synthetic", problem, field=name)

    def replaced(self, values: Mapping[str, str | float]) -> SyntheticSpec:
        """With other values for some names, as a file or a command line has them.

        Raises:
            TraceError: a name is unknown, or its value is not what it takes; names it.
        """
        made: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if name not in made:
                problem = f"unknown; there are {', '.join(made)}"
                raise TraceError("synthetic", problem, field=name)
            if name in _WHOLE or name in _FRACTIONAL:
                made[name] = _number(name, value, whole=name in _WHOLE)
            else:
                made[name] = parse_distribution(str(value), name)
        return SyntheticSpec(**made)

    def as_mapping(self) -> dict[str, str | float]:
        """Every parameter, as `replaced` takes it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: v if isinstance(v, int | float) else as_text(v) for n, v in values.items()}


def _number(name: str, value: str | float, *, whole: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (whole and number != int(number)):
        problem = f"{value!r} is not a {'whole ' if whole else ''}number"
        raise TraceError("synthetic", problem, field=name)
    return int(number) if whole else number


CODING_AGENT = SyntheticSpec(
    num_preambles=8,
    preamble_skew=1.0,
    preamble_tokens=LogNormal(15_000, 20_000),
    first_tokens=LogNormal(7_000, 240_000),
    turns=Geometric(60),
    tool_fraction=0.85,
    tool_tokens=LogNormal(300, 3_300),
    user_tokens=LogNormal(300, 3_300),
    output_tokens=LogNormal(216, 875),
    tool_latency_s=LogNormal(8, 68),
    think_s=LogNormal(103, 1_549),
    answer_s=LogNormal(8, 25),
    fork_fraction=0.0,
    fork_width=Constant(4),
    fork_turns=Geometric(3),
    context_tokens=200_000,
    summary_tokens=LogNormal(7_000, 20_000),
)
"""After the published coding-agent sessions (see `agent_sessions`): where `heterocache trace
stats` says p50 and p90 of a thing, those; the number of preambles, how often each is drawn, forks
and compaction are invented."""
