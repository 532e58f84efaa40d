"""Predicted times to first token against the observed ones, by action and by worker."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ownership.decisions.records import DecisionRecord

ALL = ("", "")
_QUANTILES = (10, 50, 90)


class Accuracy(NamedTuple):
    """Predictions of one kind of decisions, in seconds."""

    kind: str
    """`action`, `worker`, or "" for all."""
    name: str
    decisions: int
    predicted_p50_s: float
    observed_p50_s: float
    error_s: tuple[float, float, float]
    """Observed minus predicted: the 10th, 50th and 90th percentile."""
    ratio: tuple[float, float, float]
    """Observed over predicted, the same percentiles."""


class Predictions:
    """Collects decisions: 16 bytes for each in each of its groups."""

    def __init__(self) -> None:
        self._pairs: Mapping[tuple[str, str], tuple[array[float], array[float]]]
        self._pairs = defaultdict(lambda: (array("d"), array("d")))
        self.unobserved = 0
        """Decisions whose first token was not seen: failed, or answered whole."""

    def add(self, record: DecisionRecord) -> None:
        """Count a decision."""
        predicted_s, observed_s = record.predicted_ttft_s, record.ttft_s
        if predicted_s is None or observed_s is None:
            self.unobserved += 1
            return
        for group in (ALL, ("action", record.action.value), ("worker", record.worker)):
            predicted, observed = self._pairs[group]
            predicted.append(predicted_s)
            observed.append(observed_s)

    def rows(self) -> Iterator[Accuracy]:
        """Yield all, then each action, then each worker."""
        for (kind, name), (predicted, observed) in sorted(self._pairs.items()):
            told, seen = np.array(predicted), np.array(observed)
            ratios = seen / np.maximum(told, 1e-9)
            yield Accuracy(
                kind,
                name,
                len(told),
                float(np.median(told)),
                float(np.median(seen)),
                _percentiles(seen - told),
                _percentiles(ratios),
            )


def _percentiles(values: NDArray[np.float64]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(values, _QUANTILES).tolist()
    return low, middle, high
