"""Pages that the connector cannot copy stop the engine at start, with the layer and the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_connector.engine.startup import engine_identity
from hetero_connector.engine.worker import cuda_device
from hetero_connector.engine.worker.device_choice import device_of
from hetero_connector.engine.worker.host_device import HostDevice
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.planner.profile import CopyEngines


def on(device: str) -> Any:
    """Return a tensor's stand-in: this build of torch has no such device."""
    return SimpleNamespace(device=torch.device(device))


def test_pages_in_host_memory_are_copied_by_the_host() -> None:
    assert isinstance(device_of({"a": torch.empty(2), "b": torch.empty(3)}), HostDevice)


def test_pages_on_a_gpu_get_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda *x: made.append(x))
    measured = CopyEngines(load_from_bytes=4096)
    device_of({"a": on("cuda:3"), "b": on("cuda:3")}, measured)
    assert made == [(torch.device("cuda:3"), measured)]


@pytest.mark.parametrize("kind", ["xpu:0", "hpu", "meta"])
def test_another_kind_of_device_is_named(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'a' has its pages on {kind}.*NVIDIA"):
        device_of({"a": on(kind)})


def test_an_amd_gpu_which_torch_calls_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedModelError, match=r"'a' has its pages on cuda:0.*NVIDIA"):
        device_of({"a": on("cuda:0")})


def test_a_layer_on_another_device_than_the_first_is_named() -> None:
    caches = {"a": on("cuda:0"), "b": on("cuda:0"), "host": torch.empty(1)}
    with pytest.raises(UnsupportedModelError, match="'host' has its pages on cpu, 'a' on cuda:0"):
        device_of(caches)


@pytest.mark.parametrize("platform", ["rocm", "xpu", "tpu", "out-of-tree"])
def test_another_platform_of_vllm_is_refused_before_anything_else(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SimpleNamespace(device_name=platform)
    monkeypatch.setattr(engine_identity, "current_platform", there)
    with pytest.raises(UnsupportedModelError, match=f"cpu and cuda, not on.*'{platform}'"):
        engine_identity.check_supported(SimpleNamespace())  # type: ignore[arg-type]
