"""Which vLLM versions are accepted, and that vLLM finds the connector by name."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from hetero_connector.engine.plugin import register
from hetero_connector.errors import UnsupportedVersionError
from hetero_connector.supported_vllm import check_version


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.320.0", "1.0", "unknown", ""])
def test_any_other_version_gets_one_clear_line(version: str) -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        check_version(version)
    message = str(caught.value)
    assert "\n" not in message
    assert f"this is {version}" in message
    assert "0.32 and 0.33" in message


def test_the_entry_point_registers_the_connector_once() -> None:
    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "heterocache"]
    assert point.load() is register
    register()
    register()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert KVConnectorFactory.get_connector_class_by_name("HeteroConnector").__name__ == (
        "HeteroConnector"
    )


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a MultiConnector"])
def test_wrong_keys_are_refused_before_anything_is_loaded(inside: bool) -> None:
    """vLLM makes the connector after it has loaded the weights."""
    from vllm.config import KVTransferConfig, VllmConfig

    register()
    keys = {"dram_gb": 1, "chunk_tokens": 0}
    own = {"kv_connector": "HeteroConnector", "kv_role": "kv_both"}
    own["kv_connector_extra_config"] = keys
    if inside:
        children = [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, own]
        own = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        own["kv_connector_extra_config"] = {"connectors": children}
    with pytest.raises(ValueError, match=r"dram_gb.*did you mean 'dram_gib'.*\n.*chunk_tokens"):
        VllmConfig(kv_transfer_config=KVTransferConfig(**own))
    keys.clear()
    assert VllmConfig(kv_transfer_config=KVTransferConfig(**own)).kv_transfer_config
