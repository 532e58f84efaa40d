"""Every error the package raises on purpose.

HeteroCacheError
├── ConfigError            a configuration key is wrong; names the key
├── UnsupportedModelError  a layer or parallel layout whose state cannot be stored; names the layer
├── IdentityError          the model's files cannot be found or read: no identity, no caching
├── UnsupportedVersionError  this vLLM is not one the package was tested with
├── StoreError             a tier cannot be opened or is not usable
│   ├── StoreInUseError    another engine owns the directory
│   ├── FormatError        the directory holds another format version or another geometry
│   └── StoreClosedError   used after close()
└── TransferError          bytes could not be moved; carries the errno where one is known

An error raised while serving (transfer, checksum, deadline) never reaches the
engine: it is counted and becomes a cache miss. Errors at start are raised, and
say what to change.
"""

from __future__ import annotations


class HeteroCacheError(Exception):
    """Base of every error of this package."""


class ConfigError(HeteroCacheError, ValueError):
    """A configuration value is wrong: names the key, the value and what is accepted."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"kv_connector_extra_config[{key!r}]: {problem}")
        self.key = key


class UnsupportedModelError(HeteroCacheError, ValueError):
    """The model has a layer, or runs under a layout, whose state cannot be stored."""


class IdentityError(HeteroCacheError, ValueError):
    """The model's files cannot be found or read, so its state cannot be told from another's."""


class UnsupportedVersionError(HeteroCacheError, RuntimeError):
    """This version of vLLM is not one the package was tested with."""


class StoreError(HeteroCacheError, RuntimeError):
    """A tier cannot be opened or used."""


class StoreInUseError(StoreError):
    """Another engine owns the SSD directory."""


class FormatError(StoreError):
    """The SSD directory holds another format version or another geometry."""


class StoreClosedError(StoreError):
    """The store was used after close()."""


class TransferError(HeteroCacheError, OSError):
    """Bytes could not be moved; `errno` is set where the system named one."""
