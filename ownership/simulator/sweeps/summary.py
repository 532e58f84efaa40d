"""Results over seeds: a mean and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ownership.simulator.oracle.result import is_oracle
from ownership.simulator.sweeps.points import Point

_STUDENT = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Of Student's distribution, 97.5 %, for 1 to 30 degrees of freedom; beyond: the normal one's."""

BOUNDED = ("ttft_mean_s", "ttft_p95_s", "step_p95_s", "task_mean_s", "task_wait_mean_s")
"""Figures that are told over the oracle's too."""
_Setting = tuple[tuple[str, float], ...]
_Bounds = Mapping[tuple[_Setting, int, bool], Mapping[str, float]]
"""The oracle's figures by setting, seed and whether answers are kept."""


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
    """One for each policy and setting, in the order in which they come first.

    Where the oracle is among them there is a figure `<name>_over_oracle` for each of `BOUNDED`:
    over that of the same seed, if it keeps answers as the policy does. Not where requests were
    refused: the bound is of all. Nor where prompts are handed off at their last token: whoever
    sends such a prompt again may find more of it than the bound allows.
    """
    grouped: dict[tuple[_Setting, str], list[Mapping[str, Any]]] = {}
    bounds: dict[tuple[_Setting, int, bool], Mapping[str, float]] = {}
    for result in results:
        point = Point(**result["point"])
        grouped.setdefault((point.setting, point.policy), []).append(result)
        if is_oracle(point.policy):
            bounds[point.setting, point.seed, _keeps(point.policy)] = result["figures"]
    return [_row(policy, setting, found, bounds) for (setting, policy), found in grouped.items()]


def _row(
    policy: str,
    setting: _Setting,
    found: Sequence[Mapping[str, Any]],
    bounds: _Bounds,
) -> Row:
    seeds = tuple(result["point"]["seed"] for result in found)
    figures = {
        name: Estimate.of([result["figures"][name] for result in found])
        for name in found[0]["figures"]
    }
    least = [bounds.get((setting, seed, _keeps(policy))) for seed in seeds]
    refused = any(result["figures"].get("refused") for result in found)
    if not refused and "handoffs=tokens" not in policy.split("+"):
        for name in BOUNDED:
            pairs = [(r["figures"][name], b[name]) for r, b in zip(found, least, strict=True) if b]
            if len(pairs) == len(found) and all(bound > 0.0 for _, bound in pairs):
                ratios = [value / bound for value, bound in pairs]
                figures[f"{name}_over_oracle"] = Estimate.of(ratios)
    decisions = [r["overhead"]["decision_p50_us"] for r in found if "overhead" in r]
    overhead_us = statistics.fmean(decisions) if decisions else None
    return Row(policy, setting, seeds, figures, overhead_us)


def _keeps(policy: str) -> bool:
    """Whether answers are kept: a bound without them is none for a policy with them."""
    return "answers=kept" in policy.split("+")
