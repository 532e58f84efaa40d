"""Every error the package raises on purpose.

HeteroCacheError
├── ConfigError            a configuration key is wrong; names the key
├── UnsupportedModelError  a layer or parallel layout whose state cannot be stored; names the layer
├── IdentityError          the model's files cannot be found or read: no identity, no caching
├── EngineStartError       vLLM refuses the model or its arguments; says which
├── UnsupportedVersionError  this vLLM is not one the package was tested with
├── StoreError             a tier cannot be opened or is not usable
│   ├── StoreInUseError    another engine owns the directory
│   ├── StoreTakenError    another engine took the directory while this one used it
│   ├── FormatError        the directory holds another format version or another geometry
│   └── StoreClosedError   used after close()
├── LoadLostError          tokens vLLM counts as computed were not loaded, and it cannot be told
├── DirectoryError         the ownership directory did not do what was asked
│   ├── StaleEpochError    the worker's lease has ended: register again, claim again
│   ├── DirectoryUnavailableError  it cannot be reached or did not answer in time
│   ├── DirectoryRefusedError  wrong password, certificate or version: asking again is no use
│   └── RecordError        what it answered is not a record of this version
├── PeerError              what another engine says of its memory makes no sense
├── NoWorkerError          no worker of the fleet accepts requests
├── TransferError          bytes could not be moved; carries the errno where one is known
├── TraceError             a recorded trace is not what its format says; names file, line and field
└── SimulationError        a fleet, a policy or a sweep cannot be simulated; names file and field

An error raised while serving (transfer, checksum, deadline) never reaches the
engine: it is counted and becomes a cache miss. Errors at start are raised, and
say what to change. LoadLostError alone ends an engine: the other way would be a
wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HeteroCacheError(Exception):
    """Base of every error of this package. Comes back from another process as it was."""

    def __reduce__(self) -> tuple[Callable[..., HeteroCacheError], tuple[Any, ...]]:
        return _again, (type(self), self.args, vars(self))


def _again(
    kind: type[HeteroCacheError], args: tuple[Any, ...], state: dict[str, Any]
) -> HeteroCacheError:
    """An error as it was: its text is made already, so its constructor is not asked."""
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class ConfigError(HeteroCacheError, ValueError):
    """A configuration value is wrong: names the key, the value and what is accepted."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"kv_connector_extra_config[{key!r}]: {problem}")
        self.key = key


class UnsupportedModelError(HeteroCacheError, ValueError):
    """The model has a layer, or runs under a layout, whose state cannot be stored."""


class IdentityError(HeteroCacheError, ValueError):
    """The model's files cannot be found or read, so its state cannot be told from another's."""


class EngineStartError(HeteroCacheError, ValueError):
    """vLLM starts no engine for this model with these arguments."""


class UnsupportedVersionError(HeteroCacheError, RuntimeError):
    """This version of vLLM is not one the package was tested with."""


class StoreError(HeteroCacheError, RuntimeError):
    """A tier cannot be opened or used."""


class StoreInUseError(StoreError):
    """Another engine owns the SSD directory."""


class StoreTakenError(StoreError):
    """Another engine opened the SSD directory although this one holds its lock."""


class FormatError(StoreError):
    """The SSD directory holds another format version or another geometry."""


class StoreClosedError(StoreError):
    """The store was used after close()."""


class LoadLostError(HeteroCacheError, RuntimeError):
    """Tokens that vLLM counts as computed were not loaded, and vLLM has no way to be told."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the pages of request {request_id!r} were not loaded, see the error logged before. "
            "vLLM takes block-level load errors only from models with one KV cache group, so the "
            "engine ends: it would answer from them. Set planner to 'never_load' and report it"
        )


class DirectoryError(HeteroCacheError, RuntimeError):
    """The ownership directory did not do what was asked."""


class StaleEpochError(DirectoryError):
    """The epoch's lease has ended: nothing was changed. Register again, then claim again."""

    def __init__(self, epoch: int, why: str = "its lease has ended") -> None:
        super().__init__(f"epoch {epoch} may change nothing: {why}; register the worker again")
        self.epoch = epoch


class DirectoryUnavailableError(DirectoryError):
    """The directory cannot be reached, or did not answer before the deadline."""


class DirectoryRefusedError(DirectoryError):
    """The directory will not work until somebody changes something; says what."""


class RecordError(DirectoryError, ValueError):
    """Bytes from the directory are not a record this version can read. Treated as no record."""


class PeerError(HeteroCacheError, ValueError):
    """A peer's metadata or record is malformed, or points outside the peer's memory."""


class NoWorkerError(HeteroCacheError, RuntimeError):
    """Every worker of the fleet is draining or gone: start one, or let one accept requests."""

    def __init__(self) -> None:
        super().__init__("no worker accepts requests: start one, or let one accept requests again")


class TransferError(HeteroCacheError, OSError):
    """Bytes could not be moved; `errno` is set where the system named one."""


class TraceError(HeteroCacheError, ValueError):
    """A recorded trace is unreadable, or not what its format says: names file, line and field."""

    def __init__(
        self, source: str, problem: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        place = source if line is None else f"{source}:{line}"
        super().__init__(f"{place}: {field}: {problem}" if field else f"{place}: {problem}")
        self.source, self.line, self.field, self.problem = source, line, field, problem


class SimulationError(HeteroCacheError, ValueError):
    """A fleet, policy or sweep makes no sense, or cannot be simulated: names where and what."""

    def __init__(
        self, source: str, problem: str, field: str | None = None, *, line: int | None = None
    ) -> None:
        place = source if line is None else f"{source}:{line}"
        super().__init__(f"{place}: {field}: {problem}" if field else f"{place}: {problem}")
        self.source, self.line, self.field, self.problem = source, line, field, problem
