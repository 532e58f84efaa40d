"""The cost of serving a request, in seconds: its terms, and the models that predict them.

`CostModel` bundles what a request costs an engine: computing (`compute_model`), loading
(`load_model`), and parts that are the same for every way in which one engine serves it, so that the
planner does not need them. A simulator does, and so does the price of a prompt that another engine
computes:

    front end: f0 + f1 n    scheduling: s0 + s1 n    handoff: h0 + h1 n    for n prompt tokens

The *front end* receives a request, hashes its blocks and sends its answer. A server does that in
threads and processes of its own: the request waits for it, the engine does not. *Scheduling* is
the work of the engine's own loop for each request: look it up in the caches, plan its restore,
allocate its pages. All other requests wait for that, too. A *handoff* brings a prompt from the
engine that computed it to the one that decodes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import NamedTuple

from hetero_connector.planner.compute_model import (
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.load_model import LoadModel


class CostTerms(NamedTuple):
    """Predicted seconds of one way to serve a request. The terms add up."""

    queue_s: float
    """Until the tokens scheduled ahead are computed."""
    load_s: float
    """Loading, as far as neither the queue nor the first step's compute hides it."""
    compute_s: float
    """Computing what is not restored."""
    stall_s: float
    """The price of delaying running decodes."""
    hbm_s: float
    """The price of the KV pages that the request occupies meanwhile."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token: without the prices of what others lose."""
        return self.queue_s + self.load_s + self.compute_s

    @property
    def total_s(self) -> float:
        """The sum, which the planner compares."""
        return sum(self)


class OverheadSample(NamedTuple):
    """The seconds of one prompt to its first token, on an otherwise idle engine."""

    prompt_tokens: int
    frontend_s: float
    """Seconds outside the engine's loop, before and after."""
    scheduling_s: float
    """Seconds in the loop, minus those predicted for its steps: may be below 0."""


class RequestOverhead(NamedTuple):
    """Coefficients of the front end and of scheduling, all at least 0; 0 unless measured."""

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


class HandoffCost(NamedTuple):
    """Coefficients of a handoff, at least 0; 0 unless measured.

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


@dataclass
class CostModel:
    """The models of compute, load and interference, which learn, and the figures of the rest."""

    compute: ComputeRegression
    load: LoadModel
    step_tokens: int = 0
    """Most tokens the engine computes in one step (vLLM's `max_num_batched_tokens`); 0: no
    limit, so everything in one step."""
    interference: InterferenceRegression = field(default_factory=InterferenceRegression)
    """Steps that decode, with and without a prefill. See `delays`."""
    overhead: RequestOverhead = field(default_factory=RequestOverhead)
    """The cost of a request besides its steps. Not used by the planner; a simulator adds it."""
    handoff: HandoffCost = field(default_factory=HandoffCost)
    """The additional cost of a prompt that another engine prefilled. Not used by the planner."""
    staging_delay_steps: float = 0.5
    """Wait of a staged request while the engine decodes, in decode steps: the end of staging is
    noticed between two steps, so half a step on average."""

    def delays(self) -> InterferenceCoefficients:
        """Return the interference coefficients, guessed from `compute` until one is measured.

        The planner takes the time of a decode step from them, a fleet's scheduler the rest.
        """
        if self.interference.is_measured():
            return self.interference.coefficients
        return InterferenceCoefficients.of_compute(self.compute.coefficients)

    def joining_s(self, prompt_tokens: int) -> float:
        """Seconds by which a request is later here because another engine prefilled it, without
        reading what that one computed: the handoff, and overhead for a second time."""
        return self.handoff.delay_s(prompt_tokens) + self.overhead.total_s(prompt_tokens)

    def num_steps(self, tokens: int) -> int:
        """The number of steps in which the engine computes `tokens`."""
        return math.ceil(tokens / self.step_tokens) if self.step_tokens else int(tokens > 0)

    def queue_s(self, queued_tokens: int) -> float:
        """Seconds until the queued tokens are computed.

        Their attention is left out: their contexts are not known.
        """
        step_s, token_s, _ = self.compute.coefficients
        return self.num_steps(queued_tokens) * step_s + queued_tokens * token_s


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
