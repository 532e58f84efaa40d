"""Cost models from public figures of accelerators and models: the planner's own classes.

Peak figures are never reached. `Sustained` is the share of each that the simulator assumes; a
profile from `heterocache calibrate` replaces them by what one machine really does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec.model_spec import ModelSpec

_GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """One accelerator of a node. Bytes and operations per second, peak, one direction."""

    flops: float
    """bfloat16, dense."""
    hbm_bytes: float
    hbm_bandwidth: float
    pcie_bandwidth: float
    """To the host's memory."""
    rdma_bandwidth: float
    """One network adapter for each accelerator, as in the vendors' eight-way nodes."""
    ssd_read_bandwidth: float
    """One NVMe drive for each accelerator."""


H200 = Hardware(989e12, 141 * _GB, 4.8e12, 64 * _GB, 50 * _GB, 13 * _GB)
"""NVIDIA H200 Tensor Core GPU data sheet, SXM (989.5 TFLOPS is half of the sparse figure; PCIe 5.0
x16). ConnectX-7 data sheet: 400 Gb/s. Samsung PM1743, announced in December 2021: 13,000 MB/s."""

H20 = Hardware(148e12, 96 * _GB, 4.0e12, 64 * _GB, 50 * _GB, 13 * _GB)
"""NVIDIA HGX H20 as published by resellers and press (no public data sheet): 148 TFLOPS, 96 GB,
4.0 TB/s. Network and drive as with H200."""

A100 = Hardware(312e12, 80 * _GB, 2.039e12, 32 * _GB, 25 * _GB, 6.8 * _GB)
"""NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM (PCIe 4.0 x16). ConnectX-6 data sheet:
200 Gb/s. Samsung PM9A3 data sheet: 6,800 MB/s."""

HARDWARE: Mapping[str, Hardware] = {"h200": H200, "h20": H20, "a100": A100}


@dataclass(frozen=True)
class Sustained:
    """Assumed shares of the peaks, and fixed times in seconds. Estimates without a source."""

    prefill: float = 0.5
    """Share of the operations that large matrix products reach."""
    memory: float = 0.8
    """Share of the HBM bandwidth while decoding."""
    links: float = 0.8
    """Share of PCIe, network and drive."""
    memory_for_pages: float = 0.9
    """Share of HBM for weights and KV pages: vLLM's default `gpu_memory_utilization`."""
    step_s: float = 1e-3
    """Seconds to launch a step, whatever is in it."""
    dram_latency_s: float = 1e-4
    ssd_latency_s: float = 5e-4
    peer_latency_s: float = 1e-3


SUSTAINED = Sustained()


class ModelCompute(NamedTuple):
    """The figures of a model that decide how long a step takes."""

    parameters: float
    active_parameters: float
    """Parameters used for each token."""
    weight_bytes: float
    """Bytes of one parameter, as released."""
    pair_flops: float
    """Operations for each pair of a token and a token it attends to: 2 heads (key width + value
    width) per layer with full attention."""

    def weights_read(self, tokens: float) -> float:
        """Return the bytes of weights that a step of `tokens` tokens reads.

        Experts are taken to be drawn independently.
        """
        unused: float = (1.0 - self.active_parameters / self.parameters) ** max(1.0, tokens)
        return self.weight_bytes * self.parameters * (1.0 - unused)


COMPUTE: Mapping[str, ModelCompute] = {
    # Released sizes (model cards); pairs by the configuration in `spec.presets`. DeepSeek-V4's
    # indexer scores every fourth token with 64 heads of 128; heavy compression attends to every
    # 128th with 64 (Pro: 128) heads of 512. What is selected does not grow with the context.
    "deepseek-v4-flash": ModelCompute(284e9, 13e9, 0.56, 1.07e5),
    "deepseek-v4-pro": ModelCompute(1.6e12, 49e9, 0.54, 1.86e5),
    "gemma-3-27b": ModelCompute(27e9, 27e9, 2.0, 4.0 * 10 * 32 * 128),
    "gpt-oss-120b": ModelCompute(117e9, 5.1e9, 0.55, 4.0 * 18 * 64 * 64),
    "qwen3-coder-30b-a3b": ModelCompute(30.5e9, 3.3e9, 2.0, 4.0 * 48 * 32 * 128),
    "llama-3.1-8b": ModelCompute(8.0e9, 8.0e9, 2.0, 4.0 * 32 * 32 * 128),
    "llama-3.1-70b": ModelCompute(70.6e9, 70.6e9, 2.0, 4.0 * 80 * 64 * 128),
    "qwen3-next-80b-a3b": ModelCompute(80e9, 3e9, 2.0, 4.0 * 12 * 16 * 256),
    "deepseek-v3": ModelCompute(671e9, 37e9, 1.0, 2.0 * 61 * 128 * (192 + 128)),
}
"""The presets of `spec` by name."""

_BATCH = 32
"""Decodes of a step, for the number of experts that it reads."""


def derived_costs(
    hardware: Hardware, gpus: int, model: ModelSpec, compute: ModelCompute, step_tokens: int
) -> CostModel:
    """Return the cost model of `gpus` accelerators in tensor parallel, by their figures.

    A token costs 2 operations per active parameter, a pair of tokens `pair_flops`; a step reads
    the weights once, and each decode the state of its context. The two sides of the roofline are
    added.
    """
    sustained = SUSTAINED
    flops = gpus * hardware.flops * sustained.prefill
    memory = gpus * hardware.hbm_bandwidth * sustained.memory
    token_s, pair_s = 2.0 * compute.active_parameters / flops, compute.pair_flops / flops
    step_s = sustained.step_s + compute.weights_read(_BATCH) / memory
    context_s = model.tp_size * model.bytes_per_token / memory
    per_byte = {
        Tier.DRAM: 1.0 / (gpus * hardware.pcie_bandwidth * sustained.links),
        Tier.SSD: 1.0 / (gpus * hardware.ssd_read_bandwidth * sustained.links),
        Tier.PEER: 1.0 / (gpus * hardware.rdma_bandwidth * sustained.links),
    }
    latency_s = {
        Tier.DRAM: sustained.dram_latency_s,
        Tier.SSD: sustained.ssd_latency_s,
        Tier.PEER: sustained.peer_latency_s,
    }
    rates = {
        tier: TierRates(latency_s[tier], dict.fromkeys(model.state_types, s), s)
        for tier, s in per_byte.items()
    }
    coefficients = ComputeCoefficients(step_s, token_s, pair_s)
    delays = InterferenceCoefficients(step_s, token_s, context_s, 0.0, token_s, pair_s)
    return CostModel(
        ComputeRegression(coefficients),
        LoadModel(model.state_types, rates),
        step_tokens=step_tokens,
        interference=InterferenceRegression(delays, coefficients),
    )


def page_bytes_of(hardware: Hardware, gpus: int, compute: ModelCompute) -> int:
    """Return the bytes left for KV pages on one rank; negative if the weights are too large."""
    weights = compute.parameters * compute.weight_bytes / gpus
    return int(hardware.hbm_bytes * SUSTAINED.memory_for_pages - weights)
