"""A worker's cost model, by the figures of its hardware and its model: the planner's own."""

from __future__ import annotations

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
from ownership.simulator.machine.hardware import SUSTAINED, Hardware, Sustained
from ownership.simulator.machine.models import ModelCompute

_BATCH = 32
"""Decodes for which the experts that a step reads are counted."""


def derived_costs(
    hardware: Hardware,
    gpus: int,
    model: ModelSpec,
    compute: ModelCompute,
    step_tokens: int,
    sustained: Sustained = SUSTAINED,
) -> CostModel:
    """What `gpus` accelerators in tensor parallel would take, by their figures.

    A token costs 2 operations per active parameter, a pair of tokens `pair_flops`; a step reads
    the weights once and each decode its context's state: the roofline's two sides, added.
    """
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


def page_bytes_of(
    hardware: Hardware, gpus: int, compute: ModelCompute, sustained: Sustained = SUSTAINED
) -> int:
    """What is left for KV pages on one rank beside its share of the weights; may be negative."""
    weights = compute.parameters * compute.weight_bytes / gpus
    return int(hardware.hbm_bytes * sustained.memory_for_pages - weights)


def write_bandwidth_of(
    hardware: Hardware | None, gpus: int, costs: CostModel, sustained: Sustained = SUSTAINED
) -> float:
    """Bytes per second written to SSD; with a profile, which knows reads only, as fast as those."""
    if hardware is not None:
        return gpus * hardware.ssd_write_bandwidth * sustained.links
    ahead_s_per_byte = costs.load.rates(Tier.SSD).ahead_s_per_byte
    return 1.0 / ahead_s_per_byte if ahead_s_per_byte else float("inf")
