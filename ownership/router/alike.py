"""Workers of one model and machine are alike, and so are their costs.

What one of them has measured in few samples, or not at all, says less about it than what the others
have measured. Else a prompt would leave the worker that has it for one that looks faster because
it has computed nothing yet, or only while the machine was idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import ComputeCoefficients, InterferenceCoefficients
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.profile import CostProfile, FitError, ProfileSubject
from hetero_connector.spec.state_types import StateType

_ENOUGH = 64
"""Samples with which a worker's own measurement weighs as much as the mean of all."""

_Part = tuple[tuple[float, ...], int]
"""The figures of one part of a profile, and the number of its samples."""


def pooled(profiles: Mapping[str, CostProfile]) -> dict[str, CostProfile]:
    """Return each worker's profile, moved towards the mean of the workers of its subject.

    Means are by samples. A part of n samples keeps n / (n + `_ENOUGH`) of its own figures.
    """
    alike: defaultdict[ProfileSubject, list[str]] = defaultdict(list)
    for name, profile in profiles.items():
        alike[profile.subject].append(name)
    found: dict[str, CostProfile] = {}
    for names in alike.values():
        moved = _moved([profiles[name] for name in names])
        found.update(zip(names, moved, strict=True))
    return found


def _moved(alike: Sequence[CostProfile]) -> Iterator[CostProfile]:
    """Yield the profiles of workers that are alike, in their order."""
    compute = _towards_mean([(x.compute, _samples(x.compute_error)) for x in alike])
    delays = _towards_mean([(x.interference or (), _samples(x.interference_error)) for x in alike])
    loads = [dict(x.load) for x in alike]
    for tier in Tier:
        known = [x.load[tier] for x in alike if tier in x.load]
        types = sorted({kind for rates in known for kind in rates.seconds_per_byte})
        parts = [(_flat(x.load.get(tier), types), _samples(x.load_errors.get(tier))) for x in alike]
        for load, figures in zip(loads, _towards_mean(parts), strict=True):
            if figures:
                latency_s, ahead_s, computing_s, *bytes_s = figures
                per_byte = dict(zip(types, bytes_s, strict=True))
                load[tier] = TierRates(latency_s, per_byte, ahead_s, computing_s)
    for profile, load, costs, delay in zip(alike, loads, compute, delays, strict=True):
        yield replace(
            profile,
            compute=ComputeCoefficients(*costs),
            interference=InterferenceCoefficients(*delay) if delay else None,
            load=load,
        )


def _flat(rates: TierRates | None, types: Iterable[StateType]) -> tuple[float, ...]:
    if rates is None:
        return ()
    overhead = rates.latency_s, rates.ahead_s_per_byte, rates.while_computing_s
    return (*overhead, *(rates.seconds_per_byte.get(kind, 0.0) for kind in types))


def _samples(fit: FitError | None) -> int:
    return fit.samples if fit else 0


def _towards_mean(parts: Sequence[_Part]) -> list[tuple[float, ...]]:
    """Return the figures, moved; as they are if none is measured. () is a part that is unknown."""
    total = sum(samples for figures, samples in parts if figures)
    if not total:
        return [figures for figures, _ in parts]
    width = max(len(figures) for figures, _ in parts)
    mean = [
        sum(samples * figures[at] for figures, samples in parts if figures) / total
        for at in range(width)
    ]
    found = []
    for figures, samples in parts:
        own = samples / (samples + _ENOUGH) if figures else 0.0
        shares = zip(figures or mean, mean, strict=True)
        found.append(tuple(own * one + (1.0 - own) * other for one, other in shares))
    return found
