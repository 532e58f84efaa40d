"""Prices of other requests' time, of memory and of copies, in seconds of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_connector.planner.cost_model import CostWeights


@dataclass(frozen=True)
class PlacementWeights(CostWeights):
    """The planner's prices, and the price of second copies."""

    stall: float = 0.3
    """mu: seconds of cost for each second of delay of one running decode. It is higher than the
    planner's, because a router can send a prefill elsewhere and an engine cannot. On recorded agent
    and chat traces task times were least from 0.1 to 0.3; at 1 prefills queued at workers that
    decoded nothing."""
    copy: float = 3.0
    """kappa: price of a token of which two workers have a copy from then on, as a multiple of the
    time to compute it. Once a cache is full, a second copy evicts a token of other state, which has
    to be computed again: the value that eviction by value gives it, too. So 1 is enough for the
    best times; with 3, on recorded agent and chat traces, simulated fleets wait 0 to 3 % longer and
    move and store 6 to 50 % less."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.copy < math.inf:
            raise ValueError(f"copy is finite and at least 0: {self}")
