"""How long an engine's steps take, by the planner's own coefficients."""

from __future__ import annotations

import math

from hetero_connector.planner.cost_model import CostModel


class StepTimes:
    """Durations of prefill, decode and mixed steps; decode steps many at a time."""

    def __init__(self, costs: CostModel) -> None:
        self._compute = costs.compute.coefficients
        self._delays = costs.delays()
        self.overhead = costs.overhead
        """Of each request, beside its steps."""

    def prefill_s(self, tokens: int, work: float) -> float:
        """A step without decodes; `work`: `attention_work` of its prefills."""
        step_s, token_s, attention_s = self._compute
        return step_s + token_s * tokens + attention_s * work

    def delay_s(self, tokens: int, work: float) -> float:
        """By how much a prefill makes a step of decodes longer."""
        return self._delays.delay_s(tokens, work, 1.0)

    def decode_s(self, decodes: int, context_tokens: int, steps: int = 1) -> float:
        """So many steps in a row: every decode's context grows by a token with each."""
        one_s = self._delays.decode_step_s(decodes, context_tokens)
        grown = self._delays.context_s * decodes * (steps * (steps - 1) / 2)
        return steps * one_s + grown

    def decode_steps_until(self, decodes: int, context_tokens: int, elapsed_s: float) -> int:
        """The fewest steps, at least 1, that take `elapsed_s` or longer. Undoes `decode_s`."""
        half_s = self._delays.context_s * decodes / 2
        one_s = self._delays.decode_step_s(decodes, context_tokens) - half_s
        if half_s > 0.0:
            root = math.sqrt(one_s * one_s + 4.0 * half_s * elapsed_s)
            steps = (root - one_s) / (2.0 * half_s)
        else:
            steps = elapsed_s / one_s if one_s > 0.0 else 1.0
        found = max(1, math.ceil(steps))
        if found > 1 and self.decode_s(decodes, context_tokens, found - 1) >= elapsed_s:
            found -= 1  # rounded up past an exact answer
        return found
