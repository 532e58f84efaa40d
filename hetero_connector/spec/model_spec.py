"""What state a model keeps: one `LayerSpec` per cache layer, together a `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hetero_connector.spec.state_types import Family, RestoreRule, StateType

_BOUNDARY_RULES = (RestoreRule.WINDOW, RestoreRule.CHUNK_START, RestoreRule.AT_BOUNDARY)


@dataclass(frozen=True)
class LayerSpec:
    """The state of one cache layer on one tensor-parallel rank.

    `page` is the engine's block of `block_tokens` tokens for this layer; only its
    `page_bytes` useful bytes are ever stored, never the padding up to
    `page_stride_bytes`.
    """

    layer: str
    """The engine's name of the cache layer, e.g. `model.layers.3.self_attn.attn`."""
    group: int
    """Index of the engine's KV cache group, whose block table addresses the pages."""
    state_type: StateType
    tokens_per_state: int
    """Tokens folded into one stored state (1 unless the layer compresses)."""
    block_tokens: int
    """Tokens covered by one page."""
    page_bytes: int
    """Useful bytes of one page."""
    page_stride_bytes: int
    """Bytes from one page to the next in the engine's memory, padding included."""
    dtype: str
    """Element type of the page, as torch spells it: `bfloat16`, `uint8`, ..."""
    restore_rule: RestoreRule
    window: int | None = None
    """Attention window, or local-attention chunk, in tokens."""
    boundary_tokens: int = 0
    """For WINDOW: how many tokens before a boundary are still read after it, where that is a
    multiple of `ModelSpec.alignment`."""
    parts: int = 1
    """Different parts that the tensor-parallel ranks hold: 1 if all hold the same bytes (MLA,
    compressed states), one each if all differ, fewer where ranks share a KV head. They are held in
    order: rank r of n has part `r * parts // n`."""
    runs: tuple[int, ...] = ()
    """Bytes of the runs of a page that heads cut: each goes on in the next part's page, so that
    the parts joined run by run are the page of one rank alone. Empty: they cannot be joined."""
    prompt_only: bool = False
    """State of decoded tokens differs from what a prefill of them would give (R-SWA)."""

    def __post_init__(self) -> None:
        if self.runs and sum(self.runs) != self.page_bytes:
            raise ValueError(f"runs of {self.runs} bytes are no page: {self!r}")

    @property
    def whole_page_bytes(self) -> int:
        """Useful bytes of a page of all parts."""
        return self.page_bytes * self.parts

    @property
    def bytes_per_token(self) -> float:
        """Useful bytes per token of prefix; 0 for boundary states."""
        if self.state_type.family is Family.BOUNDARY:
            return 0.0
        return self.page_bytes / self.block_tokens

    @property
    def open_block_tokens(self) -> int:
        """For WINDOW: tokens of a compression block, of which the open one's rows are read too.

        1 where nothing is compressed: a window of W tokens has W - 1 before a boundary.
        """
        return max(1, (self.window or 0) - self.boundary_tokens)

    def tokens_needed(self, start: int, boundary: int) -> range:
        """Token positions whose state an artifact over [start, boundary) holds.

        For boundary states `start` is ignored: the answer depends on the boundary
        alone. Empty when nothing is needed.
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
        """Indices into the request's block table of the pages holding those tokens."""
        tokens = self.tokens_needed(start, boundary)
        if not tokens:
            return range(0)
        return range(tokens.start // self.block_tokens, -(-tokens.stop // self.block_tokens))


@dataclass(frozen=True)
class ModelSpec:
    """Every cache layer of a model on one rank, and the token grid restores must respect."""

    layers: tuple[LayerSpec, ...]
    alignment: int
    """Tokens: a prefix may be resumed only at a multiple of this (lcm of block sizes)."""
    tp_size: int = 1
    exact_handoffs: bool = False
    """Whether state is kept of boundaries anywhere; else only where it takes no more room than
    at a multiple of `alignment`: see `handoff_step`."""

    def __post_init__(self) -> None:
        if self.alignment <= 0 or self.tp_size <= 0:
            raise ValueError(f"alignment and tp_size must be positive, got {self!r}")
        for layer in self.layers:
            if layer.parts <= 0 or self.tp_size % layer.parts:
                raise ValueError(f"{self.tp_size} ranks cannot hold {layer.parts} parts: {layer}")

    @cached_property
    def stored_layers(self) -> tuple[LayerSpec, ...]:
        """Layers that have anything to store."""
        return tuple(
            layer
            for layer in self.layers
            if layer.restore_rule is not RestoreRule.NOTHING
            and (layer.restore_rule is not RestoreRule.WINDOW or self._is_read(layer))
        )

    def _is_read(self, layer: LayerSpec) -> bool:
        """Whether a boundary that is kept may need anything of a window."""
        return bool(layer.boundary_tokens) or (self.exact_handoffs and layer.open_block_tokens > 1)

    @cached_property
    def handoff_step(self) -> int:
        """Tokens: a prompt that is handed off may be resumed at multiples of this.

        The engine's grid (`alignment`) binds its own prefix cache only. At a multiple of the
        boundary states' blocks and of their compression blocks they take as many pages as on
        that grid, and what is dead there is dead here. Recurrent state exists on the grid alone.
        """
        boundary = [x for x in self.layers if x.restore_rule in _BOUNDARY_RULES]
        if any(x.restore_rule is RestoreRule.AT_BOUNDARY for x in boundary):
            return self.alignment
        if self.exact_handoffs:
            return 1
        step = math.lcm(*(math.lcm(x.block_tokens, x.open_block_tokens) for x in boundary))
        return self.alignment if self.alignment % step else step

    def handoff_end(self, prompt_tokens: int) -> int:
        """Where a prompt is resumed that was handed off: before its last token, or just before."""
        last = prompt_tokens - 1
        return last - last % self.handoff_step

    @cached_property
    def state_types(self) -> tuple[StateType, ...]:
        """State types that are stored, in the order of the `StateType` enum."""
        present = {layer.state_type for layer in self.stored_layers}
        return tuple(t for t in StateType if t in present)

    @cached_property
    def prefix_types(self) -> tuple[StateType, ...]:
        """Stored types needed for every token before a boundary."""
        return tuple(t for t in self.state_types if t.family is Family.PREFIX)

    @cached_property
    def boundary_types(self) -> tuple[StateType, ...]:
        """Stored types needed only at a boundary."""
        return tuple(t for t in self.state_types if t.family is Family.BOUNDARY)

    def boundary_types_at(self, boundary: int) -> tuple[StateType, ...]:
        """Those of `boundary_types` of which something is needed at this boundary, in tokens.

        Of chunked local attention nothing is where a local chunk begins, of compressors nothing
        where no block is open. Such a state is not stored there, and not missed.
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
        """All types that a chunk which ends at this boundary must hold to be resumed there."""
        return self.prefix_types + self.boundary_types_at(boundary)

    def is_complete(self, held: Set[StateType], boundary: int) -> bool:
        """Whether a chunk that ends at this boundary and holds these types has all it must."""
        return held >= set(self.types_at(boundary))

    @cached_property
    def _needed_at_times(self) -> frozenset[StateType]:
        """Boundary types of which nothing is needed at some boundaries."""
        always = {
            layer.state_type
            for layer in self.stored_layers
            if layer.restore_rule is RestoreRule.AT_BOUNDARY
            or (layer.restore_rule is RestoreRule.WINDOW and layer.boundary_tokens)
        }
        return frozenset(self.boundary_types).difference(always)

    @cached_property
    def prompt_only(self) -> bool:
        """Whether only state of prompt tokens may be stored."""
        return any(layer.prompt_only for layer in self.stored_layers)

    def layers_of(self, state_type: StateType) -> Iterator[LayerSpec]:
        """Stored layers of one state type, in model order."""
        return (layer for layer in self.stored_layers if layer.state_type is state_type)

    @cached_property
    def page_groups(self) -> dict[StateType, tuple[LayerSpec, ...]]:
        """For each stored type, one layer per cache group: the one that needs most pages.

        Layers of a group share a block table, so page ranges are a matter of the group.
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
        """As JSON values, for `from_plain`."""
        return asdict(self)

    @classmethod
    def from_plain(cls, document: Mapping[str, Any]) -> ModelSpec:
        """From what `as_plain` gave. Raises KeyError, TypeError or ValueError for anything else."""
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

    def default_chunk_tokens(self, at_least: int = 256) -> int:
        """The smallest multiple of the alignment that is at least `at_least` tokens."""
        return math.ceil(at_least / self.alignment) * self.alignment
