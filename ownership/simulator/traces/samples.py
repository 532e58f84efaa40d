"""Weighted samples and what is said about them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Samples:
    """Values in ascending order (`[n] float64`) and what each weighs."""

    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    @property
    def total(self) -> float:
        """What all weigh together; their number where each weighs 1."""
        return float(self.weights.sum())

    @property
    def mean(self) -> float:
        """Weighted; NaN where there is none."""
        return float(np.average(self.values, weights=self.weights)) if self.total else float("nan")

    def percentile(self, q: float) -> float:
        """The least value that at least `q` percent of the weight does not exceed; NaN if none."""
        if not self.total:
            return float("nan")
        sums = np.cumsum(self.weights)
        # Rounding must not push a limit that is met exactly past its value.
        reached = int(np.searchsorted(sums, sums[-1] * q / 100 * (1 - 1e-12)))
        return float(self.values[min(reached, len(sums) - 1)])

    def share_up_to(self, limit: float) -> float:
        """Part of the weight on values that do not exceed `limit`; NaN if there is none."""
        if not self.total:
            return float("nan")
        below = np.searchsorted(self.values, limit, side="right")
        return float(self.weights[:below].sum()) / self.total

    def as_json(self) -> dict[str, float | None]:
        """The figures of a table row; None where there is no sample."""
        figures = {"total": self.total, "mean": self.mean}
        figures |= {f"p{q}": self.percentile(q) for q in (10, 50, 90, 99, 100)}
        return {name: None if np.isnan(v) else round(v, 6) for name, v in figures.items()}


class Collector:
    """Gathers samples: 16 bytes each."""

    def __init__(self) -> None:
        self._values, self._weights = array("d"), array("d")

    def add(self, value: float, weight: float = 1.0) -> None:
        """One more sample."""
        self._values.append(value)
        self._weights.append(weight)

    def samples(self) -> Samples:
        """All of them, sorted."""
        values, weights = np.array(self._values), np.array(self._weights)
        order = np.argsort(values, kind="stable")
        return Samples(values[order], weights[order])
