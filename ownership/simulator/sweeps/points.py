"""The points of a sweep: every policy with every combination of what is swept."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product

from hetero_connector.errors import SimulationError
from ownership.simulator.oracle.result import is_oracle
from ownership.simulator.policies import parse_policy
from ownership.simulator.workload import Workload


@dataclass(frozen=True)
class Point:
    """One simulation of a sweep."""

    policy: str
    workers: int | None = None
    """How many of the fleet's; None: all."""
    rate: float | None = None
    sharing: float | None = None
    sessions: int | None = None
    seed: int = 0

    @property
    def workload(self) -> Workload:
        """How the trace is sent."""
        return Workload(self.rate, self.sharing, self.sessions, self.seed)

    @property
    def key(self) -> str:
        """Tells it from every other point; text that stays the same."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def setting(self) -> tuple[tuple[str, float], ...]:
        """What is not the policy or the seed, as far as it is given."""
        values = asdict(self)
        return tuple((n, values[n]) for n in _SWEPT if n != "seed" and values[n] is not None)


_LEAST: Mapping[str, float] = {"workers": 1, "rate": 0, "sharing": 0, "sessions": 1, "seed": 0}
_MOST: Mapping[str, float] = {"sharing": 1, "workers": 100_000}
_WHOLE = {"workers", "sessions", "seed"}
_SWEPT = tuple(field.name for field in fields(Point) if field.name != "policy")


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """From `rate=0.1,0.2` to a field of `Point` and its values.

    Raises SimulationError that says what is wrong with it.
    """
    name, _, listed = text.partition("=")
    if name not in _SWEPT:
        raise SimulationError("--sweep", f"no {name!r}; there are {', '.join(_SWEPT)}")
    values = [_value(name, value) for value in listed.split(",")]
    if len(set(values)) < len(values):  # a seed twice is no second sample
        raise SimulationError("--sweep", f"a value is given twice: {listed}", name)
    return name, values


def points(policies: Sequence[str], sweeps: Mapping[str, Sequence[float]]) -> Iterator[Point]:
    """All combinations, policies side by side.

    Raises SimulationError for a policy that is none, for one given twice, and for none at all.
    """
    if not policies:
        raise SimulationError("--policies", "names none, e.g. ownerserve,dynamo_kv")
    if len(set(policies)) < len(policies):
        raise SimulationError("--policies", f"one is given twice: {','.join(policies)}")
    for policy in policies:
        if not is_oracle(policy):
            parse_policy(policy)
    names = [name for name in _SWEPT if name in sweeps]
    for values in product(*(sweeps[name] for name in names)):
        for policy in policies:
            made = dict(zip(names, values, strict=True))
            whole = {n: int(v) if n in _WHOLE else v for n, v in made.items()}
            yield Point(policy, **whole)  # type: ignore[arg-type]


def _value(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    good = _LEAST[name] <= value <= _MOST.get(name, 1e12)
    if not good or (name in _WHOLE and value != int(value)) or (name == "rate" and not value):
        problem = f"{text!r} is no {'whole ' if name in _WHOLE else ''}number in its range"
        raise SimulationError("--sweep", problem, name)
    return value
