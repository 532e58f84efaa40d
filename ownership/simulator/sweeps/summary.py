"""Results over seeds: a mean and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ownership.simulator.sweeps.points import Point

_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's distribution, 97.5 %, for 1 to 9 degrees of freedom; beyond: the normal one's."""


class Estimate(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval; 0 of one seed."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of at least one value."""
        freedom = len(values) - 1
        if not freedom:
            return cls(values[0], 0.0)
        student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
        half = student * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)


@dataclass(frozen=True)
class Row:
    """A policy in one setting, over all its seeds."""

    policy: str
    setting: tuple[tuple[str, float], ...]
    seeds: tuple[int, ...]
    figures: Mapping[str, Estimate]
    overhead_us: float | None
    """Median of a decision: a measurement, see `Overhead`. None: nothing was decided."""


def rows(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One for each policy and setting, in the order in which they come first."""
    grouped: dict[tuple[tuple[tuple[str, float], ...], str], list[Mapping[str, Any]]] = {}
    for result in results:
        point = Point(**result["point"])
        grouped.setdefault((point.setting, point.policy), []).append(result)
    return [_row(policy, setting, found) for (setting, policy), found in grouped.items()]


def _row(
    policy: str, setting: tuple[tuple[str, float], ...], found: Sequence[Mapping[str, Any]]
) -> Row:
    names = found[0]["figures"]
    decisions = [r["overhead"]["decision_p50_us"] for r in found if "overhead" in r]
    return Row(
        policy,
        setting,
        tuple(result["point"]["seed"] for result in found),
        {name: Estimate.of([result["figures"][name] for result in found]) for name in names},
        statistics.fmean(decisions) if decisions else None,
    )
