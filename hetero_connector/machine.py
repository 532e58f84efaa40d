"""This machine: the memory and disk this process may use, also in a container, and its processor.

This is the one memory probe: the configuration, the arena and the doctor all ask it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_NODE_ROOT = Path("/sys/devices/system/node")
_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True)
class Memory:
    """Bytes of memory in total and available, cgroup limits applied."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Disk:
    """Bytes of a directory's file system."""

    total_bytes: int
    free_bytes: int


def memory(cgroup_root: Path = _CGROUP_ROOT) -> Memory:
    """The memory of this machine, or of its cgroup if that has less."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for limit, used in _cgroup_limits(cgroup_root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Memory(total, available)


def processor() -> str:
    """The processor's name and the machine's number of cores."""
    return f"{processor_name()}, {os.cpu_count()} cores"


def processor_name() -> str:
    """The processor's name, or the architecture's if it has none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def gpu_names(driver: Path = _NVIDIA) -> list[str]:
    """The names of the NVIDIA GPUs that this process sees, without CUDA. Raises OSError."""
    return [
        line.partition(":")[2].strip()
        for path in sorted((driver / "gpus").glob("*/information"))
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]


def is_this_one(name: str) -> bool:
    """Return False if costs that were measured on the machine `name` do not hold here.

    `name`: a processor with its cores, or a GPU, with more about it after a comma; "": unknown.
    """
    here = {processor()}
    with contextlib.suppress(OSError):
        here.update(gpu_names())
    return not name or any(f"{name}, ".startswith(f"{x}, ") for x in here)


def processors_by_node(root: Path = _NODE_ROOT) -> list[set[int]]:
    """The processors that this process may use, of each NUMA node that has memory.

    A node without processors, such as a GPU's memory, is left out. One set if nodes are unknown.
    """
    usable = os.sched_getaffinity(0)
    nodes = [_number_list(root / f"node{n}/cpulist") for n in _number_list(root / "has_memory")]
    return [node & usable for node in nodes if node & usable] or [usable]


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that holds an existing path, such as `ext4`; "" if unknown."""
    found, longest = "", -1
    path = path.resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, kind, *_ = line.split()
        mount = Path(point.encode().decode("unicode_escape"))  # a space is written as \\040
        is_above = mount == path or mount in path.parents
        if is_above and len(mount.parts) >= longest:  # a later mount covers an earlier one
            found, longest = kind, len(mount.parts)
    return found


def addresses() -> dict[str, str]:
    """The network interface's name, by each address of this machine."""
    internet = (socket.AF_INET, socket.AF_INET6)
    return {
        address.address.partition("%")[0]: name
        for name, found in psutil.net_if_addrs().items()
        for address in found
        if address.family in internet
    }


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that cannot be reclaimed) of each cgroup of this process."""
    limits = []
    for directory, limit_name, used_name, cache_name in _cgroup_directories(root):
        limit, used = _number(directory / limit_name), _number(directory / used_name)
        if limit is not None and used is not None:
            reclaimable = _stat(directory / "memory.stat", cache_name)
            limits.append((limit, max(0, used - reclaimable)))
    return limits


def _cgroup_directories(root: Path) -> list[tuple[Path, str, str, str]]:
    """Return the memory cgroup and its parents, v2 or v1, with the names of their files."""
    names = ("memory.max", "memory.current", "inactive_file")
    base, controller = root, "0::"
    if not (root / "cgroup.controllers").exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        base, controller = root / "memory", "memory"
    own = base / _own_cgroup(controller)
    return [(d, *names) for d in (own, *own.parents) if d == base or base in d.parents]


def _own_cgroup(controller: str) -> str:
    """Return this process's cgroup, relative to the root of its hierarchy; "" if unknown."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller == f"{number}::" or controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _number_list(path: Path) -> set[int]:
    """Return the numbers of a list such as `0-3,8`; none if there is no such file."""
    try:
        ranges = path.read_text().strip().split(",")
    except OSError:
        return set()
    limits = (part.split("-") for part in ranges if part)
    return {n for limit in limits for n in range(int(limit[0]), int(limit[-1]) + 1)}


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values.get(name, 0))


def disk(directory: Path) -> Disk:
    """The space of the file system of `directory`, which need not exist yet. Raises OSError."""
    existing = next(d for d in (directory, *directory.parents) if d.exists())
    usage = psutil.disk_usage(os.fspath(existing))
    return Disk(usage.total, usage.free)


def bytes_under(directory: Path) -> int:
    """The disk space of the files below `directory`; 0 if it does not exist. Raises OSError."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # replaced or removed by a running engine
                total += (Path(folder) / name).lstat().st_blocks * 512
    return total
