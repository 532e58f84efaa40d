"""Prices of other requests' time and of copies, in seconds of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PlacementWeights:
    """The prices of a placement besides its own time. Each pays in a study: decisions 75 and
    80."""

    stall: float = 0.3
    """mu: seconds of cost for each second of delay of another request's decode, which runs or will
    run (decision 84). It is higher than the planner's, because a router can send a prefill
    elsewhere and an engine cannot. On recorded agent and chat traces task times were least from 0.1
    to 0.3; at 1 prefills queued at workers that decoded nothing."""
    copy: float = 3.0
    """kappa: price of state of which two workers have a copy from then on, as a multiple of the
    time to compute it, where sessions need half of the cache (`fullness`). In a full cache a copy
    evicts other state of that size, which has to be computed again. Without it, agents with long
    dense contexts, which fill the caches, wait twice as long."""
    fullness: bool = True
    """True if kappa follows how much of a worker's cache is needed; False: it is the same
    everywhere."""
    role: float = 2.0
    """The factor of prices by which workers lean to prefills or to decodes (`roles`); 1: they do
    not."""

    def __post_init__(self) -> None:
        for weight in (self.stall, self.copy):
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"stall and copy are finite and at least 0: {self}")
        if not 1.0 <= self.role < math.inf:
            raise ValueError(f"role is finite and at least 1: {self}")
