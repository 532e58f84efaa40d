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

    def __init__(self, load: Callable[[], bool], connector: object) -> None:
        self._load = load
        self.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)

    def set_weight_version(self, weight_version: str) -> None: ...

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return self._load()

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[bool]:
        return [self._load()]


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


LORA = LoRARequest("x", 1, "/adapters/x")


def fails() -> bool:
    raise OSError("one of the ranks has failed")


@pytest.mark.parametrize("load", [lambda: True, fails])
@pytest.mark.parametrize(
    ("call", "event"),
    [
        ({"method": "add_lora", "args": (LORA,)}, ("adapter", LORA, None)),
        ({"method": "add_lora", "kwargs": {"lora_request": LORA}}, ("adapter", LORA, None)),
        ({"method": "add_lora", "args": (["x", 1, "/adapters/x"],)}, ("weights", None)),
        ({"method": "sleep", "args": (1,)}, ("weights", None)),
        ({"method": "wake_up"}, None),
    ],
)
def test_a_connector_hears_of_adapters_and_sleep_by_calls_to_the_workers(
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[[], bool],
    call: dict[str, Any],
    event: tuple[object, ...] | None,
) -> None:
    events: list[tuple[object, ...]] = []
    listener = SimpleNamespace(
        on_weights_changed=lambda version: events.append(("weights", version)),
        on_adapter_loaded=lambda lora, digest: events.append(("adapter", lora, digest)),
    )
    monkeypatch.setattr(vllm_core, "EngineCore", type("Observed", (Core,), dict(vars(Core))))
    weight_updates.observe()
    core: Any = vllm_core.EngineCore(load, listener)  # type: ignore[arg-type]
    with suppress(OSError):
        assert core.collective_rpc(**call) == [True]
    assert events == ([] if event is None else [event])


def test_an_engine_without_this_connector_loads_adapters_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_updates, "read_adapter", lambda _: pytest.fail("files were read"))
    monkeypatch.setattr(vllm_core, "EngineCore", type("Observed", (Core,), dict(vars(Core))))
    weight_updates.observe()
    core: Any = vllm_core.EngineCore(lambda: True, object())  # type: ignore[arg-type,call-arg]
    assert core.add_lora(LoRARequest("x", 1, "/nowhere"))
