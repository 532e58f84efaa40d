"""Seconds that the engine computes, fitted to its own steps as they come.

`ComputeRegression` predicts the prefill of a step. For n new tokens over a context:

    T(new, context) = c0 + c1 n + c2 n (context + n / 2)

c0 is the cost of any step, c1 n the work that grows with the new tokens (projections, MLP), c2 the
attention of n new tokens over the context and over each other: the i-th sees context + i states,
n (context + n / 2) together. It is the prefill-time regression of KV-centric schedulers (Mooncake,
Qin et al. 2024; DistServe, Zhong et al. 2024, appendix A). The last term adds up exactly over the
steps of a chunked prefill; only c0 is paid per step.

`InterferenceRegression` predicts steps that also decode:

    T(step) = d0 + d1 B + d2 K + m [n > 0] + p1 n + p2 w

for B decodes over K context tokens together, and a prefill of n tokens and `attention_work` w.
A decode in the batch waits for the whole step, so a prefill delays it by m [n > 0] + p1 n + p2 w
in each step that it shares: the interference that DistServe (Zhong et al., OSDI 2024, section 2.3)
and Sarathi-Serve (Agrawal et al., OSDI 2024, section 3) measure. m is the fixed cost of any prefill
in a batch of decodes, such as the full CUDA graph that the batch can no longer use.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_connector.planner.cost_fit import RelativeErrors, RobustLeastSquares

Tokens = TypeVar("Tokens", float, NDArray[np.float64])
"""A number of tokens, or `[n] float64` of them."""


def attention_work(new_tokens: Tokens, context_tokens: Tokens) -> Tokens:
    """Pairs of a new token and a token it attends to. Unit: tokens squared."""
    return new_tokens * (context_tokens + new_tokens / 2)


class ComputeCoefficients(NamedTuple):
    """Coefficients of T(new, context). All at least 0."""

    step_s: float
    """c0: seconds per step."""
    token_s: float
    """c1: seconds per new token."""
    attention_s: float
    """c2: seconds per token squared of `attention_work`."""

    def prompt_s(self, new_tokens: int, context_tokens: int, num_steps: int = 1) -> float:
        """Seconds of a prompt's last `new_tokens`, computed in `num_steps`."""
        work = attention_work(float(new_tokens), float(context_tokens))
        return num_steps * self.step_s + new_tokens * self.token_s + work * self.attention_s


SLOW_ENGINE = ComputeCoefficients(5e-3, 1e-4, 1e-9)
"""In force before the first step: 10,000 tokens a second, attention as costly at a context of
100,000. Pessimistic, so that a restore is tried and loading can be learned."""


class ComputeRegression:
    """Learns T(new, context). Not thread-safe."""

    def __init__(self, profile: ComputeCoefficients | None = None) -> None:
        """`profile`: coefficients measured earlier, to start from."""
        self._known = profile is not None
        self._fit = RobustLeastSquares(SLOW_ENGINE, profile)
        self.coefficients = ComputeCoefficients(*self._fit.coefficients)
        """The present fit."""

    @property
    def samples(self) -> int:
        """Steps observed."""
        return self._fit.samples

    @property
    def errors(self) -> RelativeErrors:
        """Errors of steps, each predicted before it was learned from."""
        return self._fit.errors

    def is_measured(self, min_samples: int = 1) -> bool:
        """True if the coefficients come from a profile, or from so many steps of this engine."""
        return self._known or self.samples >= min_samples

    def observe(self, new_tokens: float, context_tokens: float, seconds: float) -> None:
        """Learn from a step that computed one request."""
        self.observe_work(new_tokens, attention_work(new_tokens, context_tokens), seconds)

    def observe_work(self, new_tokens: float, work: float, seconds: float) -> None:
        """Learn from the prefills of a step; tokens and `attention_work` are summed over them.

        `seconds`: of the step, less what its decodes added. Without effect unless tokens and
        seconds are above 0 and finite.
        """
        if new_tokens > 0:
            size_class = int(new_tokens).bit_length() // 3  # 1-3, 4-31, 32-255, 256-2047, ...
            self._fit.observe((1.0, new_tokens, work), seconds, size_class)
            self.coefficients = ComputeCoefficients(*self._fit.coefficients)

    def predict(self, new_tokens: Tokens, context_tokens: Tokens) -> Tokens:
        """Seconds, at least 0, of one step of `new_tokens`, above 0, over `context_tokens`.

        Both may be arrays of one shape.
        """
        step_s, token_s, attention_s = self.coefficients
        return (
            step_s + token_s * new_tokens + attention_s * attention_work(new_tokens, context_tokens)
        )


class StepMix(NamedTuple):
    """The work of one engine step."""

    prefill_tokens: float
    prefill_work: float
    """`attention_work` of the prefills, summed. Unit: tokens squared."""
    decodes: float
    """Requests that decode one token."""
    context_tokens: float
    """Tokens those decodes attend to, summed."""


class InterferenceCoefficients(NamedTuple):
    """Coefficients of T(step). All at least 0."""

    step_s: float
    """d0: seconds of a step."""
    decode_s: float
    """d1: seconds per decode."""
    context_s: float
    """d2: seconds per context token of a decode."""
    mixed_s: float
    """m: seconds that any prefill adds."""
    token_s: float
    """p1: seconds per prefilled token."""
    attention_s: float
    """p2: seconds per token squared of `attention_work`."""

    @classmethod
    def of_compute(cls, compute: ComputeCoefficients) -> InterferenceCoefficients:
        """Guess, before anything is measured, that a decode costs what a prefilled token costs."""
        step_s, token_s, attention_s = compute
        return cls(step_s, token_s, attention_s, 0.0, token_s, attention_s)

    def delay_s(self, tokens: float, work: float, steps: float) -> float:
        """Seconds by which a prefill of `steps` steps delays one running decode."""
        return steps * self.mixed_s + tokens * self.token_s + work * self.attention_s

    def decode_step_s(self, decodes: float, context_tokens: float) -> float:
        """Seconds of a step without a prefill."""
        return self.step_s + decodes * self.decode_s + context_tokens * self.context_s


_LEAST = InterferenceCoefficients(1e-4, 1e-6, 1e-10, 1e-4, 1e-7, 1e-12)
"""Used where a guess is 0: small, yet large enough for a fit to start from."""


class InterferenceRegression:
    """Learns T(step). Not thread-safe."""

    def __init__(
        self,
        profile: InterferenceCoefficients | None = None,
        compute: ComputeCoefficients = SLOW_ENGINE,
    ) -> None:
        """`profile`: coefficients measured earlier, to start from; else guessed from `compute`."""
        guess = InterferenceCoefficients.of_compute(compute)
        self._known = profile is not None
        self._fit = RobustLeastSquares(list(map(max, guess, _LEAST)), profile)

    @property
    def coefficients(self) -> InterferenceCoefficients:
        """The present fit."""
        return InterferenceCoefficients(*self._fit.coefficients)

    @property
    def samples(self) -> int:
        """Steps observed."""
        return self._fit.samples

    @property
    def errors(self) -> RelativeErrors:
        """Errors of steps, each predicted before it was learned from."""
        return self._fit.errors

    def is_measured(self, min_samples: int = 1) -> bool:
        """True if the coefficients come from a profile, or from so many steps of this engine."""
        return self._known or self.samples >= min_samples

    def predict(self, mix: StepMix) -> float:
        """Seconds of one step."""
        return self._fit.predict(_features(mix))

    def observe(self, mix: StepMix, seconds: float) -> None:
        """Learn from one step. Without effect on a step that computed nothing, and unless
        `seconds` is finite and above 0."""
        if mix.prefill_tokens > 0 or mix.decodes > 0:
            self._fit.observe(_features(mix), seconds, _size_class(mix))


def _features(mix: StepMix) -> tuple[float, ...]:
    tokens, work, decodes, context_tokens = mix
    return (1.0, decodes, context_tokens, float(tokens > 0), tokens, work)


def _size_class(mix: StepMix) -> int:
    # Many decode-only steps must not wash out what few prefills have taught.
    prefill = int(mix.prefill_tokens).bit_length() // 3  # 0, 1-3, 4-31, 32-255, ...
    return 16 * prefill + int(mix.decodes).bit_length() // 2
