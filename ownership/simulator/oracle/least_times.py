"""The least that steps take: the best coefficients of a fleet's workers."""

from __future__ import annotations

from typing import NamedTuple

from ownership.simulator.fleet_file import FleetSpec


class LeastTimes(NamedTuple):
    """Each the least of all workers'; seconds. The letters are those of `bound`'s docstring."""

    step_s: float
    """Of a step with a prefill, whatever is in it: c0 or d0 + m."""
    token_s: float
    attention_s: float
    empty_s: float
    """Of a step of decodes, whatever is in it: d0."""
    decode_s: float
    """A decode adds, d1, and for every token of its context, d2:"""
    context_s: float
    step_tokens: int

    @classmethod
    def of(cls, fleet: FleetSpec) -> LeastTimes:
        """Of a fleet's workers."""
        found = []
        for worker in fleet.workers:
            compute, delays = worker.costs.compute.coefficients, worker.costs.delays()
            found.append(
                (
                    min(compute.step_s, delays.step_s + delays.mixed_s),
                    min(compute.token_s, delays.token_s),
                    min(compute.attention_s, delays.attention_s),
                    delays.step_s,
                    delays.decode_s,
                    delays.context_s,
                )
            )
        step_s, token_s, attention_s, empty_s, decode_s, context_s = map(
            min, zip(*found, strict=True)
        )
        limit = fleet.limits.step_tokens
        return cls(step_s, token_s, attention_s, empty_s, decode_s, context_s, limit)

    def prefill_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Seconds of computing all of a prompt but its first tokens."""
        steps = -(-(prompt_tokens - reused_tokens) // self.step_tokens)
        return steps * self.step_s + self.prefill_work_s(prompt_tokens, reused_tokens)

    def prefill_work_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """The same but for what every step costs: what it takes of a step that others share."""
        tokens = prompt_tokens - reused_tokens
        work = tokens * (reused_tokens + tokens / 2)
        return tokens * self.token_s + work * self.attention_s

    def decode_work_s(self, context_tokens: int) -> float:
        """By how much a decode makes a step longer."""
        return self.decode_s + context_tokens * self.context_s

    def again_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Seconds until a preempted request has its next token.

        `cached_tokens`: of the prompt, as many as it finds at most.
        """
        return self.empty_s + self.prefill_s(prompt_tokens + 1, cached_tokens)

    def decoding_s(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> float:
        """Seconds from the first token of an answer to its last; `cached_tokens` as above."""
        again_s = self.again_s(prompt_tokens, cached_tokens)
        first_s = self.empty_s + self.decode_work_s(prompt_tokens)
        steps = output_tokens - 1
        decodes = 0 if first_s > again_s else steps
        if self.context_s:  # each is longer than the one before it
            decodes = min(decodes, 1 + int(max(0.0, again_s - first_s) / self.context_s))
        grown = decodes * (decodes - 1) / 2
        return decodes * first_s + grown * self.context_s + (steps - decodes) * again_s
