"""Seconds the engine computes: T(new, context) = c0 + c1 n + c2 n (context + n / 2) a step.

c0 is what every step costs, c1 n the work that grows with the new tokens (projections, MLP),
c2 the attention of n new tokens over the context and over each other: their i-th sees
context + i states, n (context + n / 2) together. It is the prefill-time regression of
KV-centric schedulers (Mooncake, Qin et al. 2024; DistServe, Zhong et al. 2024, appendix A).
The last term adds up exactly over the steps of a chunked prefill; only c0 is paid per step.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_connector.planner.least_squares import RelativeErrors, RobustLeastSquares
from hetero_connector.planner.pace import SpeedFactor

Tokens = TypeVar("Tokens", float, NDArray[np.float64])
"""A number of tokens, or `[n] float64` of them."""


def attention_work(new_tokens: Tokens, context_tokens: Tokens) -> Tokens:
    """Pairs of a new token and a token it attends to. Unit: tokens squared."""
    return new_tokens * (context_tokens + new_tokens / 2)


class ComputeCoefficients(NamedTuple):
    """The polynomial. All at least 0."""

    step_s: float
    """c0: seconds per step."""
    token_s: float
    """c1: seconds per new token."""
    attention_s: float
    """c2: seconds per token squared of `attention_work`."""

    def prompt_s(self, new_tokens: int, context_tokens: int, num_steps: int = 1) -> float:
        """Seconds of a prompt's last `new_tokens`, computed in so many steps."""
        work = attention_work(float(new_tokens), float(context_tokens))
        return num_steps * self.step_s + new_tokens * self.token_s + work * self.attention_s


SLOW_ENGINE = ComputeCoefficients(5e-3, 1e-4, 1e-9)
"""In force before the first step is seen: 10,000 tokens a second, attention as costly at a
context of 100,000. Rather slow, so that a restore is tried and loading can be learned."""


_PACED_FROM = 16
"""Steps before which a surprise is the coefficients' fault."""


class ComputeRegression:
    """The polynomial, fitted to the engine's own steps as they come. Not thread-safe."""

    def __init__(self, profile: ComputeCoefficients | None = None) -> None:
        """`profile`: coefficients measured earlier, to start from."""
        self._fit = RobustLeastSquares(SLOW_ENGINE, profile)
        self._pace = SpeedFactor()
        self.coefficients = self._at_present()
        """The fit so far, at the present pace."""
        self.errors = RelativeErrors()
        """Errors of steps, each predicted before it was learned from."""

    @property
    def as_a_rule(self) -> ComputeCoefficients:
        """The fit so far, whatever the present pace: what stands for longer than seconds."""
        return ComputeCoefficients(*self._fit.coefficients)

    @property
    def samples(self) -> int:
        """Steps observed."""
        return self._fit.samples

    def observe(self, new_tokens: float, context_tokens: float, seconds: float) -> None:
        """Learn from a step that computed one request; see `observe_work` for a mixed one."""
        self.observe_work(new_tokens, attention_work(new_tokens, context_tokens), seconds)

    def observe_work(self, new_tokens: float, work: float, seconds: float) -> None:
        """Learn from a step: its new tokens and `attention_work`, each summed over requests.

        Without effect unless tokens and seconds are above 0 and finite.
        """
        if new_tokens > 0:
            size_class = int(new_tokens).bit_length() // 3  # 1-3, 4-31, 32-255, 256-2047, ...
            row = (1.0, new_tokens, work)
            fitted_s = self._fit.predict(row)
            if 0.0 < seconds < math.inf:
                self.errors.add(self._pace.factor * fitted_s, seconds)
                if self.samples >= _PACED_FROM and fitted_s > 0.0:
                    self._pace.follow(seconds / fitted_s, size_class)
            self._fit.observe(row, seconds, size_class)
            self.coefficients = self._at_present()

    def predict(self, new_tokens: Tokens, context_tokens: Tokens) -> Tokens:
        """Seconds of one step of `new_tokens` (above 0) over `context_tokens`; at least 0.

        Takes numbers or arrays of them.
        """
        step_s, token_s, attention_s = self.coefficients
        return (
            step_s + token_s * new_tokens + attention_s * attention_work(new_tokens, context_tokens)
        )

    def _at_present(self) -> ComputeCoefficients:
        factor = self._pace.factor
        step_s, token_s, attention_s = self._fit.coefficients
        return ComputeCoefficients(factor * step_s, factor * token_s, factor * attention_s)
