"""Seconds that a request costs an engine beside the steps that compute it.

    front end: f0 + f1 n        scheduling: s0 + s1 n        for a prompt of n tokens

The *front end* takes a request in, names its blocks by their hashes and gives its answer out. A
server does that in threads and processes of its own: the request waits for it, the engine does
not. *Scheduling* is what the engine's own loop does once a request: look it up in the caches, plan
its restore, give out its pages. Whatever else runs there waits with it.

Both are the same for every way to serve a request, so the planner, which compares ways, does
without them; a simulator does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple


class OverheadSample(NamedTuple):
    """One prompt's seconds to its first token, on an engine with nothing else to do."""

    prompt_tokens: int
    frontend_s: float
    """Before the engine's loop had it, and after."""
    scheduling_s: float
    """In the loop, less what its steps were predicted to take: may be below 0."""


class RequestOverhead(NamedTuple):
    """The two sums' coefficients. All at least 0."""

    frontend_s: float = 0.0
    """f0: seconds per request."""
    frontend_token_s: float = 0.0
    """f1: seconds per prompt token."""
    scheduling_s: float = 0.0
    """s0: seconds per request."""
    scheduling_token_s: float = 0.0
    """s1: seconds per prompt token."""

    @classmethod
    def fitted(cls, samples: Sequence[OverheadSample]) -> RequestOverhead:
        """Of prompts of several lengths; none at all: no overhead."""
        tokens = [x.prompt_tokens for x in samples]
        return cls(
            *_line(tokens, [x.frontend_s for x in samples]),
            *_line(tokens, [x.scheduling_s for x in samples]),
        )

    def delay_s(self, prompt_tokens: int) -> float:
        """Seconds of the front end, beside the engine."""
        return self.frontend_s + prompt_tokens * self.frontend_token_s

    def blocking_s(self, prompt_tokens: int) -> float:
        """Seconds of the engine's own loop."""
        return self.scheduling_s + prompt_tokens * self.scheduling_token_s

    def total_s(self, prompt_tokens: int) -> float:
        """Seconds of both, by which the first token is later."""
        return self.delay_s(prompt_tokens) + self.blocking_s(prompt_tokens)

    def in_process(self) -> RequestOverhead:
        """The same for a front end on the engine's own thread, as `vllm.LLM` has it with
        `VLLM_ENABLE_V1_MULTIPROCESSING=0`: the engine waits for all of it."""
        return RequestOverhead(
            scheduling_s=self.frontend_s + self.scheduling_s,
            scheduling_token_s=self.frontend_token_s + self.scheduling_token_s,
        )


NO_OVERHEAD = RequestOverhead()
"""Where nothing was measured."""


class HandoffCost(NamedTuple):
    """Seconds that a prompt takes from the engine that prefills it to the one that decodes it,
    h0 + h1 n, beside both engines' own and the bytes': answering, whoever sends it on, and until
    the directory knows of it. All at least 0."""

    handoff_s: float = 0.0
    """h0: seconds per request."""
    handoff_token_s: float = 0.0
    """h1: seconds per prompt token."""

    @classmethod
    def fitted(cls, samples: Sequence[tuple[int, float]]) -> HandoffCost:
        """Of prompts of several lengths: tokens, and seconds more than all else says."""
        return cls(*_line([tokens for tokens, _ in samples], [s for _, s in samples]))

    def delay_s(self, prompt_tokens: int) -> float:
        """Seconds between the two engines."""
        return self.handoff_s + prompt_tokens * self.handoff_token_s


NO_HANDOFF = HandoffCost()
"""Prompts are there at once."""


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope by medians, so that a few samples which a busy machine held up do not
    show (P. K. Sen, Estimates of the Regression Coefficient Based on Kendall's Tau, 1968); both at
    least 0."""
    pairs = combinations(zip(x, y, strict=True), 2)
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in pairs if a != c]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    rest = [b - slope * a for a, b in zip(x, y, strict=True)]
    return max(0.0, median(rest)) if rest else 0.0, slope
