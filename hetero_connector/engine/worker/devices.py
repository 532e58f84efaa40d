"""The port between a worker's orders and the memory of its pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from hetero_connector.artifacts.tensor_parallel import PageRun
from hetero_connector.engine.worker.copy_plan import Copies
from hetero_connector.engine.worker.pages import ByteArray
from hetero_connector.spec import LayerSpec

Wait = Callable[[], None]
SaveLayers = Callable[[Sequence[str]], None]
StartTimer = Callable[[], Callable[[], None]]
"""Begins a stretch of work to be timed; its result ends it."""


class Stopwatch(Protocol):
    """Adds up stretches of work. They may overlap and come from several threads."""

    def start(self) -> Callable[[], None]:
        """Begin a stretch; call the result at its end."""
        ...

    def seconds(self) -> float | None:
        """Return the sum of all stretches; None while the device has not ended one."""
        ...


class Device(Protocol):
    """Copies between pages and the arena, in order with the forward pass.

    Only `finish` and `detach` wait for copies, except where copies run on the calling thread.
    """

    overlaps_by_thread: bool
    """True if copies run on the calling thread, so that overlap needs a second thread."""
    layers_per_copy: int
    """Layers that are worth one copy, if they are copied while the forward runs."""

    def add_layer(self, spec: LayerSpec, view: torch.Tensor, runs: Sequence[PageRun]) -> None:
        """Take the pages of a layer, `[num_blocks, ...] uint8`, that this rank copies by runs."""
        ...

    def warm_up(self) -> None:
        """Prepare what the first copy would wait for, once all layers are known."""
        ...

    def attach(self, arena: ByteArray, largest_artifact_bytes: int) -> None:
        """Use this arena. Raises StoreError if it cannot be prepared for copies."""
        ...

    def detach(self) -> None:
        """End all copies, and use the arena no more: it may be unmapped."""
        ...

    def load(
        self, copies: Sequence[Copies], batches: Sequence[Sequence[str]], time: StartTimer
    ) -> list[Wait]:
        """Load the pages of some layers, batch by batch, after the forward's work so far.

        Each result, called once or more, makes the forward's later work wait for a batch. On a
        device without streams it is the copy itself, and is called once.
        """
        ...

    def load_parked(self, copies: Sequence[Copies], time: StartTimer) -> Callable[[], bool]:
        """Load pages of all layers after the forward's work so far; no other work waits for it.

        Return a function that tells if these copies have ended.
        """
        ...

    def prepare_saves(self, copies: Sequence[Copies]) -> SaveLayers:
        """Return a function that saves the pages of some layers.

        It saves them as the forward's work leaves them that comes before its call.
        """
        ...

    def make_forward_wait_for_saves(self) -> None:
        """Run the forward's later work after the saves so far: it may overwrite their pages."""
        ...

    def clear(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """Fill pages with zeros before the forward's later work; blocks by KV cache group."""
        ...

    def finish(self) -> None:
        """Block until every copy has ended: the memory of the pages is about to be released."""
        ...

    def fence(self) -> Callable[[], bool]:
        """Return a function that tells if all loads and saves so far have ended.

        Parked loads have functions of their own.
        """
        ...

    def time_forward(self) -> Stopwatch:
        """Return a stopwatch for the forward pass."""
        ...

    def time_copies(self) -> Stopwatch:
        """Return a stopwatch for loads."""
        ...
