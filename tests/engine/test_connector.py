"""The class that vLLM loads."""

from __future__ import annotations

import pytest

from hetero_connector.connector import HeteroConnector


@pytest.mark.parametrize(
    ("layerwise", "piecewise"),
    [({}, True), ({"layerwise": "on"}, True), ({"layerwise": "off"}, False)],
)
def test_the_kind_of_cuda_graphs_depends_on_one_key_whatever_this_machine_has(
    layerwise: dict[str, str], piecewise: bool
) -> None:
    """vLLM's API server calls this on a machine without the engine's disk and memory."""
    elsewhere = {"ssd_dir": "/proc/no/disk/here", "dram_gib": 1e9, **layerwise}
    assert HeteroConnector.requires_piecewise_for_cudagraph(elsewhere) is piecewise
