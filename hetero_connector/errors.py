"""The errors that the package raises on purpose.

HeteroCacheError
├── ConfigError            configuration keys are wrong; names each
├── UnsupportedModelError  a layer or parallel layout whose state cannot be stored; names the layer
├── IdentityError          the model's files cannot be found or read: no identity, no caching
├── EngineStartError       vLLM refuses the model or its arguments; says which
├── UnsupportedVersionError  this vLLM is not one the package was tested with
├── StoreError             a tier cannot be opened or is not usable
│   ├── StoreInUseError    another engine uses the directory
│   ├── StoreTakenError    another engine took the directory while this one used it
│   ├── FormatError        the directory holds another format version or another geometry
│   └── StoreClosedError   used after close()
├── CommandError           a command to a running engine is wrong or was not carried out; says why
├── LoadLostError          tokens that vLLM counts as computed were not loaded; ends the engine
├── DirectoryError         a call to the ownership directory failed
│   ├── StaleEpochError    the worker's lease has ended: register again, claim again
│   ├── DirectoryUnavailableError  it cannot be reached or did not answer in time
│   ├── DirectoryRefusedError  wrong password, certificate or version: a retry cannot help
│   └── RecordError        its answer is not a record of this version
├── PeerError              another engine's description of its memory is invalid
├── NoWorkerError          no worker of the fleet accepts requests
├── TransferError          bytes could not be moved; carries the errno where one is known
├── RouterConfigError      a router's configuration is wrong; names the file and each key
├── TraceError             a recorded trace is not what its format says; names file, line and field
└── SimulationError        a fleet, a policy or a sweep cannot be simulated; names file and field

An error while serving (transfer, checksum, deadline) never reaches the engine: it is
counted and becomes a cache miss. Errors at start are raised, and say what to change.
Only LoadLostError ends an engine, because the answer would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class HeteroCacheError(Exception):
    """Base of every error of this package. Pickling keeps its text and its attributes."""

    def __reduce__(self) -> tuple[Callable[..., HeteroCacheError], tuple[Any, ...]]:
        return _unpickle, (type(self), self.args, vars(self))


def _unpickle(
    kind: type[HeteroCacheError], args: tuple[Any, ...], state: dict[str, Any]
) -> HeteroCacheError:
    """Rebuild an error without its constructor, which would format the text again."""
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class ConfigError(HeteroCacheError, ValueError):
    """Configuration values are wrong; the text names each key, its value and what is accepted."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"kv_connector_extra_config[{key!r}]: {problem}")
        self.key, self.problem = key, problem

    @classmethod
    def joined(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """Return one error with a line for each of several. Its key is the first one's."""
        first, *others = errors
        if others:
            first.args = ("\n".join(map(str, errors)),)
        return first


class UnsupportedModelError(HeteroCacheError, ValueError):
    """The model has a layer, or runs with a parallel layout, whose state cannot be stored."""


class IdentityError(HeteroCacheError, ValueError):
    """The model's files cannot be found or read, so its state cannot be identified."""


class EngineStartError(HeteroCacheError, ValueError):
    """vLLM refuses to start an engine for this model with these arguments."""


class UnsupportedVersionError(HeteroCacheError, RuntimeError):
    """This version of vLLM is not one the package was tested with."""


class StoreError(HeteroCacheError, RuntimeError):
    """A tier cannot be opened or used."""


class StoreInUseError(StoreError):
    """Another engine uses the SSD directory."""


class StoreTakenError(StoreError):
    """Another engine opened the SSD directory although this one has locked it."""


class FormatError(StoreError):
    """The SSD directory holds another format version or another geometry."""


class StoreClosedError(StoreError):
    """The store was used after close()."""


class CommandError(HeteroCacheError, ValueError):
    """A command to a running engine is malformed, or it could not be carried out."""


class MalformedCommandError(CommandError):
    """A command has an argument that is unknown, missing or wrong: nothing was done."""


class LoadLostError(HeteroCacheError, RuntimeError):
    """Tokens that vLLM counts as computed were not loaded, and vLLM cannot take them back."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the pages of request {request_id!r} were not loaded, see the error logged before. "
            "vLLM accepts block-level load errors only for models with one KV cache group, and "
            "recomputes correctly only without async scheduling, so the engine ends: its answer "
            "would be wrong. Set planner to 'never_load' and report this"
        )

    @classmethod
    def of_device(cls, error: Exception) -> LoadLostError:
        """Return the error of a device that cannot tell any more if its copies have ended."""
        lost = cls("")
        lost.args = (f"the device has failed, and with it every load under way: {error}",)
        return lost


class DirectoryError(HeteroCacheError, RuntimeError):
    """A call to the ownership directory failed."""


class StaleEpochError(DirectoryError):
    """The epoch's lease has ended; nothing was changed. Register again, then claim again."""

    def __init__(self, epoch: int, why: str = "its lease has ended") -> None:
        super().__init__(f"epoch {epoch} may change nothing: {why}; register the worker again")
        self.epoch = epoch


class DirectoryUnavailableError(DirectoryError):
    """The directory cannot be reached, or did not answer before the deadline."""


class DirectoryRefusedError(DirectoryError):
    """The directory cannot work until its configuration is changed; the text says how."""


class RecordError(DirectoryError, ValueError):
    """Bytes from the directory are not a record of this version. They count as no record."""


class PeerError(HeteroCacheError, ValueError):
    """A peer's metadata or record is malformed, or points outside the peer's memory."""


class NoWorkerError(HeteroCacheError, RuntimeError):
    """Every worker of the fleet is draining or has left."""

    def __init__(self) -> None:
        super().__init__("no worker accepts requests: start one, or let one accept requests again")


class TransferError(HeteroCacheError, OSError):
    """Bytes could not be moved; `errno` is set if the system named one."""


class RouterConfigError(HeteroCacheError, ValueError):
    """A router's configuration cannot be used; the text names the file and every wrong key."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class TraceError(HeteroCacheError, ValueError):
    """A recorded trace cannot be read or breaks its format; the text names file, line, field."""

    def __init__(
        self, source: str, problem: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        place = source if line is None else f"{source}:{line}"
        super().__init__(f"{place}: {field}: {problem}" if field else f"{place}: {problem}")
        self.source, self.line, self.field, self.problem = source, line, field, problem


class SimulationError(HeteroCacheError, ValueError):
    """A fleet, policy or sweep cannot be simulated; the text names the file and the field."""

    def __init__(
        self, source: str, problem: str, field: str | None = None, *, line: int | None = None
    ) -> None:
        place = source if line is None else f"{source}:{line}"
        super().__init__(f"{place}: {field}: {problem}" if field else f"{place}: {problem}")
        self.source, self.line, self.field, self.problem = source, line, field, problem
