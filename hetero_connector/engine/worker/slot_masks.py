"""Protect pages from the forward's writes: their entries in vLLM's slot mappings become -1.

A slot mapping has, for each token of the batch, the slot that its state is written to:
`block_id * slots_per_block + offset`. -1 is vLLM's own mark for padding, which its kernels skip. A
layer that compresses has a second mapping, with one slot for each state, and -1 for tokens that do
not complete a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hetero_connector.spec import LayerSpec


def protect(
    layers: Iterable[LayerSpec],
    blocks: Mapping[int, list[int]],
    slot_mapping: Mapping[str, torch.Tensor],
    attention: Mapping[str, Any] | None,
) -> None:
    """Mask `blocks` (block ids by KV cache group) for this step, in place.

    `slot_mapping` is the forward context's, in tokens, and `attention` its attention metadata, both
    by layer. Backends read one or the other; without compression both are one tensor, shared by a
    group. Raises RuntimeError for a layer that has neither: its stored state would be overwritten.
    """
    masked: set[int] = set()
    for layer in layers:
        if not blocks.get(layer.group):
            continue
        raw = slot_mapping.get(layer.layer)
        own = getattr((attention or {}).get(layer.layer), "slot_mapping", None)
        if raw is None and own is None:
            raise RuntimeError(
                f"layer {layer.layer!r} has no slot mapping in this vLLM version, so its "
                "stored state cannot be kept from being overwritten; please report it"
            )
        states = layer.block_tokens // layer.tokens_per_state
        for mapping, slots_per_block in ((raw, layer.block_tokens), (own, states)):
            if mapping is not None and mapping.data_ptr() not in masked:
                masked.add(mapping.data_ptr())
                _mask(mapping, slots_per_block, blocks[layer.group])


def _mask(mapping: torch.Tensor, slots_per_block: int, blocks: list[int]) -> None:
    """Mask the slots of blocks. `mapping` has shape `[num_tokens]`. Never waits for the device."""
    ids = torch.tensor(blocks, pin_memory=mapping.is_cuda).to(mapping.device, non_blocking=True)
    last = max(blocks) + 1
    is_masked = torch.zeros(last + 1, dtype=torch.bool, device=mapping.device)
    is_masked.index_fill_(0, ids, True)
    block_of_token = torch.div(mapping, slots_per_block, rounding_mode="floor")
    # Other blocks, and -1, get the last entry, which is false.
    mapping.masked_fill_(is_masked[block_of_token.clamp_(max=last).long()], -1)
