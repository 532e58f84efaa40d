"""Cost models from public figures of accelerators and models: the planner's own classes.

Peak figures are never reached: `Hardware` has the shares of its operations that engines reach, by
published measurements, and `Sustained` those of everything else. A profile from `heterocache
calibrate` replaces them by what one machine really does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import ComputeRegression, InterferenceRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec.model_spec import ModelSpec
from ownership.simulator.machine.roofline import Roofline

_GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """One accelerator of a node. Bytes and operations per second, peak, one direction."""

    flops_16: float
    """bfloat16, dense."""
    share_16: float
    """Share of them that prefills reach."""
    flops_8: float
    """FP8, dense; the same as bfloat16 where there is no FP8."""
    share_8: float
    hbm_bytes: float
    hbm_bandwidth: float
    pcie_bandwidth: float
    """To the host's memory."""
    nvlink_bandwidth: float
    """Between the accelerators of a node."""
    rdma_bandwidth: float
    """One network adapter for each accelerator, as in the vendors' eight-way nodes."""
    ssd_read_bandwidth: float
    """One NVMe drive for each accelerator."""


H200 = Hardware(
    989e12, 0.5, 1979e12, 0.15, 141 * _GB, 4.8e12, 64 * _GB, 450 * _GB, 50 * _GB, 13 * _GB
)
"""NVIDIA H200 Tensor Core GPU data sheet, SXM (989.5 TFLOPS is half of the sparse figure; PCIe 5.0
x16; NVLink 900 GB/s both ways). ConnectX-7 data sheet: 400 Gb/s. Samsung PM1743, announced in
December 2021: 13,000 MB/s.

Shares: 0.5 by llm-d's recompute times of gpt-oss-120b on one H200 (guides/p2p-kv-cache-sharing);
0.15 between the totals of single nodes with DeepSeek R1 and V3.2 (16,000 to 28,000 tokens a second:
GPUStack's performance lab) and large expert-parallel fleets (about 32,000: DeepSeek's overview of
its inference system)."""

H20 = Hardware(148e12, 0.8, 296e12, 0.6, 96 * _GB, 4.0e12, 64 * _GB, 450 * _GB, 50 * _GB, 13 * _GB)
"""NVIDIA HGX H20 as published by resellers and press (no public data sheet): 148 TFLOPS, 296 in
FP8, 96 GB, 4.0 TB/s. Network and drive as with H200.

Shares: 0.6 by 16,500 prefilled tokens a second of DeepSeek-V3 on a node (SGLang and Ant Group); 0.8
is an estimate: memory is fast and the peak low."""

A100 = Hardware(
    312e12, 0.5, 312e12, 0.5, 80 * _GB, 2.039e12, 32 * _GB, 300 * _GB, 25 * _GB, 6.8 * _GB
)
"""NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM (PCIe 4.0 x16, NVLink 600 GB/s both ways; no
FP8). ConnectX-6 data sheet: 200 Gb/s. Samsung PM9A3 data sheet: 6,800 MB/s. Shares: estimates."""

HARDWARE: Mapping[str, Hardware] = {"h200": H200, "h20": H20, "a100": A100}


@dataclass(frozen=True)
class Sustained:
    """Assumed shares of the peaks, and fixed times in seconds. Estimates without a source."""

    memory: float = 0.8
    """Share of the HBM bandwidth while decoding."""
    links: float = 0.8
    """Share of PCIe, network, drive and NVLink."""
    memory_for_pages: float = 0.9
    """Share of HBM for weights and KV pages: vLLM's default `gpu_memory_utilization`."""
    layer_s: float = 3e-5
    """Seconds to launch a layer, whatever is in the step."""
    expert_layer_s: float = 1.5e-4
    """The same of a layer with experts."""
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
    layers: int
    width: int
    """Hidden size."""
    is_8_bit: bool = False
    """True if matrix products are computed in FP8."""


COMPUTE: Mapping[str, ModelCompute] = {
    # Released sizes (model cards); pairs by the configuration in `spec.presets`. DeepSeek-V4's
    # indexer scores every fourth token with 64 heads of 128; heavy compression attends to every
    # 128th with 64 (Pro: 128) heads of 512. What is selected does not grow with the context.
    # gpt-oss: MXFP4 weights, computed in bfloat16 before Blackwell.
    "deepseek-v4-flash": ModelCompute(284e9, 13e9, 0.56, 1.07e5, 43, 4096, is_8_bit=True),
    "deepseek-v4-pro": ModelCompute(1.6e12, 49e9, 0.54, 1.86e5, 61, 7168, is_8_bit=True),
    "gemma-3-27b": ModelCompute(27e9, 27e9, 2.0, 4.0 * 10 * 32 * 128, 62, 5376),
    "gpt-oss-120b": ModelCompute(117e9, 5.1e9, 0.55, 4.0 * 18 * 64 * 64, 36, 2880),
    "qwen3-coder-30b-a3b": ModelCompute(30.5e9, 3.3e9, 2.0, 4.0 * 48 * 32 * 128, 48, 2048),
    "llama-3.1-8b": ModelCompute(8.0e9, 8.0e9, 2.0, 4.0 * 32 * 32 * 128, 32, 4096),
    "llama-3.1-70b": ModelCompute(70.6e9, 70.6e9, 2.0, 4.0 * 80 * 64 * 128, 80, 8192),
    "qwen3-next-80b-a3b": ModelCompute(80e9, 3e9, 2.0, 4.0 * 12 * 16 * 256, 48, 2048),
    "deepseek-v3": ModelCompute(
        671e9, 37e9, 1.0, 2.0 * 61 * 128 * (192 + 128), 61, 7168, is_8_bit=True
    ),
}
"""The presets of `spec` by name."""


def roofline_of(hardware: Hardware, gpus: int, model: ModelSpec, compute: ModelCompute) -> Roofline:
    """Return the step times of `gpus` accelerators in tensor parallel, by their figures.

    A token costs 2 operations per active parameter, a pair of tokens `pair_flops`; a decode reads
    the state of its context. Each layer sums the hidden states of all accelerators twice, and a
    sum sends 2 (gpus - 1) / gpus times their bytes in bfloat16.
    """
    sustained, is_dense = SUSTAINED, compute.active_parameters == compute.parameters
    flops = gpus * hardware.flops_16 * hardware.share_16
    products = gpus * hardware.flops_8 * hardware.share_8 if compute.is_8_bit else flops
    memory = gpus * hardware.hbm_bandwidth * sustained.memory
    summed_bytes = 2.0 * compute.layers * compute.width * 2.0 * 2.0 * (gpus - 1) / gpus
    layer_s = sustained.layer_s if is_dense else sustained.expert_layer_s
    return Roofline(
        launch_s=compute.layers * layer_s,
        weights_s=compute.parameters * compute.weight_bytes / memory,
        used_share=compute.active_parameters / compute.parameters,
        token_s=2.0 * compute.active_parameters / products,
        exchange_s=summed_bytes / (hardware.nvlink_bandwidth * sustained.links),
        pair_s=compute.pair_flops / flops,
        context_s=model.tp_size * model.bytes_per_token / memory,
    )


def derived_costs(
    hardware: Hardware, gpus: int, model: ModelSpec, roofline: Roofline, step_tokens: int
) -> CostModel:
    """Return the cost model of `gpus` accelerators: lines fitted to a roofline, and their links."""
    sustained = SUSTAINED
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
    coefficients, delays = roofline.lines(step_tokens)
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
