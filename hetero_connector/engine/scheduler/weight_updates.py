"""Noticing that the engine's weights change while it runs.

The fingerprint is of the files that the engine was started from. Weights that are updated in place
are told apart by the version that vLLM gives them (`finish_weight_update`, `update_weight_version`)
or, until they have one, by a name that nobody else has. vLLM tells a connector nothing of either,
so `observe` puts a thin layer over two methods of its `EngineCore`: the calls go through as they
are, and afterwards the engine's own connector hears of them, on the thread that made the call.

Every call to the workers counts as an update, but those of vLLM's own methods that are known to
leave the weights alone: a worker extension's method may be a trainer's. One that shares memory
with a trainer is noticed once; whoever changes the weights through it later resets the cache, or
names their version.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

from hetero_connector.artifacts.canonical import encode
from hetero_connector.errors import UnsupportedVersionError

_OF_FILES = "default"
"""vLLM's version of the weights that an engine starts with."""
_NONCE_BYTES = 16
_OBSERVED = "heterocache_observes"
_HARMLESS = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "sleep",
        "synchronize_device",
        "update_max_model_len",
        "wake_up",
    }
)
"""vLLM's own worker methods that leave the weights as they are, besides `get_...`."""


@dataclass(frozen=True)
class Weights:
    """The name under which state is stored with the engine's weights."""

    version: str = _OF_FILES
    nonce: bytes = b""
    """Random once they may be others than those of `version`; b"": they are those."""

    @property
    def tag(self) -> bytes:
        """For the chain's root; b"" for the weights of the model's files."""
        return b"" if self == Weights() else encode([self.version, self.nonce])

    def unnamed(self) -> Weights:
        """The weights may have changed, and nobody says to which."""
        return replace(self, nonce=secrets.token_bytes(_NONCE_BYTES))

    def agreed(self) -> Weights:
        """The weights are those of the whole fleet that has this version."""
        return replace(self, nonce=b"")


@runtime_checkable
class HearsOfWeights(Protocol):
    """A connector that wants to know."""

    def weights_changed(self, version: str | None) -> None:
        """The weights are `version` now; None: nobody knows which."""
        ...


def observe() -> None:
    """Tell the connector of each engine core in this process. Idempotent.

    Raises UnsupportedVersionError where vLLM has other methods than it had: state of other weights
    would be restored.
    """
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, _OBSERVED):
        setattr(EngineCore, _OBSERVED, True)
        _observe_versions(EngineCore, _method(EngineCore, "set_weight_version"))
        _observe_updates(EngineCore, _method(EngineCore, "collective_rpc"))


def _observe_versions(core: type, original: Callable[..., None]) -> None:
    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> None:
        original(self, weight_version)
        _tell(self, weight_version)

    setattr(core, original.__name__, set_weight_version)


def _observe_updates(core: type, original: Callable[..., Any]) -> None:
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, method, *args, **kwargs)
        finally:  # one that fails may have changed some of them
            if not _is_harmless(method):
                _tell(self, None)

    setattr(core, original.__name__, collective_rpc)


def _is_harmless(method: Any) -> bool:
    return isinstance(method, str) and (method in _HARMLESS or method.startswith("get_"))


def _method(core: type, name: str) -> Callable[..., Any]:
    found = getattr(core, name, None)
    if found is None:
        raise UnsupportedVersionError(
            f"this vLLM's EngineCore has no {name}: an update of its weights would go unnoticed. "
            "Install a vLLM that README names, or a heterocache release that supports this one"
        )
    return cast("Callable[..., Any]", found)


def _tell(core: Any, version: str | None) -> None:
    for connector in _connectors(core):
        connector.weights_changed(version)


def _connectors(core: Any) -> Iterator[HearsOfWeights]:
    """The engine's own, also among several (`MultiConnector`); none while it is being built."""
    scheduler = getattr(core, "scheduler", None)
    found = [] if scheduler is None else [scheduler.get_kv_connector()]
    while found:
        connector = found.pop()
        found += getattr(connector, "_connectors", ())
        if isinstance(connector, HearsOfWeights):
            yield connector
