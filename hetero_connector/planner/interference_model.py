"""Seconds of an engine's step by what is in it: what a prefill does to the decodes beside it.

    T(step) = d0 + d1 B + d2 K + m [n > 0] + p1 n + p2 w

for B decodes over K context tokens together, and a prefill of n tokens and `attention_work` w.
A decode in the batch waits for the whole step, so a prefill delays it by m [n > 0] + p1 n + p2 w
in each step that it shares: the interference that DistServe (Zhong et al., OSDI 2024, section 2.3)
and Sarathi-Serve (Agrawal et al., OSDI 2024, section 3) measure. m is what any prefill costs a
batch of decodes, such as the full CUDA graph that it can no longer use.
"""

from __future__ import annotations

from typing import NamedTuple

from hetero_connector.planner.compute_model import SLOW_ENGINE, ComputeCoefficients
from hetero_connector.planner.least_squares import RelativeErrors, RobustLeastSquares


class StepMix(NamedTuple):
    """What one step of the engine computes."""

    prefill_tokens: float
    prefill_work: float
    """`attention_work` of the prefills, summed. Unit: tokens squared."""
    decodes: float
    """Requests that decode one token."""
    context_tokens: float
    """Tokens those decodes attend to, summed."""


class InterferenceCoefficients(NamedTuple):
    """The sum's coefficients. All at least 0."""

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
        """Before anything is measured: a decode costs what a prefilled token costs."""
        step_s, token_s, attention_s = compute
        return cls(step_s, token_s, attention_s, 0.0, token_s, attention_s)

    def delay_s(self, tokens: float, work: float, steps: float) -> float:
        """Seconds by which one running decode is late after a prefill of `steps` steps."""
        return steps * self.mixed_s + tokens * self.token_s + work * self.attention_s

    def decode_step_s(self, decodes: float, context_tokens: float) -> float:
        """Seconds of a step without a prefill."""
        return self.step_s + decodes * self.decode_s + context_tokens * self.context_s


_LEAST = InterferenceCoefficients(1e-4, 1e-6, 1e-10, 1e-4, 1e-7, 1e-12)
"""Where a guess says nothing: small, yet large enough for a fit to see what is there."""


class InterferenceRegression:
    """The coefficients, fitted to the engine's own steps as they come. Not thread-safe."""

    def __init__(
        self,
        profile: InterferenceCoefficients | None = None,
        compute: ComputeCoefficients = SLOW_ENGINE,
    ) -> None:
        """`profile`: measured earlier, to start from; else a guess from `compute`."""
        guess = InterferenceCoefficients.of_compute(compute)
        self._known = profile is not None
        self._fit = RobustLeastSquares(list(map(max, guess, _LEAST)), profile)

    @property
    def coefficients(self) -> InterferenceCoefficients:
        """The fit so far."""
        return InterferenceCoefficients(*self._fit.coefficients)

    @property
    def samples(self) -> int:
        """Steps observed."""
        return self._fit.samples

    @property
    def measured(self) -> bool:
        """Whether the coefficients come from any step, of this engine or of a profile's."""
        return self._known or self.samples > 0

    @property
    def errors(self) -> RelativeErrors:
        """Errors of steps, each predicted before it was learned from."""
        return self._fit.errors

    def predict(self, mix: StepMix) -> float:
        """Seconds of one step."""
        return self._fit.predict(_features(mix))

    def observe(self, mix: StepMix, seconds: float) -> None:
        """Learn from one step. Without effect unless it computed anything in finite time."""
        if mix.prefill_tokens > 0 or mix.decodes > 0:
            self._fit.observe(_features(mix), seconds, _size_class(mix))


def _features(mix: StepMix) -> tuple[float, ...]:
    tokens, work, decodes, context_tokens = mix
    return (1.0, decodes, context_tokens, float(tokens > 0), tokens, work)


def _size_class(mix: StepMix) -> int:
    """Many decode-only steps must not wash out what few prefills have taught."""
    prefill = int(mix.prefill_tokens).bit_length() // 3  # 0, 1-3, 4-31, 32-255, ...
    return 16 * prefill + int(mix.decodes).bit_length() // 2
