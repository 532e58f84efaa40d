"""Notify the connector when the engine's weights change while it runs.

The fingerprint describes the files that the engine was started from. Weights that are updated in
place are named by the version that vLLM gives them (`finish_weight_update`,
`update_weight_version`) or, until they have one, by a random number. Adapters are loaded before the
first request that needs them. vLLM does not notify a connector of any of this, so `observe` wraps
three methods of its `EngineCore`: the call itself is unchanged, and afterwards the engine's
connector is notified on the same thread.

Every call to the workers counts as an update, except vLLM's own methods that are known to leave the
weights alone: a method of a worker extension may be a trainer's. An adapter that such a call loads
has unknown content. A call that shares memory with a trainer is noticed once. When the weights
later change through that memory, the trainer must reset the cache or set a version.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from hetero_connector.artifacts.canonical import encode
from hetero_connector.engine.scheduler.request_identifier import read_adapter
from hetero_connector.errors import IdentityError, UnsupportedVersionError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_OF_FILES = "default"
"""vLLM's version of the weights that an engine starts with."""
_NONCE_BYTES = 16
_OBSERVED = "heterocache_observes"
_HARMLESS = frozenset(
    {
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
        "synchronize_device",
        "update_max_model_len",
        "wake_up",
    }
)
"""Worker methods of vLLM that do not change the weights; those named `get_...` do not either."""


@dataclass(frozen=True)
class Weights:
    """The name under which state is stored with the engine's weights."""

    version: str = _OF_FILES
    nonce: bytes = b""
    """A random number if the weights may have changed since they had `version`; else b""."""

    @property
    def tag(self) -> bytes:
        """The weights' part of the chain's root; b"" for the weights of the model's files."""
        return b"" if self == Weights() else encode([self.version, self.nonce])

    def with_nonce(self) -> Weights:
        """Return a new name: the weights have changed to an unknown version."""
        return replace(self, nonce=secrets.token_bytes(_NONCE_BYTES))

    def without_nonce(self) -> Weights:
        """Return the name that all engines with this version share."""
        return replace(self, nonce=b"")


@runtime_checkable
class WeightsListener(Protocol):
    """A connector that is notified of new weights."""

    def on_weights_changed(self, version: str | None) -> None:
        """Handle that the weights have `version` now; None: an unknown one."""
        ...

    def on_adapter_loaded(self, lora: LoRARequest, digest: bytes | None) -> None:
        """Handle that vLLM has loaded an adapter; `digest` is None if its content is unknown."""
        ...


def observe() -> None:
    """Wrap vLLM's methods so that connectors in this process are notified. Idempotent.

    Raises UnsupportedVersionError if vLLM lacks one of the methods: state of other weights would
    be restored.
    """
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, _OBSERVED):
        setattr(EngineCore, _OBSERVED, True)
        _observe_versions(EngineCore, _method(EngineCore, "set_weight_version"))
        _observe_updates(EngineCore, _method(EngineCore, "collective_rpc"))
        _observe_adapters(EngineCore, _method(EngineCore, "add_lora"))


def _observe_versions(core: type, original: Callable[..., None]) -> None:
    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str) -> None:
        original(self, weight_version)
        _notify(self, weight_version)

    setattr(core, original.__name__, set_weight_version)


def _observe_updates(core: type, original: Callable[..., Any]) -> None:
    @functools.wraps(original)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return original(self, method, timeout, args, kwargs)
        finally:  # a call that fails may have changed some of the weights
            loras = _adapters_in(args, kwargs or {}) if method == "add_lora" else []
            for lora in loras:
                for listener in _listeners(self):
                    listener.on_adapter_loaded(lora, None)
            if not (loras or _is_harmless(method)):
                _notify(self, None)

    setattr(core, original.__name__, collective_rpc)


def _adapters_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[LoRARequest]:
    from vllm.lora.request import LoRARequest

    return [x for x in (*args, *kwargs.values()) if isinstance(x, LoRARequest)]


def _observe_adapters(core: type, original: Callable[..., bool]) -> None:
    @functools.wraps(original)
    def add_lora(self: Any, lora_request: LoRARequest) -> bool:
        listeners = list(_listeners(self))
        if not listeners:
            return original(self, lora_request)
        before, digest = _digest(lora_request), None
        try:
            is_loaded = original(self, lora_request)
            after = _digest(lora_request)
            if before in (None, after):  # None: the load itself has fetched the files
                digest = after
        finally:  # a call that fails may have loaded it on some ranks
            for listener in listeners:
                listener.on_adapter_loaded(lora_request, digest)
        return is_loaded

    setattr(core, original.__name__, add_lora)


def _digest(lora: LoRARequest) -> bytes | None:
    try:
        return read_adapter(str(lora.lora_path))
    except (IdentityError, OSError):
        return None


def _is_harmless(method: Any) -> bool:
    return isinstance(method, str) and (method in _HARMLESS or method.startswith("get_"))


def _method(core: type, name: str) -> Callable[..., Any]:
    found = getattr(core, name, None)
    if found is None:
        raise UnsupportedVersionError(
            f"this vLLM's EngineCore has no {name}: an update of its weights would not be noticed. "
            "Install a vLLM version that the README names, or a heterocache release that supports "
            "this one"
        )
    return cast("Callable[..., Any]", found)


def _notify(core: Any, version: str | None) -> None:
    for listener in _listeners(core):
        listener.on_weights_changed(version)


def _listeners(core: Any) -> Iterator[WeightsListener]:
    return (x for x in connectors_of(core) if isinstance(x, WeightsListener))


def connectors_of(core: Any) -> Iterator[object]:
    """Yield an engine core's connector, also those in a `MultiConnector`; none at its start."""
    scheduler = getattr(core, "scheduler", None)
    found = [] if scheduler is None else [scheduler.get_kv_connector()]
    while found:
        connector = found.pop()
        found += getattr(connector, "_connectors", ())
        yield connector
