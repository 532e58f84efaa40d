"""The tensor-parallel ranks of an engine without the engine: their pages and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby

import numpy as np
import torch

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import (
    ArtifactCopy,
    ArtifactSpan,
    Blocks,
    Load,
    PageCopy,
)
from hetero_connector.engine.worker.copy_plan import CopyPlanner
from hetero_connector.engine.worker.devices import Device
from hetero_connector.engine.worker.host_device import HostDevice
from hetero_connector.engine.worker.pages import page_view
from hetero_connector.spec import LayerSpec
from tests.artifacts.whole_pages import Bytes, Layer, model_of
from tests.engine.cuda_stand_ins import cuda_device_on_cpu

CHUNK, NUM_BLOCKS = 64, 24


@contextmanager
def host_device() -> Iterator[HostDevice]:
    yield HostDevice()


DEVICES: dict[str, Callable[[], AbstractContextManager[Device]]] = {
    "host": host_device,
    "cuda": cuda_device_on_cpu,
}


class Ranks:
    """All ranks of one engine. Each has its part of a prompt's pages."""

    def __init__(self, layers: tuple[Layer, ...], tp_size: int, kind: str = "host") -> None:
        self.layout = ArtifactLayout(model_of(tp_size, layers), CHUNK)
        self._layers = layers
        self._device = DEVICES[kind]
        self._caches = [
            {spec.layer: _cache(spec) for spec in self.layout.model.layers} for _ in range(tp_size)
        ]

    def compute(self, whole: Mapping[str, Bytes], blocks: Sequence[int]) -> None:
        """Write each rank's part of the whole pages into its blocks."""
        tp_size = self.layout.model.tp_size
        for rank, caches in enumerate(self._caches):
            for layer in self._layers:
                pages = whole[layer.name]
                part = torch.from_numpy(layer.part(pages, tp_size, rank))
                caches[layer.name][list(blocks[: len(pages)])] = part

    def check(self, whole: Mapping[str, Bytes], blocks: Sequence[int], end: int) -> None:
        """Assert that the blocks have the bytes of an artifact ending at `end`, and no others."""
        tp_size = self.layout.model.tp_size
        for rank, caches in enumerate(self._caches):
            for layer, spec in zip(self._layers, self.layout.model.layers, strict=True):
                needed = spec.pages_needed(0, end)
                expected = np.full((NUM_BLOCKS, spec.page_bytes), _UNTOUCHED, np.uint8)
                part = layer.part(whole[layer.name], tp_size, rank)
                expected[[blocks[i] for i in needed]] = part[needed.start : needed.stop]
                assert np.array_equal(caches[layer.name].numpy(), expected), (rank, layer.name)

    def copy(
        self, arena: Bytes, artifacts: list[ArtifactCopy], blocks: list[int], *, save: bool
    ) -> None:
        """Save or load on one rank after the other."""
        model = self.layout.model
        tables = {(x.state_type, x.group): Blocks(0, blocks) for x in model.layers}
        for rank, caches in enumerate(self._caches):
            with self._device() as device:
                for spec in model.layers:
                    view = page_view(spec, caches[spec.layer], NUM_BLOCKS)
                    device.add_layer(spec, view, self.layout.page_runs(spec, rank))
                device.attach(arena, 0)
                copy_pages(device, self.layout, rank, PageCopy(artifacts, tables), save=save)


def copy_pages(
    device: Device, layout: ArtifactLayout, rank: int, copy: PageCopy, *, save: bool
) -> None:
    """Save or load on one rank."""
    planner = CopyPlanner(layout, rank, {x.layer for x in layout.model.layers})
    layers = [x.layer for x in layout.model.layers]
    if save:
        device.prepare_saves(planner.plan_saves([copy]))(layers)
        return
    spans = [
        ArtifactSpan(kind, some[0].start, some[-1].end, CHUNK, [x.offset for x in some])
        for kind, group in groupby(copy.artifacts, lambda x: x.state_type)
        for some in [list(group)]
    ]
    load = Load("a", spans, copy.blocks, False, max(x.end for x in spans))
    for wait in device.load(planner.plan_loads([load]), [layers], lambda: lambda: None):
        wait()


_UNTOUCHED = 7


def _cache(spec: LayerSpec) -> torch.Tensor:
    """Return `[blocks, page] uint8` over a padded buffer."""
    raw = torch.full((NUM_BLOCKS, spec.page_stride_bytes), _UNTOUCHED, dtype=torch.uint8)
    return raw[:, : spec.page_bytes]


def whole_pages(layers: Sequence[Layer], tokens: int, seed: int) -> dict[str, Bytes]:
    """Return random pages `[pages, whole bytes]` of a prompt by layer."""
    rng = np.random.default_rng(seed)
    return {
        x.name: rng.integers(0, 256, (tokens // x.spec(1).block_tokens, x.whole_bytes), np.uint8)
        for x in layers
    }
