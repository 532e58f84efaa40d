"""The configuration: `kv_connector_extra_config`, checked once at start.

`KEYS` is the one table of what there is: validation, error messages and the README's
table all come from it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero_connector import machine
from hetero_connector.errors import ConfigError
from hetero_connector.machine import GIB

_MAX_DEFAULT_DRAM_GIB = 32.0
_MAX_DEFAULT_SSD_GIB = 64.0
_MIN_DEFAULT_DRAM_GIB = 1 / 16
_LAYERWISE = ("auto", "on", "off")
_EVICTION = ("leaf_lru", "lru", "value")
_PLANNER = ("cost", "always_load", "never_load")
_VERIFY = ("ssd", "all")
_CHECKPOINTS = re.compile(r"adaptive|full|zero|periodic:[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class Key:
    """One key of `kv_connector_extra_config`, as the README shows it."""

    name: str
    kind: str
    default: str
    meaning: str
    parse: Callable[[str, object], Any]
    """(key, value) -> the checked value; raises ConfigError."""


def _number(key: str, value: object) -> float:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(key, f"expected a number above 0, got {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise ConfigError(key, f"expected a finite number above 0, got {value!r}")
    return number


def _capacity(key: str, value: object) -> float:
    """GiB, at least a byte of it."""
    gib = _number(key, value)
    if gib * GIB < 1:
        raise ConfigError(key, f"{value!r} GiB are less than one byte")
    return gib


def _whole_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(key, f"expected a whole number above 0, got {_shown(value)}")
    return value


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def parse(key: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            accepted = ", ".join(map(repr, choices))
            raise ConfigError(key, f"expected one of {accepted}, got {_shown(value)}")
        return value

    return parse


def _checkpoints(key: str, value: object) -> str:
    if isinstance(value, str) and _CHECKPOINTS.fullmatch(value):
        return value
    raise ConfigError(
        key,
        "expected 'adaptive', 'full', 'zero' or 'periodic:N' with N chunks, N from 1 to 99999, "
        f"got {_shown(value)}",
    )


def _path(key: str, value: object, kind: str) -> Path:
    """An absolute path, `~` expanded."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(key, f"expected a {kind}'s path, got {_shown(value)}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(key, f"expected a {kind}'s path, got {_shown(value)}")
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as error:
        raise ConfigError(key, f"cannot expand {text!r}: {error}") from error


def _directory_path(key: str, value: object) -> Path:
    """A path that is a directory or can become one."""
    path = _path(key, value, "directory")
    try:
        existing = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        raise ConfigError(key, f"cannot look at {path}: {error.strerror}") from error
    if not existing.is_dir():
        raise ConfigError(key, f"{existing} is a file, not a directory")
    return path


def _file_path(key: str, value: object) -> Path:
    """A path of a file that is there."""
    path = _path(key, value, "file")
    try:
        there = path.is_file()
    except OSError as error:
        raise ConfigError(key, f"cannot look at {path}: {error.strerror}") from error
    if not there:
        raise ConfigError(key, f"there is no file {path}")
    return path


def _directory_url(key: str, value: object) -> str:
    if value == "memory://":
        return "memory://"
    if isinstance(value, str) and value.startswith(("redis://", "rediss://")):
        raise ConfigError(key, "a Redis directory is not in this version: use 'memory://'")
    raise ConfigError(key, f"expected 'memory://', got {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


KEYS: tuple[Key, ...] = (
    Key(
        "dram_gib", "number > 0", "a quarter of the free memory, at most 32",
        "GiB of host memory that hold state", _capacity,
    ),
    Key(
        "ssd_dir", "path", "none: DRAM only",
        "Directory on a local SSD that holds state across restarts", _directory_path,
    ),
    Key(
        "ssd_gib", "number > 0", "half of the free space, at most 64",
        "GiB of that disk to use; needs `ssd_dir`", _capacity,
    ),
    Key(
        "chunk_tokens", "whole number > 0", "256, rounded up to the model's alignment",
        "Tokens per stored chunk; a multiple of the model's alignment", _whole_number,
    ),
    Key(
        "layerwise", "`auto`, `on` or `off`", "`auto`",
        "Move state layer by layer, overlapped with compute", _one_of(*_LAYERWISE),
    ),
    Key(
        "checkpoints", "`adaptive`, `full`, `zero` or `periodic:N`", "`adaptive`",
        "Chunk boundaries that keep a checkpoint, besides every turn's end: those that pay, "
        "all, none, every Nth", _checkpoints,
    ),
    Key(
        "planner", "`cost`, `always_load` or `never_load`", "`cost`",
        "What to restore: what is predicted to be fastest, all there is, nothing",
        _one_of(*_PLANNER),
    ),
    Key(
        "planner_profile", "path", "none: learned as it runs",
        "What `heterocache calibrate` measured on this machine, for a start", _file_path,
    ),
    Key(
        "load_deadline_s", "number > 0", "10",
        "Seconds after which a restore gives up and the rest is computed", _number,
    ),
    Key(
        "directory", "`memory://`", "`memory://`",
        "Where it is known who owns which state", _directory_url,
    ),
    Key(
        "eviction", "`leaf_lru`, `lru` or `value`", "`leaf_lru`",
        "What leaves a full tier first: leaves not used for longest, what was not used for "
        "longest, or leaves that save the fewest seconds per byte", _one_of(*_EVICTION),
    ),
    Key(
        "ssd_write_gib_per_day", "number > 0", "none: no limit",
        "Most GiB an engine writes to SSD in any 24 hours, for what is worth most; needs `ssd_dir`",
        _capacity,
    ),
    Key(
        "verify", "`ssd` or `all`", "`ssd`",
        "Check sums of what is read from SSD, or of what is served from DRAM too",
        _one_of(*_VERIFY),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class HeteroConfig:
    """A checked configuration, defaults filled in."""

    dram_gib: float
    ssd_dir: Path | None = None
    """Absolute; need not exist yet."""
    ssd_gib: float = 0.0
    """0 without `ssd_dir`."""
    chunk_tokens: int | None = None
    """None: `ModelSpec.default_chunk_tokens()`."""
    layerwise: Literal["auto", "on", "off"] = "auto"
    checkpoints: str = "adaptive"
    """`planner.checkpoint_policy.policy_named` takes it."""
    planner: Literal["cost", "always_load", "never_load"] = "cost"
    planner_profile: Path | None = None
    load_deadline_s: float = 10.0
    directory: str = "memory://"
    eviction: Literal["leaf_lru", "lru", "value"] = "leaf_lru"
    ssd_write_gib_per_day: float | None = None
    """None: no limit."""
    verify: Literal["ssd", "all"] = "ssd"

    @property
    def dram_bytes(self) -> int:
        """Capacity of the DRAM tier."""
        return int(self.dram_gib * GIB)

    @property
    def ssd_bytes(self) -> int:
        """Capacity of the SSD tier; 0 for none."""
        return int(self.ssd_gib * GIB)

    @property
    def ssd_write_bytes_per_day(self) -> int | None:
        """Most that may be written to SSD in 24 hours; None for no limit."""
        per_day = self.ssd_write_gib_per_day
        return None if per_day is None else int(per_day * GIB)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> HeteroConfig:
        """Check vLLM's `kv_connector_extra_config`; an empty one is fine.

        Raises ConfigError, naming the key, for the first key that is unknown, of the wrong
        type or out of range.
        """
        _refuse_unknown(extra_config)
        given = {
            k.name: k.parse(k.name, extra_config[k.name]) for k in KEYS if k.name in extra_config
        }
        given["dram_gib"] = _dram_gib(given.get("dram_gib"))
        if "ssd_dir" in given:
            given["ssd_gib"] = _ssd_gib(given.get("ssd_gib"), given["ssd_dir"])
        else:
            for key in ("ssd_gib", "ssd_write_gib_per_day"):
                if key in given:
                    raise ConfigError(key, "needs 'ssd_dir', the directory to use")
        return cls(**given)


def _refuse_unknown(extra_config: Mapping[str, Any]) -> None:
    names = [key.name for key in KEYS]
    for name in extra_config:
        if name not in names:
            close = difflib.get_close_matches(str(name).lower(), names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(names)}"
            raise ConfigError(name, f"unknown key; {hint}")


def _dram_gib(given: float | None) -> float:
    memory = machine.memory()
    if given is None:
        quarter = memory.available_bytes / 4 / GIB
        return min(_MAX_DEFAULT_DRAM_GIB, max(_MIN_DEFAULT_DRAM_GIB, quarter))
    if given * GIB > memory.total_bytes:
        total = memory.total_bytes / GIB
        raise ConfigError("dram_gib", f"{given:g} GiB is more than this machine's {total:.1f} GiB")
    return given


def _ssd_gib(given: float | None, directory: Path) -> float:
    try:
        disk = machine.disk(directory)
        mine = machine.bytes_under(directory) if given is None else 0
    except OSError as error:
        raise ConfigError("ssd_dir", f"cannot look at {directory}: {error.strerror}") from error
    if given is None:
        # What the directory holds already counts as free, or it would shrink at each restart.
        half = (disk.free_bytes + mine) / 2 / GIB
        if half <= 0:
            raise ConfigError("ssd_dir", f"no space is left on the file system of {directory}")
        return min(_MAX_DEFAULT_SSD_GIB, half)
    if given * GIB > disk.total_bytes:
        total = disk.total_bytes / GIB
        raise ConfigError(
            "ssd_gib", f"{given:g} GiB is more than the file system's {total:.1f} GiB"
        )
    return given


def markdown_table() -> str:
    """The README's table of `KEYS`."""
    rows = [f"| `{k.name}` | {k.kind} | {k.default} | {k.meaning} |" for k in KEYS]
    return "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows])
