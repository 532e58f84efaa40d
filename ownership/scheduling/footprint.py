"""The size of a model's state, in the few numbers that a placement decision needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.planner.boundaries import ChunkGrid
from hetero_connector.planner.load_model import TierRates
from hetero_connector.spec.state_types import StateType


class TierPace(NamedTuple):
    """The speed at which one tier moves one model's state."""

    latency_s: float
    """Per load."""
    token_s: float
    """Per token of prefix."""
    checkpoint_s: float
    """For the boundary states at the end of a load."""
    ahead_s_per_byte: float
    """Per byte of loads that are already queued."""


@dataclass(frozen=True)
class StateFootprint:
    """Bytes of one model's state. Boundary states are counted with full windows."""

    token_bytes: Mapping[StateType, float]
    """Bytes per token of each prefix-proportional type, all ranks together."""
    checkpoint_bytes: Mapping[StateType, float]
    """Bytes at a boundary of each boundary type, all ranks together."""
    page_bytes_per_token: float
    """Bytes of KV pages per token on one rank, padding included."""
    num_layers: int
    """Stored layers: what a layer-wise load is pipelined over."""

    def __post_init__(self) -> None:
        sizes = (*self.token_bytes.values(), *self.checkpoint_bytes.values())
        if min((*sizes, self.page_bytes_per_token), default=0.0) < 0.0 or self.num_layers < 1:
            raise ValueError(f"sizes are at least 0 and there is a layer: {self}")

    @classmethod
    def of(cls, layout: ArtifactLayout) -> StateFootprint:
        """Return the footprint of a model stored in chunks."""
        grid = ChunkGrid(layout)
        token_bytes = {t: n / layout.chunk_tokens for t, n in grid.prefix_bytes.items()}
        at_boundary = dict(zip(layout.model.boundary_types, grid.boundary_bytes, strict=True))
        checkpoint_bytes = {t: float(sizes.max()) for t, sizes in at_boundary.items()}
        layers = len(layout.model.stored_layers)
        return cls(token_bytes, checkpoint_bytes, grid.page_bytes_per_token, layers)

    @cached_property
    def all_token_bytes(self) -> float:
        """Bytes per token of all prefix types."""
        return sum(self.token_bytes.values())

    @cached_property
    def all_checkpoint_bytes(self) -> float:
        """Bytes at a boundary of all boundary types."""
        return sum(self.checkpoint_bytes.values())

    def pace(self, rates: TierRates) -> TierPace:
        """Return the speed of a tier with these rates."""
        per_byte = rates.seconds_per_byte
        return TierPace(
            rates.latency_s,
            sum(n * per_byte[t] for t, n in self.token_bytes.items()),
            sum(n * per_byte[t] for t, n in self.checkpoint_bytes.items()),
            rates.ahead_s_per_byte,
        )
