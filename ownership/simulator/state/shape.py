"""What a model's state weighs in pages and in slots: plain numbers, made once for a simulation."""

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
    """Pages of prefix-proportional state are taken as a whole."""
    step_bytes_per_token: int
    """Pages of windows that a step needs for each token it prefills, until the next step."""
    prefix_bytes: Mapping[StateType, int]
    """Of a full chunk."""
    boundary_bytes: Mapping[StateType, int]
    """At a boundary behind full windows."""

    @classmethod
    def of(cls, model: ModelSpec, chunk_tokens: int) -> StateShape:
        """Raises ValueError where chunks are no multiple of the model's alignment."""
        layout = ArtifactLayout(model, chunk_tokens)
        grid, sizes = ChunkGrid(layout), CheckpointSizes.of(layout)
        page_bytes = math.ceil(grid.page_bytes_per_token)
        boundary_bytes = {t: layout.max_bytes[t] for t in model.boundary_types}
        return cls(
            layout,
            StateFootprint.of(layout),
            ChunkSizes(chunk_tokens, sizes.chunk_bytes, sizes.checkpoint_bytes),
            ChunkSizes(chunk_tokens, page_bytes * chunk_tokens, _boundary_page_bytes(model)),
            page_bytes,
            _page_tokens(model),
            _window_page_bytes(model),
            grid.prefix_bytes,
            boundary_bytes,
        )

    @cached_property
    def model(self) -> ModelSpec:
        """The model's specification."""
        return self.layout.model

    @cached_property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.stored.tokens

    @cached_property
    def window_chunks(self) -> int:
        """Chunks before a boundary that the longest window reaches into; at least 1."""
        reach = max((layer.boundary_tokens for layer in self.model.layers), default=0)
        return max(1, -(-reach // self.chunk_tokens))

    @cached_property
    def has_checkpoints(self) -> bool:
        """Whether a request can resume only where boundary state was kept."""
        return bool(self.boundary_bytes)

    def moved_bytes(self, chunks: int, checkpoints: int, short_tokens: int = 0) -> int:
        """Useful bytes of so many chunks and checkpoints. `short_tokens`: of the last chunk, where
        it is no full one."""
        sizes = self.stored
        size_bytes = chunks * sizes.chunk_bytes + checkpoints * sizes.checkpoint_bytes
        if short_tokens and chunks:
            size_bytes += self._prefix_bytes_of(short_tokens) - sizes.chunk_bytes
        return size_bytes

    def _prefix_bytes_of(self, tokens: int) -> int:
        return sum(self.layout.artifact_bytes(t, 0, tokens) for t in self.prefix_bytes)

    def request_bytes(self, tokens: int) -> int:
        """Pages that a running request needs for so many tokens, on one rank."""
        return -(-tokens // self.page_tokens) * self.page_bytes + self.pages.checkpoint_bytes

    @cached_property
    def page_bytes(self) -> int:
        """Of one page in all layers, on one rank."""
        return self.page_tokens * self.page_bytes_per_token


def _boundary_page_bytes(model: ModelSpec) -> int:
    """Pages of windows, tails and recurrent state that a running request holds on one rank."""
    far = 1 << 20
    return sum(
        len(layer.pages_needed(far, far)) * layer.page_stride_bytes
        for layer in model.stored_layers
        if layer.state_type.family is Family.BOUNDARY
    )


def _page_tokens(model: ModelSpec) -> int:
    """Where layers differ, what the longest page covers."""
    rule = RestoreRule.EVERY_TOKEN
    return max((x.block_tokens for x in model.layers if x.restore_rule is rule), default=1)


def _window_page_bytes(model: ModelSpec) -> int:
    """Of one token: an engine frees the pages before a window only once they are computed."""
    return math.ceil(
        sum(
            layer.page_stride_bytes / layer.block_tokens
            for layer in model.layers
            if layer.restore_rule is RestoreRule.WINDOW
        )
    )


def dense_paged(model: ModelSpec) -> ModelSpec:
    """The same model where every layer with a window keeps the pages of all tokens, padding
    included: what an allocator does that knows one kind of block. Recurrent state stays."""
    # Under a type that the model has: its costs are known for those only.
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
