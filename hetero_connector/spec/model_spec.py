"""The state that a model keeps: a `LayerSpec` for each cache layer, together a `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hetero_connector.spec.state_types import Family, RestoreRule, StateType

_MIN_CHUNK_TOKENS = 256
_BOUNDARY_RULES = (RestoreRule.WINDOW, RestoreRule.CHUNK_START, RestoreRule.AT_BOUNDARY)


@dataclass(frozen=True)
class LayerSpec:
    """The state of one cache layer on one tensor-parallel rank.

    A page is the engine's block of `block_tokens` tokens of this layer. Only its `page_bytes`
    useful bytes are stored, never the padding up to `page_stride_bytes`.
    """

    layer: str
    """The engine's name of the cache layer, e.g. `model.layers.3.self_attn.attn`."""
    group: int
    """Index of the engine's KV cache group, whose block table addresses the pages."""
    state_type: StateType
    tokens_per_state: int
    """Tokens per stored state: 1 unless the layer compresses."""
    block_tokens: int
    """Tokens covered by one page."""
    page_bytes: int
    """Useful bytes of one page."""
    page_stride_bytes: int
    """Bytes from one page to the next in the engine's memory, padding included."""
    dtype: str
    """Element type of the page, by torch's name: `bfloat16`, `uint8`, ..."""
    restore_rule: RestoreRule
    window: int | None = None
    """Attention window, or chunk of local attention, in tokens."""
    boundary_tokens: int = 0
    """For WINDOW: tokens before a boundary that are still read after it, if the boundary is a
    multiple of `ModelSpec.alignment`."""
    parts: int = 1
    """Number of different parts among the tensor-parallel ranks: 1 if all ranks have the same
    bytes (MLA, compressed states), one for each rank if all differ, fewer if ranks share a KV
    head. Rank r of n has part `r * parts // n`."""
    runs: tuple[int, ...] = ()
    """Bytes of each run of a page. A run continues in the next part's page, so the parts joined
    run by run are the page of a single rank. Empty: the parts cannot be joined."""
    prompt_only: bool = False
    """True if the state of decoded tokens differs from that of a prefill of them (R-SWA)."""

    def __post_init__(self) -> None:
        if self.runs and sum(self.runs) != self.page_bytes:
            raise ValueError(f"runs of {self.runs} bytes do not add up to a page: {self!r}")

    @property
    def whole_page_bytes(self) -> int:
        """Useful bytes of a page, all parts together."""
        return self.page_bytes * self.parts

    @property
    def bytes_per_token(self) -> float:
        """Useful bytes per token of a prefix; 0 for boundary states."""
        if self.state_type.family is Family.BOUNDARY:
            return 0.0
        return self.page_bytes / self.block_tokens

    @property
    def open_block_tokens(self) -> int:
        """For WINDOW: tokens of a compression block; the rows of the open block are read too.

        1 if nothing is compressed: a window of W tokens has W - 1 before a boundary.
        """
        return max(1, (self.window or 0) - self.boundary_tokens)

    def tokens_needed(self, start: int, boundary: int) -> range:
        """The tokens whose state is part of an artifact over [start, boundary); may be empty.

        For boundary states `start` is ignored.
        """
        rule = self.restore_rule
        if rule is RestoreRule.EVERY_TOKEN:
            return range(start, boundary)
        if rule is RestoreRule.WINDOW:
            needed = self.boundary_tokens + boundary % self.open_block_tokens
            return range(max(0, boundary - needed), boundary)
        if rule is RestoreRule.CHUNK_START:
            assert self.window is not None
            return range(boundary - boundary % self.window, boundary)
        if rule is RestoreRule.AT_BOUNDARY:
            return range(max(0, boundary - self.block_tokens), boundary)
        return range(0)

    def pages_needed(self, start: int, boundary: int) -> range:
        """The pages of those tokens, as indices into the request's block table."""
        tokens = self.tokens_needed(start, boundary)
        if not tokens:
            return range(0)
        return range(tokens.start // self.block_tokens, -(-tokens.stop // self.block_tokens))


@dataclass(frozen=True)
class ModelSpec:
    """Every cache layer of a model on one rank, and the token grid of its boundaries."""

    layers: tuple[LayerSpec, ...]
    alignment: int
    """In tokens: a request may resume only at a multiple of this (lcm of block sizes)."""
    tp_size: int = 1
    exact_handoffs: bool = False
    """True: state of any boundary is kept. False: only where it is no larger than at a multiple of
    `alignment`, see `handoff_step`."""

    def __post_init__(self) -> None:
        if self.alignment <= 0 or self.tp_size <= 0:
            raise ValueError(f"alignment and tp_size must be positive, got {self!r}")
        for layer in self.layers:
            if layer.parts <= 0 or self.tp_size % layer.parts:
                raise ValueError(f"{self.tp_size} ranks cannot hold {layer.parts} parts: {layer}")

    @cached_property
    def stored_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that have state to store."""
        return tuple(
            layer
            for layer in self.layers
            if layer.restore_rule is not RestoreRule.NOTHING
            and (layer.restore_rule is not RestoreRule.WINDOW or self._is_read(layer))
        )

    def _is_read(self, layer: LayerSpec) -> bool:
        """True if a kept boundary may need anything of a window."""
        return bool(layer.boundary_tokens) or (self.exact_handoffs and layer.open_block_tokens > 1)

    @cached_property
    def handoff_step(self) -> int:
        """In tokens: a prompt that is handed off may be resumed at multiples of this.

        Only the engine's own prefix cache needs its grid (`alignment`). At a multiple of the
        boundary states' blocks and compression blocks, they need as many pages as on that grid.
        Recurrent state exists on the grid only, and only there the engine can do without the state
        that is not stored (rings of open compression blocks, replayed windows).
        """
        rules = {x.restore_rule for x in self.layers}
        if not rules.isdisjoint((RestoreRule.AT_BOUNDARY, RestoreRule.NOTHING)):
            return self.alignment
        boundary = [x for x in self.layers if x.restore_rule in _BOUNDARY_RULES]
        if self.exact_handoffs:
            return 1
        step = math.lcm(*(math.lcm(x.block_tokens, x.open_block_tokens) for x in boundary))
        return self.alignment if self.alignment % step else step

    def handoff_end(self, prompt_tokens: int) -> int:
        """The boundary at which a handed-off prompt is resumed: the last before its last token."""
        last = prompt_tokens - 1
        return last - last % self.handoff_step

    @cached_property
    def state_types(self) -> tuple[StateType, ...]:
        """The stored state types, in the order of the `StateType` enum."""
        present = {layer.state_type for layer in self.stored_layers}
        return tuple(t for t in StateType if t in present)

    @cached_property
    def prefix_types(self) -> tuple[StateType, ...]:
        """The stored types that are needed for every token before a boundary."""
        return tuple(t for t in self.state_types if t.family is Family.PREFIX)

    @cached_property
    def boundary_types(self) -> tuple[StateType, ...]:
        """The stored types that are needed only at a boundary."""
        return tuple(t for t in self.state_types if t.family is Family.BOUNDARY)

    def boundary_types_at(self, boundary: int) -> tuple[StateType, ...]:
        """The `boundary_types` that are needed at this boundary, in tokens.

        Chunked local attention needs nothing where a local chunk begins, and compressors need
        nothing where no block is open. Such state is neither stored nor required there.
        """
        if not self._needed_at_times:
            return self.boundary_types
        return tuple(
            t
            for t in self.boundary_types
            if t not in self._needed_at_times
            or any(layer.tokens_needed(0, boundary) for layer in self.layers_of(t))
        )

    def types_at(self, boundary: int) -> tuple[StateType, ...]:
        """All types that a chunk ending at this boundary must have, so that a request resumes."""
        return self.prefix_types + self.boundary_types_at(boundary)

    def last_cut(self, limit: int) -> int:
        """The last boundary up to `limit` tokens at which a chunk can be cut; 0 if none can be.

        Boundary state is stored for the ends of chunks. Without it, a request may resume at any
        multiple of the alignment.
        """
        return 0 if self.boundary_types else limit - limit % self.alignment

    def is_complete(self, present: Set[StateType], boundary: int) -> bool:
        """True if a chunk ending at this boundary needs no more types than those present."""
        return present >= set(self.types_at(boundary))

    @cached_property
    def _needed_at_times(self) -> frozenset[StateType]:
        """The boundary types that some boundaries do not need."""
        always = {
            layer.state_type
            for layer in self.stored_layers
            if layer.restore_rule is RestoreRule.AT_BOUNDARY
            or (layer.restore_rule is RestoreRule.WINDOW and layer.boundary_tokens)
        }
        return frozenset(self.boundary_types).difference(always)

    @cached_property
    def prompt_only(self) -> bool:
        """True if only state of prompt tokens may be stored."""
        return any(layer.prompt_only for layer in self.stored_layers)

    def layers_of(self, state_type: StateType) -> Iterator[LayerSpec]:
        """The stored layers of one state type, in model order."""
        return (layer for layer in self.stored_layers if layer.state_type is state_type)

    @cached_property
    def page_groups(self) -> dict[StateType, tuple[LayerSpec, ...]]:
        """For each stored type, one layer per cache group: the one that needs the most pages.

        Layers of a group share a block table, and so a range of pages.
        """
        widest: dict[tuple[StateType, int], LayerSpec] = {}
        for layer in self.stored_layers:
            key = (layer.state_type, layer.group)
            if key not in widest or layer.boundary_tokens > widest[key].boundary_tokens:
                widest[key] = layer
        return {
            t: tuple(x for (state_type, _), x in widest.items() if state_type is t)
            for t in self.state_types
        }

    def as_plain(self) -> dict[str, Any]:
        """Return it as JSON values, for `from_plain`."""
        return asdict(self)

    @classmethod
    def from_plain(cls, document: Mapping[str, Any]) -> ModelSpec:
        """Rebuild it from `as_plain`. Raises KeyError, TypeError or ValueError for other input."""
        layers = tuple(
            LayerSpec(
                **{
                    **layer,
                    "state_type": StateType(layer["state_type"]),
                    "restore_rule": RestoreRule(layer["restore_rule"]),
                    "runs": tuple(layer["runs"]),
                }
            )
            for layer in document["layers"]
        )
        return cls(layers, document["alignment"], document["tp_size"], document["exact_handoffs"])

    @property
    def bytes_per_token(self) -> float:
        """Useful prefix-proportional bytes per token on one rank."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def default_chunk_tokens(self) -> int:
        """Return the smallest multiple of the alignment that is at least 256 tokens."""
        return math.ceil(_MIN_CHUNK_TOKENS / self.alignment) * self.alignment
