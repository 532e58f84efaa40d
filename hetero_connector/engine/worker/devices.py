"""Ordering copies against the forward pass: nothing to do on a CPU, streams on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from hetero_connector.engine.worker.pages import ByteArray, DevicePages, HostPages, Pages
from hetero_connector.errors import StoreError
from hetero_connector.spec import LayerSpec


class Stopwatch(Protocol):
    """Adds up stretches of work, which may overlap and come from several threads."""

    def start(self) -> Callable[[], None]:
        """Begin a stretch; call the result at its end."""
        ...

    def seconds(self) -> float | None:
        """Their sum; None while the device has not reached the end of one."""
        ...


class Device(Protocol):
    """Where the pages live, and how copies are ordered against the forward pass."""

    overlaps_by_thread: bool
    """Copies run on the calling thread; a second thread gives overlap."""

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> Pages:
        """Copyable pages of one layer."""
        ...

    def pin(self, arena: ByteArray) -> None:
        """Make the arena fit for asynchronous copies; once per process."""
        ...

    def unpin(self) -> None:
        """Undo that, before the arena goes."""
        ...

    def after_forward_so_far(self) -> None:
        """Copies issued from now run after what the forward has issued, and the earlier copies."""
        ...

    def before_forward_goes_on(self) -> None:
        """What the forward issues from now runs after the copies issued so far."""
        ...

    def mark(self) -> Callable[[], None]:
        """A call that makes the forward wait for the copies issued up to now."""
        ...

    def finish(self) -> None:
        """Block until every issued copy has ended."""
        ...

    def time_forward(self) -> Stopwatch:
        """For stretches of the forward pass."""
        ...

    def time_copies(self) -> Stopwatch:
        """For stretches of copies."""
        ...


class HostStopwatch:
    """Work that has ended when its call returns."""

    def __init__(self) -> None:
        self._stretches: list[float] = []

    def start(self) -> Callable[[], None]:
        started_s = time.perf_counter()
        return lambda: self._stretches.append(time.perf_counter() - started_s)

    def seconds(self) -> float | None:
        return sum(self._stretches)


class CudaStopwatch:
    """Work issued on a stream (None: the one that is current), between two events each."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> Callable[[], None]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._record(first)

        def stop() -> None:
            self._record(last)
            self._stretches.append((first, last))

        return stop

    def seconds(self) -> float | None:
        if not all(last.query() for _, last in self._stretches):
            return None
        return 1e-3 * sum(float(first.elapsed_time(last)) for first, last in self._stretches)

    def _record(self, event: torch.cuda.Event) -> None:
        (self._stream or torch.cuda.current_stream()).record_event(event)


class HostDevice:
    """Pages in host memory: copies are synchronous, so they are always ordered.

    Asks the kernel for the CPU's AMX tiles, where it has any. vLLM 0.32.0 leaves that to its first
    larger matrix product; a process that begins with the few tokens behind a restored prefix
    uses the tiles before, and ends with an illegal instruction.
    """

    overlaps_by_thread = True

    def __init__(self) -> None:
        torch.cpu._init_amx()

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> Pages:
        """Pages as numpy rows."""
        return HostPages(view)

    def pin(self, arena: ByteArray) -> None:
        """Nothing to pin."""

    def unpin(self) -> None:
        """Nothing was."""

    def after_forward_so_far(self) -> None:
        """Always so."""

    def before_forward_goes_on(self) -> None:
        """Always so."""

    def mark(self) -> Callable[[], None]:
        """Copies have ended when they return."""
        return lambda: None

    def finish(self) -> None:
        """Always so."""

    def time_forward(self) -> Stopwatch:
        """On the clock."""
        return HostStopwatch()

    def time_copies(self) -> Stopwatch:
        """On the clock."""
        return HostStopwatch()


class CudaDevice:
    """Pages on a CUDA device: copies on a side stream through the pinned arena."""

    overlaps_by_thread = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pinned: int | None = None

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> Pages:
        """Pages gathered and scattered on the side stream."""
        return DevicePages(view, self._stream)

    def pin(self, arena: ByteArray) -> None:
        """Page-lock the arena (cudaHostRegister), so that copies are asynchronous."""
        address = arena.__array_interface__["data"][0]
        if self._pinned == address:
            return
        status = torch.cuda.cudart().cudaHostRegister(address, arena.nbytes, 0)
        if int(status) != 0:
            raise StoreError(
                f"cudaHostRegister of the {arena.nbytes >> 20} MiB DRAM arena failed with "
                f"{status}; lower dram_gib or raise the locked-memory limit (ulimit -l)"
            )
        self._pinned = address

    def unpin(self) -> None:
        """Undo `pin` once no copy is under way: pages that are locked stay with their driver."""
        if self._pinned is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None

    def after_forward_so_far(self) -> None:
        """The side stream waits for the current one."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def before_forward_goes_on(self) -> None:
        """The current stream waits for the side stream."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        """An event on the side stream, for the current stream to wait on."""
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def finish(self) -> None:
        """Synchronise the side stream."""
        self._stream.synchronize()

    def time_forward(self) -> Stopwatch:
        """Events on the current stream."""
        return CudaStopwatch()

    def time_copies(self) -> Stopwatch:
        """Events on the side stream."""
        return CudaStopwatch(self._stream)


def device_of(tensor: torch.Tensor) -> Device:
    """The device the pages live on; host memory unless it is CUDA."""
    return CudaDevice(tensor.device) if tensor.is_cuda else HostDevice()
