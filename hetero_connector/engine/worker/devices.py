"""Order copies against the forward pass: with streams on a CUDA device, with nothing on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from hetero_connector.engine.worker.pages import ByteArray, DevicePages, HostPages, Pages
from hetero_connector.errors import StoreError, UnsupportedModelError
from hetero_connector.spec import LayerSpec


class Stopwatch(Protocol):
    """Adds up stretches of work. They may overlap and come from several threads."""

    def start(self) -> Callable[[], None]:
        """Begin a stretch; call the result at its end."""
        ...

    def seconds(self) -> float | None:
        """Return the sum of all stretches; None while the device has not ended one."""
        ...


class Device(Protocol):
    """The memory of the pages, and the order of copies and forward passes in it."""

    overlaps_by_thread: bool
    """True if copies run on the calling thread, so that overlap needs a second thread."""

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> Pages:
        """Return the pages of one layer, ready to be copied."""
        ...

    def pin(self, arena: ByteArray) -> None:
        """Prepare the arena for asynchronous copies, once per process."""
        ...

    def unpin(self) -> None:
        """Undo `pin`, before the arena is unmapped."""
        ...

    def make_copies_wait(self) -> None:
        """Run later copies after the forward's work so far, and after earlier copies."""
        ...

    def make_forward_wait(self) -> None:
        """Run the forward's later work after the copies so far."""
        ...

    def mark(self) -> Callable[[], None]:
        """Return a function that makes the forward wait for the copies so far."""
        ...

    def finish(self) -> None:
        """Block until every copy has ended."""
        ...

    def time_forward(self) -> Stopwatch:
        """Return a stopwatch for the forward pass."""
        ...

    def time_copies(self) -> Stopwatch:
        """Return a stopwatch for copies."""
        ...


class HostStopwatch:
    """Measures work that has ended when its call returns."""

    def __init__(self) -> None:
        self._stretches: list[float] = []

    def start(self) -> Callable[[], None]:
        started_s = time.perf_counter()
        return lambda: self._stretches.append(time.perf_counter() - started_s)

    def seconds(self) -> float | None:
        return sum(self._stretches)


class CudaStopwatch:
    """Measures work on a stream (None: the current one) by two events around each stretch."""

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
    """Pages in host memory. Copies are synchronous, so they are always in order.

    It also asks the kernel for the CPU's AMX tiles, if there are any. vLLM 0.32.0 asks only at its
    first large matrix product. A process that begins with the few tokens after a restored prefix
    uses the tiles earlier, and would end with an illegal instruction.
    """

    overlaps_by_thread = True

    def __init__(self) -> None:
        torch.cpu._init_amx()

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> Pages:
        return HostPages(view)

    def pin(self, arena: ByteArray) -> None:
        pass

    def unpin(self) -> None:
        pass

    def make_copies_wait(self) -> None:
        pass

    def make_forward_wait(self) -> None:
        pass

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def finish(self) -> None:
        pass

    def time_forward(self) -> Stopwatch:
        return HostStopwatch()

    def time_copies(self) -> Stopwatch:
        return HostStopwatch()


class CudaDevice:
    """Pages on a CUDA device. Copies run on a side stream, through the pinned arena."""

    overlaps_by_thread = False

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pinned: int | None = None

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> Pages:
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
        """Unlock the arena after all copies: the driver keeps locked pages."""
        if self._pinned is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None

    def make_copies_wait(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def make_forward_wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def finish(self) -> None:
        self._stream.synchronize()

    def time_forward(self) -> Stopwatch:
        return CudaStopwatch()

    def time_copies(self) -> Stopwatch:
        return CudaStopwatch(self._stream)


def device_of(caches: Mapping[str, torch.Tensor]) -> Device:
    """Return the device of the pages of all layers, given by layer.

    Raises UnsupportedModelError, which names the layer, if they are on several devices, or on one
    that is neither a CPU nor an NVIDIA GPU.
    """
    (first, cache), *_ = caches.items()
    for layer, other in caches.items():
        if other.device != cache.device:
            raise UnsupportedModelError(
                f"layer {layer!r} has its pages on {other.device}, {first!r} on {cache.device}: "
                "HeteroConnector copies to one device only"
            )
    if cache.device.type == "cpu":
        return HostDevice()
    if cache.device.type == "cuda" and torch.version.hip is None:
        return CudaDevice(cache.device)
    raise UnsupportedModelError(
        f"layer {first!r} has its pages on {cache.device}: HeteroConnector copies to the "
        "memory of CPUs and NVIDIA GPUs only. Serve this model without the connector (drop "
        "--kv-transfer-config)"
    )
