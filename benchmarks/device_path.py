"""`python -m benchmarks.device_path [--json]`: the CPU's cost of a restore on a GPU; needs no GPU.

The worker side runs on `CudaDevice` with stand-ins of CUDA's streams and of the kernel's launch, so
plans, index arrays and their order are the real ones, and nothing is copied. For a restore of
131,072 tokens, as a load between two steps and as one that overlaps with its forward:

- `launches_...`: kernel launches;
- `issue_ms_...`: milliseconds to plan and issue it (median), without a launch's own CPU time;
- `syncs_per_step`: times that the CPU waits for the device, in steps that load and save.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.measure import machine_line, publish, rounded, table, timed
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec import Family, ModelSpec
from hetero_connector.spec.presets import PRESETS

TOKENS = 131_072
_SLOT_ALIGNMENT = 4096
_NUM_BLOCKS = 16_384
_MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "70b_tp8": ("llama-3.1-70b", {"tp_size": 8}, True),
    "v4_flash": ("deepseek-v4-flash", {"tp_size": 8, "kv_dtype": "fp8_ds_mla"}, False),
    "gpt_oss_120b": ("gpt-oss-120b", {"tp_size": 1}, True),
    "gemma_3_27b_tp2": ("gemma-3-27b", {"tp_size": 2}, True),
}
"""Preset, its arguments, and whether the model's layers call vLLM's layer hooks."""


@dataclass
class Counts:
    """The calls that the stand-ins got."""

    launches: int = 0
    syncs: int = 0


class _Event:
    def __init__(self, **_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream:
    cuda_stream = 1

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def wait_stream(self, other: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        self._counts.syncs += 1


class _Launches:
    """Takes the place of the kernel: `kernel[grid](...)`."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return self._launch

    def _launch(self, *_: Any, **__: Any) -> None:
        self._counts.launches += 1


class _Driver:
    can_use_host_pointers = True

    def register(self, *_: int) -> None: ...

    def unregister(self, *_: int) -> None: ...


@contextmanager
def worker_on_stand_ins(layout: ArtifactLayout) -> Iterator[tuple[Any, Counts]]:
    """Yield a worker side whose device copies nothing and counts."""
    import torch
    from heterocache_cuda.driver import Driver
    from heterocache_cuda.mover import Moves, PageMover

    from hetero_connector.engine.worker import cuda_device, worker_side
    from hetero_connector.metrics import Recorder
    from hetero_connector.store.arena import Arena

    counts = Counts()

    class Mover(PageMover):
        """Copies the index arrays in host memory, as pinning them does."""

        def __init__(self, device: torch.device) -> None:
            super().__init__(device, _Launches(counts))

        def upload(self, moves: Moves) -> torch.Tensor:
            return torch.from_numpy(moves.data).clone()

    @contextmanager
    def on(_: _Stream) -> Iterator[None]:
        yield

    arena = Arena.create(1 << 20, shared=False)
    side = worker_side.WorkerSide(layout, 0, _NUM_BLOCKS, "auto", Recorder())
    cpu = torch.device("cpu")
    with (
        patch.object(torch.cuda, "Stream", lambda *_: _Stream(counts)),
        patch.object(torch.cuda, "Event", _Event),
        patch.object(torch.cuda, "current_stream", lambda: _Stream(counts)),
        patch.object(torch.cuda, "stream", on),
        patch.object(torch.cuda, "synchronize", lambda: _Stream(counts).synchronize()),
        patch.object(Driver, "open", lambda _: _Driver()),
        patch.object(cuda_device, "PageMover", Mover),
        patch.object(worker_side, "device_of", lambda *_: cuda_device.CudaDevice(cpu)),
    ):
        pages = {}
        for layer in layout.model.stored_layers:
            shape = (_NUM_BLOCKS, layer.page_stride_bytes)
            pages[layer.layer] = torch.empty(shape, dtype=torch.uint8, device="meta")
            pages[layer.layer] = pages[layer.layer][:, : layer.page_bytes]
        side.register(pages)
        side.attach(arena.handle, layout)
        yield side, counts
        counts_of_close = counts.syncs
        side.close()
        counts.syncs = counts_of_close
    arena.close()


def restore_of(layout: ArtifactLayout, tokens: int, *, parked: bool) -> Any:
    """Return a load of a whole prompt from slots in random order."""
    from hetero_connector.engine.messages import ArtifactSpan, Blocks, Load

    rng = np.random.default_rng(18)
    model, size = layout.model, layout.chunk_tokens
    spans, blocks, first_slot = [], {}, 0
    for kind in model.types_at(tokens):
        slot = -(-layout.max_bytes[kind] // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        count = tokens // size if kind.family is Family.PREFIX else 1
        offsets = (first_slot + rng.permutation(count) * slot).tolist()
        first_slot += count * slot
        spans.append(ArtifactSpan(kind, tokens - count * size, tokens, size, offsets))
        for layer in model.page_groups[kind]:
            pages = layer.pages_needed(tokens - count * size, tokens)
            ids = 1 + rng.permutation(len(pages)) % (_NUM_BLOCKS - 1)
            blocks[kind, layer.group] = Blocks(pages.start, ids.tolist())
    return Load("request", spans, blocks, parked, resume_tokens=tokens)


def saves_of(layout: ArtifactLayout, requests: int) -> list[Any]:
    """Return saves of one chunk of some requests, as of a step in which they complete one."""
    from hetero_connector.engine.messages import ArtifactCopy, Blocks, PageCopy, Save

    saves = []
    for number in range(requests):
        artifacts, blocks = [], {}
        for kind in layout.model.prefix_types:
            artifacts.append(ArtifactCopy(kind, 0, layout.chunk_tokens, number * (1 << 22)))
            for layer in layout.model.page_groups[kind]:
                pages = layer.pages_needed(0, layout.chunk_tokens)
                blocks[kind, layer.group] = Blocks(0, [1 + number] * len(pages))
        saves.append(Save([number], PageCopy(artifacts, blocks)))
    return saves


@dataclass(frozen=True)
class Restore:
    """A restore's cost to the CPU."""

    gigabytes: float
    launches: int
    issue_s: float
    syncs: int


def measure(model: ModelSpec, calls_hooks: bool, *, parked: bool, repeats: int) -> Restore:
    """Issue a restore several times, also in steps that save."""
    from hetero_connector.engine.messages import StepMetadata

    layout = ArtifactLayout(model, model.default_chunk_tokens())
    load = restore_of(layout, TOKENS, parked=parked)
    size = sum(
        layout.rank_bytes(x.state_type, a.start, a.end) for x in load.spans for a in x.artifacts()
    )
    layers = [x.layer for x in model.stored_layers]
    with worker_on_stand_ins(layout) as (side, counts):

        def step(meta: StepMetadata, calls_hooks: bool) -> None:
            side.begin_step(meta)
            side.start_loads(meta, hooks_called=calls_hooks)
            for layer in layers if calls_hooks else ():
                side.ensure_loaded(layer)
                side.on_layer_written(meta, layer)
            side.end_step(meta)

        for _ in range(2):
            step(StepMetadata(), calls_hooks)
        seconds = []
        launches = 0
        for _ in range(repeats):
            before = counts.launches
            meta = StepMetadata(loads=[load])
            seconds.append(timed(partial(step, meta, calls_hooks)))
            launches = counts.launches - before
            step(StepMetadata(loads=[load], saves=saves_of(layout, 4)), calls_hooks)
            assert side.take_report() is not None, "stand-ins end every copy"
    return Restore(size / 1e9, launches, statistics.median(seconds), counts.syncs)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; writes no results")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    rows, syncs = [], 0
    for name, (preset, settings, calls_hooks) in _MODELS.items():
        model = PRESETS[preset](**settings)
        for parked in (False, True):
            found = measure(model, calls_hooks, parked=parked, repeats=3 if arguments.quick else 15)
            syncs += found.syncs
            milliseconds = 1e3 * found.issue_s
            rows.append(
                [
                    f"{preset} TP{settings['tp_size']}",
                    "between steps" if parked else "with its forward",
                    f"{found.gigabytes:.2f}",
                    str(found.launches),
                    f"{milliseconds:.2f}",
                ]
            )
            figures[f"launches_{name}"] = max(figures.get(f"launches_{name}", 0), found.launches)
            figures[f"issue_ms_{name}"] = max(figures.get(f"issue_ms_{name}", 0), milliseconds)
    figures["syncs_per_step"] = syncs
    figures = rounded(figures)
    header = ["131,072 tokens", "load", "GB", "launches", "issue ms"]
    text = "\n\n".join(
        [
            f"{machine_line()}; medians",
            table(header, rows),
            table(["figure", "value"], [[n, f"{v:.4g}"] for n, v in figures.items()]),
        ]
    )
    publish("device_path", text, figures, {}, as_json=arguments.json, write=not arguments.quick)


if __name__ == "__main__":
    main()
