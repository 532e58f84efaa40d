"""Make the policies of an engine from its configuration and from what an earlier one learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.config import HeteroConfig
from hetero_connector.engine.scheduler.learned import MIN_SAMPLES
from hetero_connector.engine.scheduler.scheduler_side import Policies
from hetero_connector.planner.checkpoints import (
    Adaptive,
    CheckpointPolicy,
    CheckpointRates,
    CheckpointSizes,
    Full,
    policy_named,
)
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.profile import CostProfile, ProfileSubject
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.ssd.space import LEARNED_NAME, model_directory

_STAGING_DELAY_STEPS = 1.0
"""More than half a step: the step in which staging begins is longer than others, and the engine
works between steps, too (docs/decisions/0046-planner-terms-that-pay.md)."""


def learned_path(config: StoreConfig, digest: bytes) -> Path | None:
    """Return the file of what is learned; None without an SSD tier."""
    if config.ssd_dir is None:
        return None
    return model_directory(config.ssd_dir, digest) / LEARNED_NAME


def first_costs(
    config: HeteroConfig, subject: ProfileSubject, kept: CostProfile | None
) -> CostProfile | None:
    """Return the costs to start from: the configured profile, else what was kept, else None."""
    if config.planner_profile is None:
        return kept
    return CostProfile.read(config.planner_profile, subject)


def restore_planner(
    config: HeteroConfig,
    layout: ArtifactLayout,
    step_tokens: int,
    window_replay: WindowReplay | None,
    profile: CostProfile | None,
) -> RestorePlanner:
    types = layout.model.state_types
    if profile is None:
        costs = CostModel(ComputeRegression(), LoadModel(types), step_tokens=step_tokens)
    else:
        costs = profile.cost_model(types, step_tokens=step_tokens)
    costs.staging_delay_steps = _STAGING_DELAY_STEPS
    return RestorePlanner(
        layout,
        costs,
        config.planner,
        replay_tokens=window_replay.tokens if window_replay else 0,
        deadline_s=config.load_deadline_s,
    )


def checkpoint_policy(
    config: HeteroConfig, layout: ArtifactLayout, costs: CostModel, kept: CostProfile | None = None
) -> CheckpointPolicy:
    if not layout.model.prefix_types:
        # Only checkpoints link the chunks of such a model: a boundary without one would cut the
        # chain.
        return Full()
    has_ssd = config.ssd_dir is not None
    return policy_named(
        config.checkpoints,
        CheckpointSizes.of(layout),
        lambda: CheckpointRates.learned(costs, has_ssd=has_ssd),
        None if kept is None else kept.reuse,
    )


def learned(policies: Policies, model: str, subject: ProfileSubject) -> CostProfile | None:
    """Return what is worth keeping for the next engine; None before the costs of steps are."""
    costs, checkpoints = policies.planner.costs, policies.checkpoints
    if not costs.compute.is_measured(MIN_SAMPLES):
        return None
    return replace(
        CostProfile.of(costs, model, subject, MIN_SAMPLES),
        pace=policies.think_times.pace,
        reuse=checkpoints.past if isinstance(checkpoints, Adaptive) else None,
    )
