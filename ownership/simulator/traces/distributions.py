"""Distributions that say what they are: each is written, and reads back, as one line of text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from hetero_connector.errors import TraceError


class Distribution(Protocol):
    """What one number is drawn from."""

    def sample(self, rng: np.random.Generator) -> float:
        """One draw; `rng` is the only source of chance."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: float

    def sample(self, rng: np.random.Generator) -> float:
        """The value."""
        return self.value


@dataclass(frozen=True)
class Uniform:
    """Any number from `low` to `high`, all alike."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _require(self.low <= self.high, "low must not exceed high")

    def sample(self, rng: np.random.Generator) -> float:
        """One draw."""
        return float(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Exponential:
    """Gaps of a Poisson process."""

    mean: float

    def __post_init__(self) -> None:
        _require(self.mean > 0, "mean must be greater than 0")

    def sample(self, rng: np.random.Generator) -> float:
        """One draw."""
        return float(rng.exponential(self.mean))


@dataclass(frozen=True)
class Geometric:
    """Whole numbers from 1, each further one equally likely to come."""

    mean: float

    def __post_init__(self) -> None:
        _require(self.mean >= 1, "mean must be at least 1")

    def sample(self, rng: np.random.Generator) -> float:
        """One draw."""
        return float(rng.geometric(1 / self.mean))


_Z90 = 1.2815515655446004
"""The standard normal's 90th percentile."""


@dataclass(frozen=True)
class LogNormal:
    """Given by two of its percentiles, as tables have them."""

    p50: float
    p90: float

    def __post_init__(self) -> None:
        _require(0 < self.p50 <= self.p90, "0 < p50 <= p90 must hold")

    def sample(self, rng: np.random.Generator) -> float:
        """One draw."""
        sigma = math.log(self.p90 / self.p50) / _Z90
        return float(rng.lognormal(math.log(self.p50), sigma))


KINDS: Mapping[str, type[Constant | Uniform | Exponential | Geometric | LogNormal]] = {
    "constant": Constant,
    "uniform": Uniform,
    "exponential": Exponential,
    "geometric": Geometric,
    "lognormal": LogNormal,
}
_TEXT = re.compile(r"\s*(?P<kind>\w+)\s*\((?P<parameters>[^()]*)\)\s*")


def parse_distribution(text: str, name: str | None = None) -> Distribution:
    """What `lognormal(p50=668, p90=3800)` says; a bare number is a constant.

    Raises:
        TraceError: it says no distribution of `KINDS`; names `name` and what was expected.
    """
    try:
        return Constant(_number(text))
    except ValueError:
        pass
    found = _TEXT.fullmatch(text)
    if found is None or found["kind"] not in KINDS:
        known = ", ".join(as_text(kind) for kind in KINDS.values())
        problem = f"{text!r} is neither a number nor one of {known}"
        raise TraceError("distribution", problem, field=name)
    kind = KINDS[found["kind"]]
    try:
        pairs = [part.split("=") for part in found["parameters"].split(",")]
        return kind(**{key.strip(): _number(value) for key, value in pairs})
    except (TypeError, ValueError) as e:
        problem = f"{text!r} is not {as_text(kind)}: {e}"
        raise TraceError("distribution", problem, field=name) from e


def as_text(what: object) -> str:
    """A distribution as `parse_distribution` reads it; of a class, the form."""
    kind = what if isinstance(what, type) else type(what)
    name = next(name for name, known in KINDS.items() if known is kind)
    names = [field.name for field in fields(KINDS[name])]
    if isinstance(what, type):
        return f"{name}({', '.join(f'{parameter}=...' for parameter in names)})"
    return f"{name}({', '.join(f'{n}={getattr(what, n)!r}' for n in names)})"


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text.strip()} is not a finite number from 0")
    return int(value) if value == int(value) else value


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
