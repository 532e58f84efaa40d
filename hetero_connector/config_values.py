"""Checks of configuration values: functions from (key, value) to the checked value.

Each raises a ConfigError that names the key, the accepted values and the value it got.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard

from hetero_connector import machine
from hetero_connector.errors import ConfigError
from hetero_connector.units import GIB

_REDIS = tuple(
    f"{scheme}{kind}://" for scheme in ("redis", "rediss") for kind in ("", "+sentinel", "+cluster")
)
_MIN_LEASE_S, _MAX_LEASE_S = 1.0, 3600.0
_MAX_NAME_BYTES = 128
_MAX_TOKENS = 1 << 31
_CHECKPOINTS = re.compile(r"adaptive|full|zero|periodic:[1-9][0-9]{0,4}")


def number(key: str, value: object) -> float:
    """Check a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(key, f"expected a number above 0, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(key, f"expected a finite number above 0, got {value!r}")
    return number


def capacity(key: str, value: object) -> float:
    """Check a capacity in GiB, of at least one byte."""
    gib = number(key, value)
    if gib * GIB < 1:
        raise ConfigError(key, f"{value!r} GiB are less than one byte")
    return gib


def tokens(key: str, value: object) -> int:
    """Check a number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_TOKENS:
        raise ConfigError(
            key, f"expected a whole number above 0 and at most {_MAX_TOKENS}, got {_shown(value)}"
        )
    return value


def boolean(key: str, value: object) -> bool:
    """Check a JSON true or false."""
    if not isinstance(value, bool):
        raise ConfigError(key, f"expected true or false, got {_shown(value)}")
    return value


def one_of(*choices: str) -> Callable[[str, object], str]:
    """Make the check for a key that takes one of these words."""

    def parse(key: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            accepted = ", ".join(map(repr, choices))
            raise ConfigError(key, f"expected one of {accepted}, got {_shown(value)}")
        return value

    return parse


def checkpoints(key: str, value: object) -> str:
    """Check the name of a checkpoint policy."""
    if isinstance(value, str) and _CHECKPOINTS.fullmatch(value):
        return value
    raise ConfigError(
        key,
        "expected 'adaptive', 'full', 'zero' or 'periodic:N' with N chunks, N from 1 to 99999, "
        f"got {_shown(value)}",
    )


def _path(key: str, value: object, kind: str) -> Path:
    """Return the absolute path, `~` expanded."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(key, f"expected a {kind}'s path, got {_shown(value)}")
    text = os.fspath(value)
    if not _is_text(text) or not text.strip() or "\0" in text:
        raise ConfigError(key, f"expected a {kind}'s path, got {_shown(value)}")
    scheme, is_url, _ = text.partition("://")
    if is_url:
        raise ConfigError(key, f"expected a {kind}'s path: drop {scheme}:// from {text!r}")
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as error:
        raise ConfigError(key, f"cannot expand {text!r}: {error}") from error


def directory_path(key: str, value: object) -> Path:
    """Check the path of a directory, which need not exist yet."""
    path = _path(key, value, "directory")
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror}") from error
    if not existing.is_dir():
        raise ConfigError(key, f"{existing} is a file, not a directory")
    return path


def folder_or_off(key: str, value: object) -> Path | None:
    """Check the path of a directory, which need not exist yet; None for `off`."""
    return None if value == "off" else directory_path(key, value)


def file_path(key: str, value: object) -> Path:
    """Check the path of an existing file."""
    path = _path(key, value, "file")
    try:
        exists = path.is_file()
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror}") from error
    if not exists:
        raise ConfigError(key, f"there is no file {path}")
    return path


def appendable_file(key: str, value: object) -> Path:
    """Check the path of a file that can be appended to, or made in a directory that exists."""
    path = _path(key, value, "file")
    try:
        if path.is_dir():
            raise ConfigError(key, f"{path} is a directory: give the path of a file in it")
        exists, has_parent = path.exists(), path.parent.is_dir()
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror}") from error
    if not exists and not has_parent:
        raise ConfigError(key, f"expected a file in a directory that exists, got {value!r}")
    if not os.access(path if exists else path.parent, os.W_OK):
        raise ConfigError(key, f"{path} cannot be written")
    return path


def fleet_directory(key: str, value: object) -> str:
    """Check the URL of a fleet's directory; "" for none. Its Redis part is checked on joining."""
    if isinstance(value, str) and (value in ("", "memory://") or value.startswith(_REDIS)):
        return value
    shown = _shown(without_password(value) if isinstance(value, str) else value)
    expected = f"'', 'memory://' or a URL that begins with one of {', '.join(_REDIS)}"
    raise ConfigError(key, f"expected {expected}; got {shown}")


def without_password(url: str) -> str:
    """Return the URL without user and passwords."""
    return re.sub(r"(sentinel_password=)[^&]*", r"\1...", re.sub(r"//.*@", "//...@", url))


def lease(key: str, value: object) -> float:
    """Check the seconds of a lease."""
    lease_s = number(key, value)
    if not _MIN_LEASE_S <= lease_s <= _MAX_LEASE_S:
        raise ConfigError(
            key, f"expected {_MIN_LEASE_S:g} to {_MAX_LEASE_S:g} seconds, got {value!r}"
        )
    return lease_s


def worker_name(key: str, value: object) -> str:
    """Check that a worker's name fits into a directory record."""
    if not _is_text(value) or not 0 < len(value.encode()) <= _MAX_NAME_BYTES:
        raise ConfigError(
            key, f"expected 1 to {_MAX_NAME_BYTES} bytes of text, got {_shown(value)}"
        )
    return value


def peer_host(key: str, value: object) -> str:
    """Check an address of a network interface of this machine."""
    host = worker_name(key, value)
    addresses = machine.addresses()
    if host not in addresses:
        known = ", ".join(sorted(addresses))
        raise ConfigError(key, f"{host!r} is no address of this machine; it has {known}")
    return host


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether it is text that can be written as UTF-8: JSON may have half of a character."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
