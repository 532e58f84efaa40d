"""`torch.cuda` without a GPU, for the dry run.

Kernels are queued, and run when something waits for them, as late as the events allow: a missing
wait gives wrong bytes. Torch's own operations run at once, and a graph repeats those that it has
seen. The clock is virtual: every recorded event costs a millisecond.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from heterocache_cuda.driver import CudaError
from heterocache_cuda.mover import Int64Array
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

_RECORD_MS = 1.0


class Event:
    """An event: it has fired when its stream has come to it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.recorded = False
        self.fired_ms: float | None = None

    def query(self) -> bool:
        return not self.recorded or self.fired_ms is not None

    def synchronize(self) -> None:
        self._gpu.run_until(self.query)

    def elapsed_time(self, other: Event) -> float:
        assert self.fired_ms is not None
        assert other.fired_ms is not None
        return other.fired_ms - self.fired_ms


class Work(NamedTuple):
    """An entry of a stream's queue."""

    run: Callable[[], object]
    after: Event | None = None
    event: Event | None = None


class Stream:
    """A queue of work."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.queue: deque[Work] = deque()
        self.cuda_stream = len(gpu.streams)
        """0: the default stream."""
        gpu.streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.recorded, event.fired_ms = True, None
        self.queue.append(Work(lambda: None, event=event))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(Work(lambda: None, after=event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._gpu.run_until(lambda: not self.queue)


class Kernel:
    """A kernel that is queued on the current stream and interpreted."""

    def __init__(self, gpu: Gpu, kernel: Any) -> None:
        self._gpu = gpu
        self._interpreted = InterpretedFunction(kernel.fn)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self._gpu.issue(lambda: self._interpreted[grid](*arguments, **options))

        return launch


class Graph(TorchDispatchMode):
    """A CUDA graph, and the context manager in which it takes torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation = partial(function, *args, **(kwargs or {}))
        out = operation()
        self._operations.append(lambda: out.copy_(operation()))
        return out

    def replay(self) -> None:
        for operation in self._operations:
            operation()


class Gpu:
    """The state of all streams."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.now_ms = 0.0
        self.current = Stream(self)

    def issue(self, work: Callable[[], object]) -> None:
        self.current.queue.append(Work(work))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run the oldest work that may run, of the newest stream first."""
        while not done():
            ready = [s for s in reversed(self.streams) if s.queue and _may_run(s.queue[0])]
            assert ready, "streams wait for each other, or for an event that was never recorded"
            work = ready[0].queue.popleft()
            work.run()
            if work.event:
                self.now_ms += _RECORD_MS
                work.event.fired_ms = self.now_ms

    def synchronize(self, *_: object) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class StandInDriver:
    """The driver: copies of a batch are queued on the current stream, one entry for each."""

    can_use_host_pointers = True
    can_copy_batches = True

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._pinned: dict[int, int] = {}
        """Bytes by address."""

    def register(self, address: int, size_bytes: int) -> None:
        if any(
            address < start + size and start < address + size_bytes
            for start, size in self._pinned.items()
        ):
            raise CudaError("registered twice")
        self._pinned[address] = size_bytes

    def unregister(self, address: int) -> None:
        if self._pinned.pop(address, None) is None:
            raise CudaError("not registered")

    def copy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        sizes: Int64Array,
        stream: int,
        *,
        is_source_stable: bool,
    ) -> None:
        assert stream == self._gpu.current.cuda_stream
        assert stream, "the default stream takes no batches"
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self._gpu.issue(partial(ctypes.memmove, int(target), int(source), int(size)))


def _may_run(work: Work) -> bool:
    return work.after is None or work.after.query()


@contextmanager
def gpu_stand_ins() -> Iterator[Gpu]:
    """Replace what the checks use of `torch.cuda`."""
    gpu = Gpu()
    properties = SimpleNamespace(
        name="stand-in", multi_processor_count=1, total_memory=1 << 30, major=0, minor=0
    )
    replaced: dict[str, Any] = {
        "Stream": lambda device=None: Stream(gpu),
        "Event": lambda enable_timing=False: Event(gpu),
        "CUDAGraph": Graph,
        "stream": gpu.on,
        "graph": lambda graph: graph,
        "current_stream": lambda device=None: gpu.current,
        "synchronize": gpu.synchronize,
        "get_device_properties": lambda device=None: properties,
        "_sleep": lambda cycles: gpu.issue(lambda: time.sleep(0)),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield gpu
