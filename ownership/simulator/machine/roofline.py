"""Seconds of an engine's steps by the figures of its accelerators: a roofline of each kind of work.

A step of n tokens, prefilled and decoded together, takes

    launch + max(weights read, operations of n tokens) + exchange of n tokens
           + operations of pairs of tokens (prefills) + contexts read (decodes)

Kernels run one after the other, so of each kind the slower side counts, and kinds are added. A step
reads all weights that its tokens use: with n tokens, each of which uses a share s of them at
random, 1 - (1 - s)^n. So a decode alone reads few experts, and a large batch all of them.

The planner's models are lines. `Roofline.lines` fits them, as an engine that learned from such
steps would: policies see these lines, the simulated engine takes the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_connector.planner.compute_model import ComputeCoefficients, InterferenceCoefficients
from hetero_connector.planner.cost_model import CostModel
from ownership.simulator.machine.engine import StepTimes

_Floats = NDArray[np.float64]
_CHUNKS, _MOST_DECODES = 32, 64


@dataclass(frozen=True)
class Roofline:
    """Seconds of one engine's work."""

    launch_s: float
    """A step, whatever is in it."""
    weights_s: float
    """Reading all weights."""
    used_share: float
    """Share of the weights that one token uses."""
    token_s: float
    """Operations of a token."""
    exchange_s: float
    """Exchange between accelerators, per token."""
    pair_s: float
    """Operations for a pair of a prefilled token and one that it attends to."""
    context_s: float
    """Reading the state of a context token."""

    def products_s(self, tokens: float) -> float:
        """Return the seconds of the matrix products of so many tokens, and their exchange."""
        read_s = self.weights_s * (1.0 - (1.0 - self.used_share) ** tokens)
        return float(max(read_s, tokens * self.token_s) + tokens * self.exchange_s)

    def lines(self, step_tokens: int) -> tuple[ComputeCoefficients, InterferenceCoefficients]:
        """Return the lines of least relative error, for prefills alone, decodes, and delays.

        Over chunks of all sizes up to `step_tokens`, and up to 64 decodes.
        """
        chunks = np.linspace(step_tokens / _CHUNKS, step_tokens, _CHUNKS)
        batches = np.geomspace(1.0, _MOST_DECODES, 13)
        alone_s = np.array([self.launch_s + self.products_s(x) for x in chunks])
        step_s, token_s = _line(chunks, alone_s, alone_s)
        batch_s = np.array([self.launch_s + self.products_s(x) for x in batches])
        decode_step_s, decode_s = _line(batches, batch_s, batch_s)
        mixed = np.array([[n, self.products_s(n + b), self.products_s(b)]
                          for n in chunks for b in batches])  # fmt: skip
        late_s, whole_s = mixed[:, 1] - mixed[:, 2], self.launch_s + mixed[:, 1]
        mixed_s, delay_s = _line(mixed[:, 0], late_s, whole_s)
        return ComputeCoefficients(step_s, token_s, self.pair_s), InterferenceCoefficients(
            decode_step_s, decode_s, self.context_s, mixed_s, delay_s, self.pair_s
        )


class RooflineTimes(StepTimes):
    """The step times of a roofline."""

    def __init__(self, costs: CostModel, roofline: Roofline) -> None:
        super().__init__(costs)
        self._roofline, self._launch_s = roofline, roofline.launch_s

    def prefill_s(self, tokens: int, work: float) -> float:
        roofline = self._roofline
        return roofline.launch_s + roofline.products_s(tokens) + work * roofline.pair_s

    def delay_s(self, tokens: int, work: float, decodes: int) -> float:
        roofline = self._roofline
        late_s = roofline.products_s(tokens + decodes) - roofline.products_s(decodes)
        return late_s + work * roofline.pair_s

    def decode_step_s(self, decodes: int, context_tokens: float) -> float:
        roofline = self._roofline
        seconds = roofline.launch_s + roofline.products_s(decodes)
        return seconds + context_tokens * roofline.context_s


def _line(x: _Floats, seconds: _Floats, of_s: _Floats) -> tuple[float, float]:
    """Return intercept and slope, both at least 0, of the least errors relative to `of_s`."""
    rows = np.stack((1.0 / of_s, x / of_s), axis=1)
    intercept, slope = np.linalg.lstsq(rows, seconds / of_s, rcond=None)[0].tolist()
    if intercept < 0.0:
        intercept, slope = 0.0, float((x / of_s) @ (seconds / of_s) / ((x / of_s) @ (x / of_s)))
    return intercept, max(0.0, slope)
