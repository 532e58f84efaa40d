"""Choosing what to restore: load, compute, or both, by predicted cost.

What of an engine's settings its planner goes by; a journal keeps it, for `explain`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.boundaries import ChunkGrid
from hetero_connector.planner.candidates import CandidateSet
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.decision import EngineLoad, RestoreAction, RestoreDecision
from hetero_connector.planner.plan import RestorePlan, plan_replay, plan_restore
from hetero_connector.planner.pricing import Pricing, TierTable
from hetero_connector.spec.model_spec import ModelSpec

Mode = Literal["cost", "always_load", "never_load"]


class RestorePlanner:
    """Prices every boundary a request could resume at, and takes the cheapest.

    Not thread-safe. A decision takes microseconds: tens for hundreds of chunks.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: ArtifactLayout,
        costs: CostModel,
        mode: Mode = "cost",
        *,
        replay_tokens: int = 0,
        deadline_s: float = math.inf,
    ) -> None:
        """`replay_tokens`: how many tokens before a boundary the engine must compute again to
        rebuild its boundary state exactly; 0 where replay is not exact or not supported.

        `deadline_s`: a boundary whose staging is predicted to take longer is not taken.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode is one of {get_args(Mode)}, not {mode!r}")
        self.costs = costs
        self.mode = mode
        self._model = model
        self._grid = ChunkGrid(layout)
        # Without prefix types there is nothing to load that replay would spare.
        self._replay_tokens = replay_tokens if model.boundary_types and model.prefix_types else 0
        self.replay_when_missing = False
        """`always_load` replays too, where that resumes later than any checkpoint lets it."""
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
    ) -> RestoreDecision:
        """What to restore of `stored`, one unbroken chain from the first chunk.

        The engine holds the state of the first `local_tokens`; a boundary may be at most
        `limit_tokens`; all of `prompt_tokens` must be restored or computed. Ties go to
        loading, and to loading deeper. `may_replay`: whether this request's windows can be
        rebuilt at all.
        """
        replay_tokens = self._replay_tokens if may_replay else 0
        pricing = Pricing(self._grid, self.costs, self._tables, prompt_tokens, load)
        weighing = CandidateSet(
            self._grid,
            pricing,
            stored,
            local_tokens,
            limit_tokens,
            replay_tokens=replay_tokens,
            deadline_s=self._deadline_s,
        )
        by_cost = self.mode == "cost"
        if by_cost:
            plan, terms = weighing.cheapest()
        elif self.mode == "always_load":
            deepest = self._deepest(stored, local_tokens, limit_tokens, replay_tokens)
            plan, terms = weighing.of(deepest)
        else:
            plan, terms = None, weighing.nothing
        return RestoreDecision(
            plan,
            terms,
            weighing.nothing,
            lambda: weighing.declined(plan) if by_cost else (),
            lambda: _actions(weighing, plan, by_cost, local_tokens, prompt_tokens),
            lambda: weighing.candidates(plan),
        )

    def _deepest(
        self,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        limit_tokens: int,
        replay_tokens: int,
    ) -> RestorePlan | None:
        """The plan that leaves least to compute, whatever it costs."""
        plan = plan_restore(self._model, stored, local_tokens, limit_tokens)
        if not (replay_tokens and self.replay_when_missing):
            return plan
        replay = plan_replay(self._model, replay_tokens, stored, local_tokens, limit_tokens)
        if plan is None or (replay is not None and replay.resume_tokens > plan.resume_tokens):
            return replay
        return plan


def _actions(
    weighing: CandidateSet,
    plan: RestorePlan | None,
    by_cost: bool,
    local_tokens: int,
    prompt_tokens: int,
) -> Iterator[RestoreAction]:
    if plan is not None:
        if plan.prefix_types:
            yield RestoreAction.LOAD_COMPRESSED_KV
        if plan.boundary_types:
            yield RestoreAction.LOAD_SWA_CHECKPOINT
        if plan.replay_tokens:
            yield RestoreAction.RECOMPUTE_SWA
        if weighing.stages(plan):
            yield RestoreAction.PREFETCH_ARTIFACT
    if prompt_tokens > (plan.boundary if plan else local_tokens):
        yield RestoreAction.RECOMPUTE_TAIL
    if by_cost and weighing.leads_further(plan):
        yield RestoreAction.DROP_LOW_UTILITY_ARTIFACT


ENGINE_SETTINGS = "engine_settings"
"""Key of a journal's description. Journals of earlier releases lack it."""


@dataclass(frozen=True)
class EngineSettings:
    """The defaults stand for an engine that did not say."""

    planner: Mode = "cost"
    step_tokens: int = 0
    """`CostModel.step_tokens`."""
    layerwise: bool = True
    """`EngineLoad.layerwise`."""
    load_deadline_s: float = 10.0

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> EngineSettings | None:
        """What a description says; None if nothing. Raises TypeError where it makes no sense."""
        told = description.get(ENGINE_SETTINGS)
        return None if told is None else cls(**told)

    def described(self) -> dict[str, Any]:
        """For a description."""
        return {ENGINE_SETTINGS: asdict(self)}

    def __str__(self) -> str:
        steps = f"steps of {self.step_tokens} tokens" if self.step_tokens else "one step"
        loads = "layer by layer" if self.layerwise else "between steps"
        return (
            f"planner={self.planner}, {steps}, loads {loads}, "
            f"load_deadline_s={self.load_deadline_s:g}"
        )
