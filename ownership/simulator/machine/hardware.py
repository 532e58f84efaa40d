"""Accelerators and what they are attached to, by their vendors' figures.

Peak figures are never reached: `SUSTAINED` is the share of each that the simulator assumes, which
a profile from `heterocache calibrate` replaces by what one machine really does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    nvlink_bandwidth: float
    """To the other accelerators of the node, all of it together."""
    rdma_bandwidth: float
    """One network adapter for each accelerator, as in the vendors' eight-way nodes."""
    ssd_read_bandwidth: float
    ssd_write_bandwidth: float
    """One NVMe drive for each accelerator."""


H200 = Hardware(989e12, 141 * _GB, 4.8e12, 64 * _GB, 450 * _GB, 50 * _GB, 13 * _GB, 6.6 * _GB)
"""NVIDIA H200 Tensor Core GPU data sheet, SXM (989.5 TFLOPS is half of the sparse figure; PCIe 5.0
x16; NVLink 900 GB/s both ways). ConnectX-7 data sheet: 400 Gb/s. Samsung PM1743, announced in
December 2021: reads 13,000 MB/s, writes 6,600 MB/s."""

H20 = Hardware(148e12, 96 * _GB, 4.0e12, 64 * _GB, 450 * _GB, 50 * _GB, 13 * _GB, 6.6 * _GB)
"""NVIDIA HGX H20 as published by resellers and press (no public data sheet): 148 TFLOPS, 96 GB,
4.0 TB/s, NVLink 900 GB/s. Network and drive as with H200."""

A100 = Hardware(312e12, 80 * _GB, 2.039e12, 32 * _GB, 300 * _GB, 25 * _GB, 6.8 * _GB, 4.0 * _GB)
"""NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM (PCIe 4.0 x16; NVLink 600 GB/s both ways).
ConnectX-6 data sheet: 200 Gb/s. Samsung PM9A3 data sheet: reads 6,800 MB/s, writes 4,000 MB/s."""

HARDWARE: Mapping[str, Hardware] = {"h200": H200, "h20": H20, "a100": A100}


@dataclass(frozen=True)
class Sustained:
    """Shares of the peaks that are assumed, and fixed times in seconds. No source but judgement."""

    prefill: float = 0.5
    """Of the operations: what large matrix products reach in serving."""
    memory: float = 0.8
    """Of the HBM bandwidth, while decoding."""
    links: float = 0.8
    """Of PCIe, network and drive."""
    memory_for_pages: float = 0.9
    """vLLM's default `gpu_memory_utilization`: of HBM, weights and KV pages together."""
    step_s: float = 1e-3
    """Launching a step, whatever is in it."""
    dram_latency_s: float = 1e-4
    ssd_latency_s: float = 5e-4
    peer_latency_s: float = 1e-3


SUSTAINED = Sustained()
