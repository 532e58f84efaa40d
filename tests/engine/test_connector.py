"""The class that vLLM loads."""

from __future__ import annotations

import pytest

from hetero_connector.connector import HeteroConnector


@pytest.mark.parametrize("layerwise", [{}, {"layerwise": "on"}, {"layerwise": "off"}])
def test_full_cuda_graphs_stay_whatever_this_machine_has(layerwise: dict[str, str]) -> None:
    """vLLM's API server calls this on a machine without the engine's disk and memory."""
    elsewhere = {"ssd_dir": "/proc/no/disk/here", "dram_gib": 1e9, **layerwise}
    assert not HeteroConnector.requires_piecewise_for_cudagraph(elsewhere)
