"""Seconds that a request costs an engine besides the steps that compute it.

    front end: f0 + f1 n        scheduling: s0 + s1 n        for a prompt of n tokens

The *front end* receives a request, hashes its blocks and sends its answer. A server does that in
threads and processes of its own: the request waits for it, the engine does not. *Scheduling* is
the work of the engine's own loop for each request: look it up in the caches, plan its restore,
allocate its pages. All other requests wait for that, too.

Both are the same for every way to serve a request, so the planner, which compares them, does not
need them; a simulator does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple


class OverheadSample(NamedTuple):
    """The seconds of one prompt to its first token, on an otherwise idle engine."""

    prompt_tokens: int
    frontend_s: float
    """Seconds outside the engine's loop, before and after."""
    scheduling_s: float
    """Seconds in the loop, minus those predicted for its steps: may be below 0."""


class RequestOverhead(NamedTuple):
    """Coefficients of both sums. All at least 0."""

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
        """Fit prompts of several lengths. Without samples there is no overhead."""
        tokens = [x.prompt_tokens for x in samples]
        return cls(
            *_line(tokens, [x.frontend_s for x in samples]),
            *_line(tokens, [x.scheduling_s for x in samples]),
        )

    def delay_s(self, prompt_tokens: int) -> float:
        """Seconds of the front end, in which the engine serves others."""
        return self.frontend_s + prompt_tokens * self.frontend_token_s

    def blocking_s(self, prompt_tokens: int) -> float:
        """Seconds of the engine's loop, in which all requests wait."""
        return self.scheduling_s + prompt_tokens * self.scheduling_token_s

    def total_s(self, prompt_tokens: int) -> float:
        """Seconds of both, which delay the first token."""
        return self.delay_s(prompt_tokens) + self.blocking_s(prompt_tokens)

    def in_process(self) -> RequestOverhead:
        """The overhead of an engine whose front end runs on the engine's own thread: all of it
        blocks. `vllm.LLM` with `VLLM_ENABLE_V1_MULTIPROCESSING=0` is such an engine."""
        return RequestOverhead(
            scheduling_s=self.frontend_s + self.scheduling_s,
            scheduling_token_s=self.frontend_token_s + self.scheduling_token_s,
        )


NO_OVERHEAD = RequestOverhead()
"""The overhead before it is measured."""


class HandoffCost(NamedTuple):
    """Coefficients of h0 + h1 n, the seconds of a handoff of n tokens. All at least 0.

    Handoff begins when the prefill ends and includes the answer, the router, and the time until
    the directory has the prompt's artifacts. Both engines' own seconds and the transfer of bytes
    are not part of it.
    """

    handoff_s: float = 0.0
    """h0: seconds per request."""
    handoff_token_s: float = 0.0
    """h1: seconds per prompt token."""

    @classmethod
    def fitted(cls, samples: Sequence[tuple[int, float]]) -> HandoffCost:
        """Fit (tokens, seconds not otherwise explained) of prompts of several lengths."""
        return cls(*_line([tokens for tokens, _ in samples], [s for _, s in samples]))

    def delay_s(self, prompt_tokens: int) -> float:
        """Seconds from one engine to the other."""
        return self.handoff_s + prompt_tokens * self.handoff_token_s


NO_HANDOFF = HandoffCost()
"""Handoffs take no time."""


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit the intercept and slope, both at least 0, of a line.

    Medians ignore the few samples that a busy machine delayed (P. K. Sen, Estimates of the
    Regression Coefficient Based on Kendall's Tau, 1968).
    """
    pairs = combinations(zip(x, y, strict=True), 2)
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in pairs if a != c]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    rest = [b - slope * a for a, b in zip(x, y, strict=True)]
    return max(0.0, median(rest)) if rest else 0.0, slope
