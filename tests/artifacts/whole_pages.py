"""Pages as vLLM's ranks hold them, cut from whole ones by numpy: the reference for TP layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from hetero_connector.spec.attention_layers import delta_net_runs

Bytes = npt.NDArray[np.uint8]
TP_SIZES = (1, 2, 4, 8)


def heads_of(total: int, tp_size: int, rank: int) -> slice:
    """The heads of a rank: vLLM shares them out, or has each on several ranks."""
    if total >= tp_size:
        return slice(rank * total // tp_size, (rank + 1) * total // tp_size)
    head = rank // (tp_size // total)
    return slice(head, head + 1)


@dataclass(frozen=True)
class Attention:
    """A layer of `heads` KV heads; 0: one latent that all ranks hold."""

    name: str
    heads: int
    head_bytes: int
    """Bytes of one head in one page: keys and values of its tokens."""
    state_type: StateType = StateType.DENSE_KV
    group: int = 0
    window: int | None = None

    def spec(self, tp_size: int) -> LayerSpec:
        held = max(1, self.heads // tp_size)
        return LayerSpec(
            layer=self.name,
            group=self.group,
            state_type=self.state_type,
            tokens_per_state=1,
            block_tokens=16,
            page_bytes=held * self.head_bytes,
            page_stride_bytes=held * self.head_bytes + 64 * tp_size,
            dtype="uint8",
            restore_rule=RestoreRule.WINDOW if self.window else RestoreRule.EVERY_TOKEN,
            window=self.window,
            boundary_tokens=self.window - 1 if self.window else 0,
            parts=min(max(1, self.heads), tp_size),
            runs=(held * self.head_bytes,),
        )

    @property
    def whole_bytes(self) -> int:
        return max(1, self.heads) * self.head_bytes

    def part(self, whole: Bytes, tp_size: int, rank: int) -> Bytes:
        """`[pages, bytes]` of a rank from `[pages, whole bytes]`."""
        heads = whole.reshape(len(whole), -1, self.head_bytes)
        own = heads_of(self.heads, tp_size, rank) if self.heads else slice(None)
        return heads[:, own].reshape(len(whole), -1)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: queries, keys and values row by row, then a state for each value head."""

    name: str
    key_heads: int
    value_heads: int
    key_bytes: int
    """Bytes of one head in one row of the convolution's state."""
    value_bytes: int
    state_bytes: int
    """Bytes of one value head's state."""
    rows: int = 3
    group: int = 0
    state_type: StateType = StateType.RECURRENT

    def spec(self, tp_size: int) -> LayerSpec:
        runs = delta_net_runs(
            self.rows,
            self.key_heads // tp_size * self.key_bytes,
            self.value_heads // tp_size * self.value_bytes,
            self.value_heads // tp_size * self.state_bytes,
        )
        return LayerSpec(
            layer=self.name,
            group=self.group,
            state_type=StateType.RECURRENT,
            tokens_per_state=1,
            block_tokens=32,
            page_bytes=sum(runs),
            page_stride_bytes=sum(runs) + 64 * tp_size,
            dtype="uint8",
            restore_rule=RestoreRule.AT_BOUNDARY,
            parts=tp_size,
            runs=runs,
        )

    @property
    def whole_bytes(self) -> int:
        return self.spec(1).page_bytes

    def part(self, whole: Bytes, tp_size: int, rank: int) -> Bytes:
        """Return the rank's part, as `Attention.part` does: each tensor is cut by its own heads."""
        sections = [
            (self.key_heads, self.key_bytes),
            (self.key_heads, self.key_bytes),
            (self.value_heads, self.value_bytes),
        ]
        own, at = [], 0
        for heads, size in [*(sections * self.rows), (self.value_heads, self.state_bytes)]:
            tensor = whole[:, at : at + heads * size].reshape(len(whole), heads, size)
            own.append(tensor[:, heads_of(heads, tp_size, rank)].reshape(len(whole), -1))
            at += heads * size
        return np.concatenate(own, axis=1)


Layer = Attention | DeltaNet
LAYERS: tuple[Layer, ...] = (
    Attention("full.a", 8, 24),
    Attention("full.b", 4, 40),
    Attention("mla", 0, 56, StateType.MLA_LATENT, 1),
    Attention("csa", 0, 16, StateType.COMPRESSED_CSA_MAIN, 1),
    Attention("index", 0, 8, StateType.COMPRESSED_CSA_INDEX, 1),
    Attention("swa", 2, 48, StateType.WINDOW_SWA, 2, window=40),
    Attention("tail", 0, 32, StateType.TAIL_STATE, 3, window=17),
    DeltaNet("delta", 8, 16, 8, 16, 40, group=4),
)
"""All kinds of cuts: heads on one rank, heads on several, equal on all ranks, run by run."""


def model_of(tp_size: int, layers: tuple[Layer, ...] = LAYERS) -> ModelSpec:
    return ModelSpec(tuple(x.spec(tp_size) for x in layers), alignment=32, tp_size=tp_size)


def unknown_cut(layer: LayerSpec) -> LayerSpec:
    """The layer as geometry tells one whose heads it does not know."""
    return replace(layer, runs=())
