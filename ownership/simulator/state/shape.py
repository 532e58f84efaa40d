"""Sizes of a model's state in pages and in slots, computed once for a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.planner.boundaries import ChunkGrid
from hetero_connector.planner.checkpoints import CheckpointSizes
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import Family, RestoreRule, StateType
from ownership.scheduling.footprint import StateFootprint
from ownership.simulator.state.runs import ChunkSizes


@dataclass(frozen=True)
class StateShape:
    """One model at one chunk size."""

    layout: ArtifactLayout
    footprint: StateFootprint
    stored: ChunkSizes
    """Bytes of useful state, all ranks together."""
    pages: ChunkSizes
    """Bytes of KV pages on one rank, padding included."""
    page_bytes_per_token: int
    page_tokens: int
    """Tokens of a page of prefix-proportional state."""
    step_bytes_per_token: int
    """Bytes of window pages for each token that a step prefills, held until the next step."""
    prefix_bytes: Mapping[StateType, int]
    """Bytes of each prefix-proportional type in a full chunk."""
    has_checkpoints: bool
    """True if a request can resume only where boundary state was kept."""

    @classmethod
    def of(cls, model: ModelSpec, chunk_tokens: int) -> StateShape:
        """Compute it. Raises ValueError if chunks are no multiple of the model's alignment."""
        layout = ArtifactLayout(model, chunk_tokens)
        grid, sizes = ChunkGrid(layout), CheckpointSizes.of(layout)
        page_bytes = math.ceil(grid.page_bytes_per_token)
        return cls(
            layout,
            StateFootprint.of(layout),
            ChunkSizes(chunk_tokens, sizes.chunk_bytes, sizes.checkpoint_bytes),
            ChunkSizes(chunk_tokens, page_bytes * chunk_tokens, _boundary_page_bytes(model)),
            page_bytes,
            _page_tokens(model),
            _window_page_bytes(model),
            grid.prefix_bytes,
            bool(model.boundary_types),
        )

    @cached_property
    def model(self) -> ModelSpec:
        return self.layout.model

    @cached_property
    def chunk_tokens(self) -> int:
        return self.stored.tokens

    @cached_property
    def window_chunks(self) -> int:
        """Number of chunks before a boundary that the longest window needs; at least 1."""
        reach = max((layer.boundary_tokens for layer in self.model.layers), default=0)
        return max(1, -(-reach // self.chunk_tokens))

    def moved_bytes(self, chunks: int, checkpoints: int, short_tokens: int = 0) -> int:
        """Return the useful bytes of chunks and checkpoints.

        `short_tokens`: the length of the last chunk if it is a short one.
        """
        sizes = self.stored
        size_bytes = chunks * sizes.chunk_bytes + checkpoints * sizes.checkpoint_bytes
        if short_tokens and chunks:
            size_bytes -= sizes.chunk_bytes
            size_bytes += sum(
                self.layout.artifact_bytes(t, 0, short_tokens) for t in self.prefix_bytes
            )
        return size_bytes

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes of pages that a running request of `tokens` tokens needs on one rank."""
        return -(-tokens // self.page_tokens) * self.page_bytes + self.pages.checkpoint_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, on one rank."""
        return self.page_tokens * self.page_bytes_per_token


def _boundary_page_bytes(model: ModelSpec) -> int:
    """Return the bytes of boundary-state pages of a running request, on one rank."""
    far = 1 << 20
    return sum(
        len(layer.pages_needed(far, far)) * layer.page_stride_bytes
        for layer in model.stored_layers
        if layer.state_type.family is Family.BOUNDARY
    )


def _page_tokens(model: ModelSpec) -> int:
    """Return the tokens of a page; if layers differ, of the longest one."""
    rule = RestoreRule.EVERY_TOKEN
    return max((x.block_tokens for x in model.layers if x.restore_rule is rule), default=1)


def _window_page_bytes(model: ModelSpec) -> int:
    """Return the bytes of window pages for one token.

    An engine frees the pages before a window only after the step that computed past them.
    """
    return math.ceil(
        sum(
            layer.page_stride_bytes / layer.block_tokens
            for layer in model.layers
            if layer.restore_rule is RestoreRule.WINDOW
        )
    )


def dense_paged(model: ModelSpec) -> ModelSpec:
    """Return the model as an allocator with one kind of block stores it.

    Every layer with a window keeps the pages of all tokens, with padding. Recurrent state stays.
    """
    # A type that the model has, because costs are known for those only.
    dense = model.prefix_types[0] if model.prefix_types else StateType.DENSE_KV
    layers = tuple(
        replace(
            layer,
            state_type=dense,
            restore_rule=RestoreRule.EVERY_TOKEN,
            page_bytes=layer.page_stride_bytes,
            runs=(),
            boundary_tokens=0,
            window=None,
        )
        if layer.state_type.family is Family.BOUNDARY
        and layer.state_type is not StateType.RECURRENT
        else replace(layer, page_bytes=layer.page_stride_bytes, runs=())
        for layer in model.layers
    )
    return replace(model, layers=layers)
