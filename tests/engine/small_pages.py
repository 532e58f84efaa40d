"""A model of a few layers with pages of a few bytes, for tests that look at every token's state."""

from __future__ import annotations

import torch

from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
CHUNK, MAX_TOKENS, NUM_BLOCKS, WINDOW = 32, 160, 64, 20
TOKEN_BYTES, BLOCK_BYTES = 4, 64
NEVER_ASKS, LEFT_OUT = "aux", "draft"
"""Layers that call no hook, and layers that a step may leave out."""


def spec(name: str, group: int, block: int, window: int | None = None) -> LayerSpec:
    return LayerSpec(
        layer=name,
        group=group,
        state_type=SWA if window else KV,
        tokens_per_state=1,
        block_tokens=block,
        page_bytes=block * TOKEN_BYTES,
        page_stride_bytes=BLOCK_BYTES,
        dtype="uint8",
        restore_rule=RestoreRule.WINDOW if window else RestoreRule.EVERY_TOKEN,
        window=window,
        boundary_tokens=window - 1 if window else 0,
    )


MODEL = ModelSpec(
    (
        spec("full", 0, 16),
        spec("swa", 1, 8, WINDOW),
        spec(NEVER_ASKS, 0, 16),
        spec("late", 0, 16),
        spec(LEFT_OUT, 0, 16),
    ),
    alignment=16,
    exact_handoffs=True,
)


def page_caches(model: ModelSpec = MODEL) -> dict[str, torch.Tensor]:
    """The pages of each layer, `[blocks, block_tokens, TOKEN_BYTES] uint8`.

       The first layers of two groups share
    memory, as in vLLM: a freed block becomes one of the other.
    """
    shared = torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    caches = {}
    for x in model.layers:
        raw = shared if x.layer in ("full", "swa") else torch.zeros_like(shared)
        shape = (NUM_BLOCKS, x.block_tokens, TOKEN_BYTES)
        caches[x.layer] = raw.as_strided(shape, (BLOCK_BYTES, TOKEN_BYTES, 1))
    return caches
