"""`CudaDevice` without a GPU: streams that run work at once, and Triton's interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from heterocache_cuda import kernels
from heterocache_cuda.bounce import BounceBuffer
from heterocache_cuda.driver import CudaError, Driver
from heterocache_cuda.mover import Int64Array, Moves, PageMover
from triton.runtime.interpreter import InterpretedFunction

from hetero_connector.engine.worker import cuda_device
from hetero_connector.engine.worker.cuda_device import CudaDevice


class Event:
    """An event of a stream. `calls` of all streams are in one list, in order."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.fired = True
        self.enable_timing = enable_timing
        self.after: tuple[str, str, str] | None = None
        """The last call before it was recorded."""
        self.stream = ""

    def query(self) -> bool:
        return self.fired

    def elapsed_time(self, other: Event) -> float:
        assert self.enable_timing
        assert other.enable_timing
        return 1.0


class Stream:
    """A stream: it notes its calls."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda = cuda
        self.name = name
        self.cuda_stream = 0 if name == "forward" else 1
        """0: the default stream."""

    def wait_stream(self, other: Stream) -> None:
        self._cuda.calls.append((self.name, "waits for", other.name))

    def wait_event(self, event: Event) -> None:
        self._cuda.calls.append((self.name, "waits for", "an event"))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.fired = not self._cuda.is_busy
        event.after = self._cuda.calls[-1] if self._cuda.calls else None
        event.stream = self.name
        self._cuda.events.append(event)
        return event

    def synchronize(self) -> None:
        self._cuda.calls.append(("cpu", "waits for", self.name))


class Cuda:
    """The calls that the stand-ins of one test have received."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.events: list[Event] = []
        self.variants: list[tuple[Any, ...]] = []
        """The mode and the tile of each launch."""
        self.uploads: list[tuple[str, int]] = []
        """The stream and the bytes of each upload."""
        self.is_busy = False
        """True: events do not fire before `finish`."""
        self.refuses_to_pin = False
        self.can_copy_batches = True
        self.pinned: dict[int, int] = {}
        """Bytes of each pinned piece, by its address."""
        self.current = Stream(self, "forward")
        self._names = iter(("loads", "parked loads", "saves"))

    def finish(self) -> None:
        """Let all work end."""
        self.is_busy = False
        for event in self.events:
            event.fired = True

    def open_bounce(
        self, mover: PageMover, arena: npt.NDArray[np.uint8], largest_artifact_bytes: int
    ) -> BounceBuffer:
        buffer = torch.empty(largest_artifact_bytes, dtype=torch.uint8)
        return BounceBuffer(mover, arena, buffer, lambda: self.current.synchronize())

    def new_stream(self, device: torch.device) -> Stream:
        return Stream(self, next(self._names))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    # As the driver

    can_use_host_pointers = True

    def register(self, address: int, size_bytes: int) -> None:
        self.calls.append(("cpu", "pins", str(size_bytes)))
        if self.refuses_to_pin:
            raise CudaError("cuMemHostRegister failed")
        self.pinned[address] = size_bytes

    def unregister(self, address: int) -> None:
        self.calls.append(("cpu", "unpins", ""))
        del self.pinned[address]

    def copy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        sizes: Int64Array,
        stream: int,
        *,
        is_source_stable: bool,
    ) -> None:
        assert stream == self.current.cuda_stream != 0
        order = "in any order" if is_source_stable else "in stream order"
        self.calls.append((self.current.name, "copies", order))
        for target, source, size in zip(targets, sources, sizes, strict=True):
            in_arena = source if is_source_stable else target
            assert any(
                first <= in_arena and in_arena + size <= first + length
                for first, length in self.pinned.items()
            ), "a copy must lie in one pinned piece"
            ctypes.memmove(int(target), int(source), int(size))


class NotedMover(PageMover):
    """A mover that notes its launches, and runs them in the interpreter."""

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        super().__init__(device, InterpretedFunction(kernels.move_pages.fn))
        self._cuda = cuda

    def upload(self, moves: Moves) -> torch.Tensor:
        self._cuda.uploads.append((self._cuda.current.name, moves.data.nbytes))
        return super().upload(moves)

    def reserve_uploads(self) -> None:
        self._cuda.calls.append((self._cuda.current.name, "reserves", "uploads"))

    def _run(self, grid: Any, *arguments: Any) -> None:
        self._cuda.calls.append((self._cuda.current.name, "moves", f"{grid[1]} jobs"))
        self._cuda.variants.append(arguments[-2:])
        super()._run(grid, *arguments)


@contextmanager
def cuda_stand_ins() -> Iterator[Cuda]:
    """Replace torch.cuda for `CudaDevice`."""
    cuda = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", cuda.new_stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda: cuda.current)
        patch.setattr(torch.cuda, "stream", cuda.on)
        patch.setattr(Driver, "open", lambda _: cuda)
        patch.setattr(BounceBuffer, "open", cuda.open_bounce)
        patch.setattr(cuda_device, "PageMover", partial(NotedMover, cuda))
        yield cuda


@contextmanager
def cuda_device_on_cpu() -> Iterator[CudaDevice]:
    """A `CudaDevice` whose pages are in host memory, and whose kernel needs no warming up."""
    with cuda_stand_ins(), patch.object(PageMover, "warm_up"):
        yield CudaDevice(torch.device("cpu"))
