"""What a restore costs, in seconds: the terms and the models behind them.

How long a request whose load is staged waits while others decode.

Staging begins with one of their steps and is looked for between two of them. The step in which it
begins is longer than a decode step is on its own (the request is planned in it, and the read shares
the interpreter and the cores), and what an engine does between steps is in the time of none: how
much that is, is learned.
"""

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
    """Predicted seconds of one way to serve a request. They add up."""

    queue_s: float
    """Until the tokens scheduled ahead are computed."""
    load_s: float
    """What loading adds: what neither the queue nor the first step's compute hides."""
    compute_s: float
    """Computing what is not restored."""
    stall_s: float
    """Price of holding up running decodes."""
    hbm_s: float
    """Price of the KV pages held meanwhile."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token: without the prices that others pay."""
        return self.queue_s + self.load_s + self.compute_s

    @property
    def total_s(self) -> float:
        """What the planner compares."""
        return sum(self)


@dataclass(frozen=True)
class CostWeights:
    """What a second of others' time and of KV memory is worth."""

    stall: float = 0.01
    """Seconds of cost for each second that one running decode is held up."""
    hbm_s_per_gib_s: float = 0.001
    """lambda: seconds of cost for each GiB of KV pages held for a second."""

    def __post_init__(self) -> None:
        for weight in (self.stall, self.hbm_s_per_gib_s):
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"weights are finite and at least 0: {self}")


_REMEMBERED = 31
_MOST_STEPS = 0.5
"""Of longer waits the engine was full, or something else came between."""


class StagingDelay:
    """Seconds from the beginning of a staging to the step that admits its request."""

    def __init__(self) -> None:
        self._extra_steps = deque([0.0], _REMEMBERED)
        self._extra = 0.0

    def delay_s(self, step_s: float) -> float:
        """What the wait is longer than the staging, on average, where decodes take steps of
        `step_s`. It is never less than half a step and this."""
        return step_s * (0.5 + self._extra)

    def observe(self, staged_s: float, step_s: float, waited_s: float) -> None:
        """A request waited `waited_s` for a staging of `staged_s`, beside nothing but decodes."""
        if staged_s <= 0.0 or step_s <= 0.0:
            return
        expected_s = max(staged_s, step_s / 2) + step_s / 2
        extra = (waited_s - expected_s) / step_s
        self._extra_steps.append(min(max(extra, -_MOST_STEPS), _MOST_STEPS))
        self._extra = max(0.0, median(self._extra_steps))


@dataclass
class CostModel:
    """Compute, load and interference, learned as they happen, and the weights of the rest."""

    compute: ComputeRegression
    load: LoadModel
    weights: CostWeights = field(default_factory=CostWeights)
    step_tokens: int = 0
    """Tokens the engine computes in one step at most (vLLM's `max_num_batched_tokens`);
    0: everything in one step."""
    interference: InterferenceRegression = field(default_factory=InterferenceRegression)
    """What a prefill does to the decodes beside it. The planner does without; a fleet's
    scheduler asks, by `delays`."""
    overhead: RequestOverhead = NO_OVERHEAD
    """Of each request, beside its steps. The planner does without; a simulator charges it."""
    handoff: HandoffCost = NO_HANDOFF
    """The same of prompts that come from an engine which prefilled them."""
    staging_delay: StagingDelay = field(default_factory=StagingDelay)
    """What a staged request waits beside decodes."""

    def delays(self) -> InterferenceCoefficients:
        """What is known of interference; guessed from `compute` before anything is measured."""
        if self.interference.measured:
            return self.interference.coefficients
        return InterferenceCoefficients.of_compute(self.compute.coefficients)

    def learn_wait(self, decodes: int, staged_s: float, waited_s: float) -> None:
        """A request waited so long for its staging, beside so many that decoded."""
        if decodes:
            step_s = self.delays().decode_step_s(decodes, 0.0)
            self.staging_delay.observe(staged_s, step_s, waited_s)

    def num_steps(self, tokens: int) -> int:
        """Steps in which the engine computes so many tokens."""
        return math.ceil(tokens / self.step_tokens) if self.step_tokens else int(tokens > 0)

    def queue_s(self, queued_tokens: int) -> float:
        """Seconds until the tokens scheduled ahead are computed.

        Their attention is left out: nothing is known of their contexts.
        """
        step_s, token_s, _ = self.compute.coefficients
        return self.num_steps(queued_tokens) * step_s + queued_tokens * token_s
