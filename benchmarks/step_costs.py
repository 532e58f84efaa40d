"""Costs by which every step takes as long, and nothing else takes any time."""

from __future__ import annotations

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec.model_spec import ModelSpec


def steps_alone_cost(model: ModelSpec, step_tokens: int, step_s: float) -> CostModel:
    """What a simulator needs to go by a clock of steps, each of `step_s` seconds."""
    compute = ComputeCoefficients(step_s, 0.0, 0.0)
    decode = InterferenceCoefficients(step_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    free = TierRates(0.0, dict.fromkeys(model.state_types, 0.0), 0.0)
    return CostModel(
        ComputeRegression(compute),
        LoadModel(model.state_types, dict.fromkeys(Tier, free)),
        step_tokens=step_tokens,
        interference=InterferenceRegression(decode, compute),
    )
