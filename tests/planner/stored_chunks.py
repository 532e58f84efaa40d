"""Stored chunks, by the tiers of their state."""

from __future__ import annotations

from hetero_connector.artifacts.record import ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType

CHUNK = 64


def layer(state_type: StateType, group: int) -> LayerSpec:
    window = state_type is StateType.WINDOW_SWA
    return LayerSpec(
        layer=f"layers.{group}",
        group=group,
        state_type=state_type,
        tokens_per_state=1,
        block_tokens=16,
        page_bytes=1024,
        page_stride_bytes=1024,
        dtype="uint8",
        restore_rule=RestoreRule.WINDOW if window else RestoreRule.EVERY_TOKEN,
        window=32 if window else None,
        boundary_tokens=31 if window else 0,
    )


DENSE = ModelSpec((layer(StateType.DENSE_KV, 0),), alignment=16)

HYBRID = ModelSpec((layer(StateType.DENSE_KV, 0), layer(StateType.WINDOW_SWA, 1)), alignment=16)


def stored(
    index: int, *types: StateType, tier: Tier = Tier.DRAM, end: int | None = None
) -> StoredChunk:
    start = index * CHUNK
    key, parent = ChunkKey(bytes([index + 1] * 16)), ChunkKey(bytes([index] * 16))
    return StoredChunk(
        ChunkRange(key, parent, start, end or start + CHUNK), dict.fromkeys(types, tier)
    )


KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
