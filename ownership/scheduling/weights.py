"""What others' time, memory and copies are worth, in seconds of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_connector.planner.cost_model import CostWeights


@dataclass(frozen=True)
class PlacementWeights(CostWeights):
    """The planner's prices, and that of state that is held twice."""

    stall: float = 0.3
    """mu: seconds of cost for each second that one running decode is late. More than the planner's:
    a router can send a prefill elsewhere, an engine cannot. From 0.1 to 0.3 task times were least
    on recorded agent and chat traces; at 1 prefills queued where nothing was decoded."""
    copy: float = 3.0
    """kappa: what a token that is then held twice costs, in times of computing it. A cache is full
    sooner or later, and from then on it is one of other state that is not held and has to be
    computed again: what eviction by value takes it to be worth (`store.seconds_saved`). So 1 is
    dear enough for times; with 3 simulated fleets wait 0 to 3 % longer and move and hold 6 to 50 %
    less, on recorded agent and chat traces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.copy < math.inf:
            raise ValueError(f"copy is finite and at least 0: {self}")
