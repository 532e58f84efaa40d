"""The most sessions that a fleet serves within objectives: a population is raised until they break.

A search of `benchmarks.simulated_fleets`: each step is a simulation of a constant population.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

_TO = 1 / 16
"""The relative size of the last interval."""

LEVELS = {"sessions_per_gpu_90": 0.90, "sessions_per_gpu_99": 0.99}
"""Figures, by the share of requests that keep the objectives."""


def most_population(attains: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest population that attains, to 1/16; 0 if not even one session does.

    `attains` is asked for `first` sessions, then for twice or half as many until one attains and
    the other does not, then between them. It is taken to be monotone; `most` ends the search.
    """
    good, bad = 0, most + 1
    population = min(first, most)
    while bad - good > max(1, int(_TO * good)):
        if attains(population):
            good = population
        else:
            bad = population
        if bad > most:
            population = min(2 * good, most)
        elif good == 0:
            population = bad // 2
        else:
            population = (good + bad) // 2
        if population in (0, good):
            break
    return good


def sessions_per_gpu(
    share_at: Callable[[int], float], gpus: int, first: int, most: int
) -> Mapping[str, float]:
    """Search for each level of `LEVELS`.

    `share_at`: from the population of each worker, of `gpus` GPUs, to the share that attained.
    """
    known = cache(share_at)

    def most_at(wanted: float) -> float:
        return most_population(lambda population: known(population) >= wanted, first, most) / gpus

    return {figure: most_at(share) for figure, share in LEVELS.items()}
