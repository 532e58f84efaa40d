"""The cost of serving a request, in seconds: its terms, and the models that predict them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from hetero_connector.planner.compute_model import (
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.request_overhead import (
    NO_HANDOFF,
    NO_OVERHEAD,
    HandoffCost,
    RequestOverhead,
)


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


@dataclass(frozen=True)
class CostWeights:
    """The price of other requests' time and of KV memory."""

    stall: float = 0.01
    """Seconds of cost for each second that one running decode is delayed."""
    hbm_s_per_gib_s: float = 0.001
    """lambda: seconds of cost for each GiB of KV pages occupied for a second."""

    def __post_init__(self) -> None:
        for weight in (self.stall, self.hbm_s_per_gib_s):
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"weights are finite and at least 0: {self}")


_REMEMBERED_WAITS = 31
_MAX_EXTRA_STEPS = 0.5
"""A longer wait has another cause: a full engine, for example."""


class StagingDelay:
    """Extra wait of a staged request while the engine decodes, in decode steps.

    Staging begins in one of the engine's steps, and its end is noticed between two steps. So a
    request waits for its staging, for half a step at least, and then for another half step on
    average. The step in which staging begins is longer than other decode steps (the request is
    planned in it, and the read shares cores and the interpreter), and the time between steps is
    part of no step: that extra is learned.
    """

    def __init__(self) -> None:
        self._observed = deque([0.0], _REMEMBERED_WAITS)
        self._extra_steps = 0.0

    def delay_s(self, step_s: float) -> float:
        """Average seconds from the end of a staging to the step that admits its request.

        `step_s`: seconds of a decode step. A staging shorter than half a step counts as that.
        """
        return step_s * (0.5 + self._extra_steps)

    def observe(self, staged_s: float, step_s: float, waited_s: float) -> None:
        """Learn that a request waited `waited_s` for a staging of `staged_s` while the engine
        only decoded, in steps of `step_s`."""
        if staged_s <= 0.0 or step_s <= 0.0:
            return
        expected_s = max(staged_s, step_s / 2) + step_s / 2
        extra = (waited_s - expected_s) / step_s
        self._observed.append(min(max(extra, -_MAX_EXTRA_STEPS), _MAX_EXTRA_STEPS))
        self._extra_steps = max(0.0, median(self._observed))


@dataclass
class CostModel:
    """The models of compute, load and interference, which learn, and the weights of the rest."""

    compute: ComputeRegression
    load: LoadModel
    weights: CostWeights = field(default_factory=CostWeights)
    step_tokens: int = 0
    """Most tokens the engine computes in one step (vLLM's `max_num_batched_tokens`); 0: no
    limit, so everything in one step."""
    interference: InterferenceRegression = field(default_factory=InterferenceRegression)
    """Delays of decodes by prefills. Not used by the planner; a fleet's scheduler asks `delays`."""
    overhead: RequestOverhead = NO_OVERHEAD
    """The cost of a request besides its steps. Not used by the planner; a simulator adds it."""
    handoff: HandoffCost = NO_HANDOFF
    """The additional cost of a prompt that another engine prefilled. For a simulator, too."""
    staging_delay: StagingDelay = field(default_factory=StagingDelay)

    def delays(self) -> InterferenceCoefficients:
        """Return the interference coefficients, guessed from `compute` until one is measured."""
        if self.interference.measured:
            return self.interference.coefficients
        return InterferenceCoefficients.of_compute(self.compute.coefficients)

    def learn_wait(self, decodes: int, staged_s: float, waited_s: float) -> None:
        """Learn that a request waited `waited_s` for its staging while `decodes` ran."""
        if decodes:
            step_s = self.delays().decode_step_s(decodes, 0.0)
            self.staging_delay.observe(staged_s, step_s, waited_s)

    def num_steps(self, tokens: int) -> int:
        """The number of steps in which the engine computes `tokens`."""
        return math.ceil(tokens / self.step_tokens) if self.step_tokens else int(tokens > 0)

    def queue_s(self, queued_tokens: int) -> float:
        """Seconds until the queued tokens are computed.

        Their attention is left out: their contexts are not known.
        """
        step_s, token_s, _ = self.compute.coefficients
        return self.num_steps(queued_tokens) * step_s + queued_tokens * token_s
