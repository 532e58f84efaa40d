"""The configuration: `kv_connector_extra_config`, checked once at start.

Each key is declared once, as a field of `HeteroConfig` with the values it takes, its default and
its meaning. Validation, error messages and the documented table all come from these declarations.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from hetero_connector import config_values as values
from hetero_connector import machine
from hetero_connector.errors import ConfigError
from hetero_connector.units import GIB

_MAX_DEFAULT_SSD_GIB = 64.0

_Layerwise = Literal["auto", "on", "off"]
_Planner = Literal["cost", "always_load", "never_load"]
_TpSizes = Literal["own", "any"]
_Eviction = Literal["leaf_lru", "value"]
_Prefetch = Literal["auto", "hint", "off"]
_Replay = Literal["auto", "on", "off"]
_Verify = Literal["ssd", "sample", "all"]


@dataclass(frozen=True)
class Key:
    """One key of a configuration, as documented."""

    name: str
    takes: str
    default: str
    meaning: str
    parse: Callable[[str, object], Any]
    """(key, value) -> the checked value; raises ConfigError."""


def declare(
    takes: str,
    parse: Callable[[str, object], Any],
    meaning: str,
    default: object = MISSING,
    *,
    unset: str = "",
) -> Any:
    """Declare a key. `unset`: the documented default, if it is not the value `default`."""
    shown = f"{default:g}" if type(default) is float else f"`{str(default).lower()}`"
    declared = {"takes": takes, "default": unset or shown, "meaning": meaning, "parse": parse}
    if default is MISSING:
        return field(metadata=declared)
    return field(default=default, metadata=declared)


def _choice(choices: object, default: str, meaning: str) -> Any:
    """Declare a key that takes one of the words of a Literal."""
    words = get_args(choices)
    *first, last = (f"`{word}`" for word in words)
    return declare(f"{', '.join(first)} or {last}", values.one_of(*words), meaning, default)


def keys_of(config: type[Any]) -> tuple[Key, ...]:
    """Return the keys that a dataclass declares."""
    return tuple(Key(f.name, **f.metadata) for f in dataclasses.fields(config))


@dataclass(frozen=True)
class HeteroConfig:
    """A checked configuration, defaults filled in."""

    dram_gib: float | None = declare(
        "number > 0",
        values.capacity,
        "GiB of host memory for the DRAM tier",
        None,
        unset="without GPUs a quarter of the free memory, at most 32; with GPUs the engine's part "
        "of half of it, at most 256, and the longest request's size at least",
    )
    """None until the model is known, unless it is given: `engine.startup.dram_tier`."""
    ssd_dir: Path | None = declare(
        "path",
        values.directory_path,
        "Directory on a local SSD for the SSD tier, which survives restarts",
        None,
        unset="none: DRAM only",
    )
    """Absolute; need not exist yet."""
    ssd_gib: float = declare(
        "number > 0",
        values.capacity,
        "GiB of that SSD to use; needs `ssd_dir`",
        0.0,
        unset="half of the free space, at most 64",
    )
    """0 without `ssd_dir`."""
    chunk_tokens: int | None = declare(
        "whole number > 0",
        values.tokens,
        "Tokens per stored chunk; a multiple of the model's alignment",
        None,
        unset="256, rounded up to the model's alignment",
    )
    """None: `ModelSpec.default_chunk_tokens()`."""
    layerwise: _Layerwise = _choice(
        _Layerwise, "auto", "Load and save layer by layer, overlapped with compute"
    )
    checkpoints: str = declare(
        "`adaptive`, `full`, `zero` or `periodic:N`",
        values.checkpoints,
        "Chunk boundaries that keep a checkpoint, besides every turn's end: those that pay, all, "
        "none, or every Nth",
        "adaptive",
    )
    """`planner.checkpoints.policy_named` takes it."""
    planner: _Planner = _choice(
        _Planner, "cost", "What to restore: what is predicted to be fastest, all, or nothing"
    )
    replay: _Replay = _choice(
        _Replay,
        "auto",
        "Rebuild windows that are not stored by computing tokens before the boundary again: on "
        "attention backends where tests have shown it exact, also where vLLM's source says it is, "
        "or never",
    )
    planner_profile: Path | None = declare(
        "path",
        values.file_path,
        "Initial costs, from `heterocache calibrate`; they must match model and machine",
        None,
        unset="none: costs are learned while running",
    )
    load_deadline_s: float = declare(
        "number > 0",
        values.number,
        "Seconds after which a request's restore gives up, whatever was planned again, and uses "
        "what DRAM has. A peer, a dead engine's SSD, an adapter or a media item may take a fifth "
        "of that, a handoff a twentieth, the fleet's directory a hundredth",
        10.0,
    )
    directory: str = declare(
        "`redis://` URL or `memory://`",
        values.fleet_directory,
        "Directory of the engines that share a cache; `memory://` is within one process",
        "",
        unset="none: this engine alone",
    )
    lease_s: float = declare(
        "number from 1 to 3600",
        values.lease,
        "Seconds without an answer after which other engines may take over from this one",
        10.0,
    )
    replica_ttl_s: float = declare(
        "number > 0",
        values.number,
        "Seconds without use after which a copy of another engine's artifact is evicted first "
        "from DRAM",
        300.0,
    )
    worker_name: str = declare(
        "text",
        values.worker_name,
        "Name of this engine in the fleet; a restart under the same name replaces the former "
        "engine at once, and owns what that left when its lease has ended",
        "",
        unset="host name and engine id",
    )
    peer_host: str = declare(
        "address",
        values.peer_host,
        "Address of this machine through which peers on other hosts read from it. Anyone who can "
        "connect to it can also write the DRAM tier",
        "",
        unset="this host alone, or what `UCX_NET_DEVICES` names",
    )
    adopt_from: Path | None = declare(
        "path or `off`",
        values.folder_or_off,
        "Folder below which the SSD state of dead engines is taken over; links are not followed",
        None,
        unset="the parent of `ssd_dir`",
    )
    """None: nowhere. Never the root of the file system by default."""
    tp_sizes: _TpSizes = _choice(
        _TpSizes,
        "own",
        "Engines to share state with: those with this tensor-parallel size, or all that set "
        "`any`. Different sizes round differently, so answers are then exact except for rounding",
    )
    trust_client_media_ids: bool = declare(
        "`true` or `false`",
        values.boolean,
        "Identify images, audio and video by vLLM's id, which may be a client's `uuid`, instead "
        "of their content. A client that chooses ids can then choose what others get",
        False,
    )
    eviction: _Eviction = _choice(
        _Eviction,
        "leaf_lru",
        "Eviction order of a full tier: least recently used chain leaves, or leaves that save "
        "the fewest seconds per byte",
    )
    ssd_write_gib_per_day: float | None = declare(
        "number > 0",
        values.capacity,
        "Most GiB written to SSD in any 24 hours, spent on what is worth most; needs `ssd_dir`",
        None,
        unset="none: no limit",
    )
    prefetch: _Prefetch = _choice(
        _Prefetch,
        "auto",
        "Stage a session's state in DRAM before its next turn: by hints and learned think times, "
        "by hints only, or never",
    )
    exact_handoffs: bool = declare(
        "`true` or `false`",
        values.boolean,
        "Let a decoder resume a handoff at the prompt's last token for every model without rings "
        "or recurrent state; slots grow by the open blocks of windows and compressors",
        False,
    )
    verify: _Verify = _choice(
        _Verify,
        "sample",
        "Checksums to verify: of what is read from SSD; also of one in 128 artifacts served from "
        "DRAM, afterwards (with an SSD tier or a directory only); or of everything, before it is "
        "served",
    )

    @property
    def dram_bytes(self) -> int:
        """Capacity of the DRAM tier, which must be known by now."""
        assert self.dram_gib is not None
        return int(self.dram_gib * GIB)

    @property
    def ssd_bytes(self) -> int:
        """Capacity of the SSD tier; 0 for none."""
        return int(self.ssd_gib * GIB)

    @property
    def ssd_write_bytes_per_day(self) -> int | None:
        """Most bytes that may be written to SSD in 24 hours; None for no limit."""
        per_day = self.ssd_write_gib_per_day
        return None if per_day is None else int(per_day * GIB)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> HeteroConfig:
        """Check vLLM's `kv_connector_extra_config`, which may be empty.

        Raises ConfigError, with a line for every key that is unknown, of the wrong type or out of
        range: each start of an engine takes minutes.
        """
        parsers = {key.name: key.parse for key in KEYS}
        given: dict[str, Any] = {}
        errors: list[ConfigError] = []
        for name, value in extra_config.items():
            try:
                if name not in parsers:
                    raise ConfigError(name, f"unknown key; {_advice(name)}")
                given[name] = parsers[name](name, value)
                if name == "dram_gib":
                    _check_dram_gib(given[name])
            except ConfigError as error:
                errors.append(error)
        for needed, names in ONLY_WITH.items():
            if not extra_config.get(needed):
                problem = f"only valid together with {needed!r}"
                errors += [ConfigError(name, problem) for name in names if name in given]
        if "ssd_dir" in given and ("ssd_gib" in given or "ssd_gib" not in extra_config):
            try:
                given["ssd_gib"] = ssd_gib_of(given.get("ssd_gib"), given["ssd_dir"])
            except ConfigError as error:
                errors.append(error)
        if errors:
            raise ConfigError.joined(errors)
        if "adopt_from" not in given and "ssd_dir" in given:
            folder = given["ssd_dir"].parent
            given["adopt_from"] = None if folder == folder.parent else folder
        return cls(**given)


KEYS: tuple[Key, ...] = keys_of(HeteroConfig)


ONLY_WITH = {
    "directory": ("lease_s", "replica_ttl_s", "worker_name", "peer_host", "adopt_from"),
    "ssd_dir": ("ssd_gib", "ssd_write_gib_per_day"),
}
"""Keys that mean something only if another one is set, by that one."""
OTHER_NAMES = {
    "LMCache": {
        "chunk_size": "chunk_tokens",
        "local_cpu": "dram_gib",
        "max_local_cpu_size": "dram_gib",
        "local_disk": "ssd_dir",
        "max_local_disk_size": "ssd_gib",
        "remote_url": "directory",
        "lmcache_instance_id": "worker_name",
        "p2p_host": "peer_host",
    },
    "Mooncake": {
        "global_segment_size": "dram_gib",
        "local_hostname": "peer_host",
        "master_server_address": "directory",
        "metadata_server": "directory",
    },
    "vLLM's offloading": {
        "cpu_bytes_to_use": "dram_gib",
        "num_cpu_blocks": "dram_gib",
        "block_size": "chunk_tokens",
        "eviction_policy": "eviction",
    },
}
"""Keys of other connectors, with the key here that means nearly the same."""


def nearest(name: str, keys: Sequence[Key]) -> str:
    """Return what to write in place of an unknown key."""
    names = [key.name for key in keys]
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(names)}"


def _advice(name: str) -> str:
    plain = str(name).lower().removeprefix("lmcache.")
    for product, keys in OTHER_NAMES.items():
        if plain in keys:
            return f"it belongs to {product}; the key here is {keys[plain]!r}"
    return nearest(plain, KEYS)


def _check_dram_gib(given: float) -> None:
    total = machine.memory().total_bytes / GIB
    if given > total:
        raise ConfigError("dram_gib", f"{given:g} GiB is more than this machine's {total:.1f} GiB")


def ssd_gib_of(given: float | None, directory: Path) -> float:
    """Return the `ssd_gib` of an engine with this `ssd_dir`. Raises ConfigError."""
    try:
        disk = machine.disk(directory)
        own_bytes = machine.bytes_under(directory) if given is None else 0
    except OSError as error:
        raise ConfigError("ssd_dir", f"cannot read {directory}: {error.strerror}") from error
    if given is None:
        # Count what the directory already holds as free, or the tier would shrink at each restart.
        half = (disk.free_bytes + own_bytes) / 2 / GIB
        if half <= 0:
            kind = machine.file_system(directory)
            raise ConfigError(
                "ssd_dir",
                f"the file system of {directory} ({kind or 'of unknown type'}) has no space left, "
                "or is no disk; choose another directory",
            )
        return min(_MAX_DEFAULT_SSD_GIB, half)
    if given * GIB > disk.total_bytes:
        total = disk.total_bytes / GIB
        raise ConfigError(
            "ssd_gib", f"{given:g} GiB is more than the file system's {total:.1f} GiB"
        )
    return given


def markdown_table(keys: Sequence[Key]) -> str:
    """Return the documented table of keys."""
    rows = [f"| `{k.name}` | {k.takes} | {k.default} | {k.meaning} |" for k in keys]
    return "\n".join(["| key | takes | default | meaning |", "|---|---|---|---|", *rows])
