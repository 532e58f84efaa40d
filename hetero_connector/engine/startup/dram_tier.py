"""The size of the DRAM tier where the configuration does not give one.

On a host with GPUs its memory is there for the engines on it: they take half of what is free, each
its part, and more if one request of the model's maximum length needs more. On a host without,
the model computes in the same memory, so it is a quarter of what is free, 32 GiB at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hetero_connector import machine
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.config import HeteroConfig
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.units import GIB

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LEAST_BYTES = GIB // 16
_MOST_BYTES_WITHOUT_GPU = 32 * GIB
_MOST_BYTES = 256 * GIB
"""To take and pin memory makes the start longer; more must be asked for."""
_LONGEST_SHARE = 3 / 4
"""The longest request may have so much of the free memory, of all engines together."""


def with_dram(
    config: HeteroConfig, layout: ArtifactLayout, vllm_config: VllmConfig
) -> HeteroConfig:
    """Return the configuration with a `dram_gib`: the one given, or what host and model suggest."""
    if config.dram_gib is not None:
        return config
    free_bytes = machine.memory().available_bytes
    if vllm_config.device_config.device_type == "cpu":
        size_bytes = size_without_gpu(free_bytes)
    else:
        longest = bytes_of_prompt(layout, vllm_config.model_config.max_model_len)
        size_bytes = size_with_gpus(free_bytes, longest, engines_on_host(vllm_config))
    return replace(config, dram_gib=size_bytes / GIB)


def size_without_gpu(free_bytes: int) -> int:
    """Return the default size on a host whose memory the model computes in, too."""
    return min(_MOST_BYTES_WITHOUT_GPU, max(_LEAST_BYTES, free_bytes // 4))


def size_with_gpus(free_bytes: int, longest_bytes: int, num_engines: int) -> int:
    """Return the default size for one of the engines on a host with GPUs.

    `longest_bytes`: of the longest request. It may take more than the engine's half, but not all.
    """
    own = min(_MOST_BYTES, free_bytes // 2 // num_engines)
    longest = min(longest_bytes, int(free_bytes * _LONGEST_SHARE) // num_engines)
    return max(_LEAST_BYTES, own, longest)


def tokens_in(layout: ArtifactLayout, size_bytes: int) -> int:
    """Return how many tokens of one prompt with one checkpoint a DRAM tier of that size holds."""
    geometry = SlotGeometry.by_use(layout.max_bytes, size_bytes)
    types = layout.model.prefix_types or layout.model.state_types
    return min(map(geometry.num_slots, types)) * layout.chunk_tokens


def bytes_of_prompt(layout: ArtifactLayout, num_tokens: int) -> int:
    """Return the size of a DRAM tier that holds a prompt of that length, within one percent."""
    types = layout.model.prefix_types or layout.model.state_types
    strides = SlotGeometry.fit(layout.max_bytes, 0).stride_bytes
    size_bytes = -(-num_tokens // layout.chunk_tokens) * sum(strides[t] for t in types)
    size_bytes = max(size_bytes, sum(strides.values()))
    while tokens_in(layout, size_bytes) < num_tokens:
        size_bytes += max(4096, size_bytes // 128)
    return size_bytes


def engines_on_host(vllm_config: VllmConfig) -> int:
    """Return how many engines like this one the host has GPUs for, or has been told to run."""
    parallel = vllm_config.parallel_config
    by_gpus: int = torch.cuda.device_count() // parallel.local_world_size
    return max(1, by_gpus, int(parallel.data_parallel_size_local))
