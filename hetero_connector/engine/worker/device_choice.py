"""Which device copies a model's pages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_connector.engine.worker.devices import Device
from hetero_connector.engine.worker.host_device import HostDevice
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.planner.profile import CopyEngines


def device_of(
    caches: Mapping[str, torch.Tensor], copy_engines: CopyEngines | None = None
) -> Device:
    """Return the device of the pages of all layers, given by layer.

    `copy_engines`: the pages that those of a GPU move; None: none. Raises UnsupportedModelError,
    which names the layer, if they are on several devices, or on one that is neither a CPU nor an
    NVIDIA GPU.
    """
    (first, cache), *_ = caches.items()
    for layer, other in caches.items():
        if other.device != cache.device:
            raise UnsupportedModelError(
                f"layer {layer!r} has its pages on {other.device}, {first!r} on {cache.device}: "
                "HeteroConnector copies to one device only"
            )
    if cache.device.type == "cpu":
        return HostDevice()
    if cache.device.type == "cuda" and torch.version.hip is None:
        from hetero_connector.engine.worker.cuda_device import CudaDevice

        return CudaDevice(cache.device, copy_engines)
    raise UnsupportedModelError(
        f"layer {first!r} has its pages on {cache.device}: HeteroConnector copies to the "
        "memory of CPUs and NVIDIA GPUs only. Serve this model without the connector (drop "
        "--kv-transfer-config)"
    )
