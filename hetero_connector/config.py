"""The configuration: `kv_connector_extra_config`, checked once at start.

`KEYS` is the one table of what there is: validation, error messages and the README's
table all come from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hetero_connector import machine
from hetero_connector.config_values import (
    boolean,
    capacity,
    checkpoints,
    directory_path,
    file_path,
    fleet_directory,
    folder_or_off,
    lease,
    number,
    one_of,
    peer_host,
    whole_number,
    worker_name,
)
from hetero_connector.errors import ConfigError
from hetero_connector.machine import GIB

_MAX_DEFAULT_DRAM_GIB = 32.0
_MAX_DEFAULT_SSD_GIB = 64.0
_MIN_DEFAULT_DRAM_GIB = 1 / 16
_LAYERWISE = ("auto", "on", "off")
_EVICTION = ("leaf_lru", "lru", "value")
_PLANNER = ("cost", "always_load", "never_load")
_PREFETCH = ("auto", "hint", "off")
_VERIFY = ("ssd", "sample", "all")
_TP_SIZES = ("own", "any")


@dataclass(frozen=True)
class Key:
    """One key of `kv_connector_extra_config`, as the README shows it."""

    name: str
    kind: str
    default: str
    meaning: str
    parse: Callable[[str, object], Any]
    """(key, value) -> the checked value; raises ConfigError."""


KEYS: tuple[Key, ...] = (
    Key(
        "dram_gib", "number > 0", "a quarter of the free memory, at most 32",
        "GiB of host memory that hold state", capacity,
    ),
    Key(
        "ssd_dir", "path", "none: DRAM only",
        "Directory on a local SSD that holds state across restarts", directory_path,
    ),
    Key(
        "ssd_gib", "number > 0", "half of the free space, at most 64",
        "GiB of that disk to use; needs `ssd_dir`", capacity,
    ),
    Key(
        "chunk_tokens", "whole number > 0", "256, rounded up to the model's alignment",
        "Tokens per stored chunk; a multiple of the model's alignment", whole_number,
    ),
    Key(
        "layerwise", "`auto`, `on` or `off`", "`auto`",
        "Move state layer by layer, overlapped with compute", one_of(*_LAYERWISE),
    ),
    Key(
        "checkpoints", "`adaptive`, `full`, `zero` or `periodic:N`", "`adaptive`",
        "Chunk boundaries that keep a checkpoint, besides every turn's end: those that pay, "
        "all, none, every Nth", checkpoints,
    ),
    Key(
        "planner", "`cost`, `always_load` or `never_load`", "`cost`",
        "What to restore: what is predicted to be fastest, all there is, nothing",
        one_of(*_PLANNER),
    ),
    Key(
        "planner_profile", "path", "none: learned as it runs",
        "What `heterocache calibrate` measured with this model on this machine, for a start; of "
        "another it is refused", file_path,
    ),
    Key(
        "load_deadline_s", "number > 0", "10",
        "Seconds after which a restore gives up and the rest is computed; a peer is waited for a "
        "fifth of that, a fleet's directory a hundredth", number,
    ),
    Key(
        "directory", "`redis://` URL or `memory://`", "none: this engine by itself",
        "Where the engines that share a cache know who has what; `memory://` is within one process",
        fleet_directory,
    ),
    Key(
        "lease_s", "number from 1 to 3600", "10",
        "Seconds after which an engine that does not answer may be taken over", lease,
    ),
    Key(
        "replica_ttl_s", "number > 0", "300",
        "Seconds without use after which a copy of what another engine owns is the first to leave "
        "DRAM", number,
    ),
    Key(
        "worker_name", "text", "host name and engine id",
        "This engine in the fleet; a restart under the same name takes over at once", worker_name,
    ),
    Key(
        "peer_host", "address", "this host alone, or what `UCX_NET_DEVICES` names",
        "Address of this machine through which peers on other hosts read from it. Whoever can "
        "connect to it can write the DRAM tier, too", peer_host,
    ),
    Key(
        "adopt_from", "path or `off`", "the folder that `ssd_dir` lies in",
        "What dead engines left on SSD is taken over where it lies below this folder, links not "
        "followed", folder_or_off,
    ),
    Key(
        "tp_sizes", "`own` or `any`", "`own`",
        "Whose state to share: of engines with this tensor-parallel size, or of any that say `any` "
        "too. They round differently, so answers are then exact but for rounding",
        one_of(*_TP_SIZES),
    ),
    Key(
        "trust_client_media_ids", "`true` or `false`", "`false`",
        "Take images, audio and video to be what vLLM calls them, which may be a client's `uuid`, "
        "instead of reading what they hold: whoever names one can then choose what others get",
        boolean,
    ),
    Key(
        "eviction", "`leaf_lru`, `lru` or `value`", "`leaf_lru`",
        "What leaves a full tier first: leaves not used for longest, what was not used for "
        "longest, or leaves that save the fewest seconds per byte", one_of(*_EVICTION),
    ),
    Key(
        "ssd_write_gib_per_day", "number > 0", "none: no limit",
        "Most GiB an engine writes to SSD in any 24 hours, for what is worth most; needs `ssd_dir`",
        capacity,
    ),
    Key(
        "prefetch", "`auto`, `hint` or `off`", "`auto`",
        "Bring state from SSD to DRAM before its session is back: as clients hint or sessions "
        "used to come, only as clients hint, never", one_of(*_PREFETCH),
    ),
    Key(
        "exact_handoffs", "`true` or `false`", "`false`",
        "Whether a decoder resumes a prefill at its last token whatever the model; where windows "
        "or compressors end inside a block their slots grow by that", boolean,
    ),
    Key(
        "verify", "`ssd`, `sample` or `all`", "`sample`",
        "Check sums of what is read from SSD; also of one in 128 artifacts that were served from "
        "DRAM, afterwards, given an SSD tier or a directory; or of all before they are served",
        one_of(*_VERIFY),
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
    """`planner.checkpoints.policy_named` takes it."""
    planner: Literal["cost", "always_load", "never_load"] = "cost"
    planner_profile: Path | None = None
    load_deadline_s: float = 10.0
    directory: str = ""
    """"" for none."""
    lease_s: float = 10.0
    replica_ttl_s: float = 300.0
    worker_name: str = ""
    """"": the host's name and the engine's id."""
    peer_host: str = ""
    """"": none but this host's own."""
    adopt_from: Path | None = None
    """None: nowhere. Never the root of the file system by default."""
    tp_sizes: Literal["own", "any"] = "own"
    trust_client_media_ids: bool = False
    eviction: Literal["leaf_lru", "lru", "value"] = "leaf_lru"
    ssd_write_gib_per_day: float | None = None
    """None: no limit."""
    prefetch: Literal["auto", "hint", "off"] = "auto"
    exact_handoffs: bool = False
    verify: Literal["ssd", "sample", "all"] = "sample"

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
        if not given.get("directory"):
            for key in ("lease_s", "replica_ttl_s", "worker_name", "peer_host", "adopt_from"):
                if key in given:
                    raise ConfigError(key, "needs 'directory', where the fleet meets")
        given["dram_gib"] = _dram_gib(given.get("dram_gib"))
        if "ssd_dir" in given:
            given["ssd_gib"] = _ssd_gib(given.get("ssd_gib"), given["ssd_dir"])
        else:
            for key in ("ssd_gib", "ssd_write_gib_per_day"):
                if key in given:
                    raise ConfigError(key, "needs 'ssd_dir', the directory to use")
        if "adopt_from" not in given and "ssd_dir" in given:
            folder = given["ssd_dir"].parent
            given["adopt_from"] = None if folder == folder.parent else folder
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
