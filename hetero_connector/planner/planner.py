"""The restore planner: load, compute, or both, by predicted cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.boundaries import Boundaries, ChunkGrid
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.decision import CandidateSet, RestoreDecision
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.plan import chunks_between
from hetero_connector.planner.pricing import EngineLoad, Parking, Pricing, TierTable

Mode = Literal["cost", "always_load", "never_load"]
ENGINE_SETTINGS = "engine_settings"
"""Key in a journal's description."""


@dataclass(frozen=True)
class EngineSettings:
    """Engine settings that the planner depends on; a journal keeps them for `heterocache explain`.

    The defaults stand for an engine whose settings are not known.
    """

    planner: Mode = "cost"
    step_tokens: int = 0
    """`CostModel.step_tokens`."""
    layerwise: bool = True
    """True: loads run layer by layer during the forward pass, as far as layers call hooks."""
    load_deadline_s: float = 10.0
    parking: Parking = "never"

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> EngineSettings | None:
        """Read them from a journal's description; None if it has none.

        Raises TypeError for unknown settings.
        """
        settings = description.get(ENGINE_SETTINGS)
        return None if settings is None else cls(**settings)

    def described(self) -> dict[str, Any]:
        """Return the entry for a journal's description."""
        return {ENGINE_SETTINGS: asdict(self)}

    def __str__(self) -> str:
        steps = f"steps of {self.step_tokens} tokens" if self.step_tokens else "one step"
        loads = "layer by layer" if self.layerwise else "before the forward"
        if self.parking != "never":
            loads = "between steps" if self.parking == "always" else f"{loads} or between steps"
        return (
            f"planner={self.planner}, {steps}, loads {loads}, "
            f"load_deadline_s={self.load_deadline_s:g}"
        )


class RestorePlanner:
    """Prices every boundary a request could resume at, and takes the cheapest.

    Not thread-safe. A decision over hundreds of chunks takes tens of microseconds.
    """

    def __init__(
        self,
        layout: ArtifactLayout,
        costs: CostModel,
        mode: Mode = "cost",
        *,
        replay_tokens: int = 0,
        deadline_s: float = math.inf,
    ) -> None:
        """`replay_tokens`: the number of tokens before a boundary that the engine must compute
        again to rebuild its boundary state exactly; 0 if replay is not exact or not supported.

        `deadline_s`: a boundary whose staging is predicted to take longer is not taken.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode is one of {get_args(Mode)}, not {mode!r}")
        self.costs = costs
        self.mode = mode
        self._grid = ChunkGrid(layout)
        # A model without prefix types has nothing to load that a replay could use.
        model = layout.model
        self._replay_tokens = replay_tokens if model.boundary_types and model.prefix_types else 0
        self.replay_when_missing = False
        """True: `always_load` replays too, if that resumes later than any checkpoint."""
        self._deadline_s = deadline_s
        self._tables: dict[Tier, TierTable] = {}

    def plan(
        self,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        limit_tokens: int,
        prompt_tokens: int,
        load: EngineLoad,
        *,
        may_replay: bool = True,
        deadline_s: float = math.inf,
    ) -> RestoreDecision:
        """Decide what to restore of `stored`, one unbroken chain from the first chunk.

        The engine has the state of the first `local_tokens`. A boundary is at most
        `limit_tokens`: a chunk that ends after that is cut, if the model's state can be. All
        `prompt_tokens` must be restored or computed. `may_replay`: False if this request's windows
        cannot be rebuilt. `deadline_s`: the time left, if it is less than the planner's own.
        Loading wins a tie, and the deeper boundary. What is due to be tried is priced as if nothing
        were known of its tier.
        """
        cut_tokens = self._grid.model.last_cut(limit_tokens)
        chunks = chunks_between(stored, local_tokens, limit_tokens, cut_tokens)
        boundaries = Boundaries.of(self._grid, chunks, limit_tokens)

        def decide(tried: Mapping[Tier, TierRates]) -> RestoreDecision:
            pricing = Pricing(self._grid, self.costs, self._tables, prompt_tokens, load, tried)
            considered = CandidateSet(
                pricing,
                pricing.load_times(boundaries) if boundaries else None,
                local_tokens,
                replay_tokens=self._replay_tokens if may_replay else 0,
                deadline_s=min(deadline_s, self._deadline_s),
            )
            if self.mode == "cost":
                return RestoreDecision(*considered.cheapest(), considered)
            if self.mode == "always_load":
                plan, terms = considered.deepest(may_replay=self.replay_when_missing)
            else:
                plan, terms = None, considered.nothing
            return RestoreDecision(plan, terms, considered, by_cost=False)

        decision, loads = decide({}), self.costs.load
        if loads.has_due and (due := loads.due(decision.declined)):
            trying = decide(due)
            if trying.plan and (tried := trying.plan.source_tiers & due.keys()):
                for tier in tried:
                    loads.on_tried(tier, decision.declined[tier])
                return trying
        return decision
