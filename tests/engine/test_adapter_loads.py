"""A connector hears which files of an adapter vLLM has loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine import core as vllm_core

from hetero_connector.engine.scheduler import weight_updates
from hetero_connector.engine.scheduler.request_identifier import read_adapter


class Core:
    """An engine core that loads adapters by `load`."""

    set_weight_version = collective_rpc = lambda self: None

    def __init__(self, load: Callable[[], bool], connector: object) -> None:
        self._load = load
        self.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return self._load()


def heard(
    monkeypatch: pytest.MonkeyPatch, path: Path, load: Callable[[], bool]
) -> list[bytes | None]:
    """Return the digests that a connector hears when `load` loads the adapter at `path`."""
    digests: list[bytes | None] = []
    listener = SimpleNamespace(
        on_weights_changed=lambda _: None,
        on_adapter_loaded=lambda _, digest: digests.append(digest),
    )
    with monkeypatch.context() as patch:
        patch.setattr(vllm_core, "EngineCore", type("Observed", (Core,), dict(vars(Core))))
        weight_updates.observe()
        core: Any = vllm_core.EngineCore(load, listener)  # type: ignore[arg-type]
        with suppress(OSError):
            assert core.add_lora(LoRARequest("x", 1, str(path)))
    return digests


def test_a_connector_hears_which_adapter_was_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "adapter_model.safetensors"

    def write() -> bool:
        weights.write_bytes(b"new")
        return True

    def fail() -> bool:
        raise OSError("one of the ranks has failed")

    assert heard(monkeypatch, tmp_path, lambda: True) == [None], "nothing is there"
    assert heard(monkeypatch, tmp_path, write) == [read_adapter(str(tmp_path))], "vLLM fetched it"
    assert heard(monkeypatch, tmp_path, write) == [read_adapter(str(tmp_path))]
    assert heard(monkeypatch, tmp_path, fail) == [None]
    weights.write_bytes(b"old")
    assert heard(monkeypatch, tmp_path, write) == [None], "either may have been loaded"


def test_an_engine_without_this_connector_loads_adapters_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_updates, "read_adapter", lambda _: pytest.fail("files were read"))
    monkeypatch.setattr(vllm_core, "EngineCore", type("Observed", (Core,), dict(vars(Core))))
    weight_updates.observe()
    core: Any = vllm_core.EngineCore(lambda: True, object())  # type: ignore[arg-type,call-arg]
    assert core.add_lora(LoRARequest("x", 1, "/nowhere"))
