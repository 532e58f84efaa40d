"""`python -m benchmarks.layerwise_transfer [--json]`: the cost of the parts of a restore.

- Copies between the engine's pages and the arena, by state type, geometry and order of block ids,
  over one plain memcpy of the same bytes (`copy_load_worst`, `copy_save_worst`).
- TTFT added by a restore from DRAM whose layers are loaded while earlier ones compute, over the
  TTFT added if all layers are loaded first (`overlap_over_at_start`; below 1 overlap is faster).
- SSD transfers by extent size, over an O_DIRECT dd (`nixl_read_over_dd`, `nixl_write_over_dd`:
  the best extent size).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_process import EngineProcess, prompt_tokens
from benchmarks.measure import (
    DirectDisk,
    Memcpy,
    Samples,
    machine_line,
    publish,
    rounded,
    table,
    timed,
    touched,
)
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec import Family, ModelSpec, StateType
from hetero_connector.spec.presets import PRESETS, model_spec_from_config
from hetero_connector.transfer.base import Direction, Extent, FileTransfer, OpenFile, wait_for
from hetero_connector.transfer.choose import choose_file_transfer
from hetero_connector.transfer.pread_files import PreadFiles
from hetero_connector.units import MIB

SSD_EXTENTS = [64 << 10, 256 << 10, MIB, 4 * MIB]
_SSD_BYTES = 192 * MIB
_SLOT_ALIGNMENT = 4096
_TIMEOUT_S = 60.0
_ORDERS = ("ascending", "descending", "scattered")
_MIN_COPY_BYTES = 1 * MIB
"""A smaller copy fits into the processor's cache, so it does not measure memory."""


@dataclass(frozen=True)
class CopyTimes:
    """The copies of one state type in one order of block ids; seconds are medians."""

    model: str
    state_type: StateType
    order: str
    size_bytes: int
    plan_s: float
    load_over_memcpy: float
    save_over_memcpy: float


def copy_models() -> dict[str, tuple[ModelSpec, int]]:
    """Return the geometries to measure, each with a prompt length in tokens."""
    from examples.checkpoints.recipes import RECIPES

    def small(name: str) -> ModelSpec:
        recipe = RECIPES[name]
        config = {"model_type": recipe.model_type, "torch_dtype": "float32", **recipe.config}
        return model_spec_from_config(config, block_tokens=32)

    return {
        "dense-bench": (small("dense-bench"), 8192),
        "gemma3": (small("gemma3"), 8192),
        "llama-3.1-8b": (PRESETS["llama-3.1-8b"](), 1024),
        "gpt-oss-120b": (PRESETS["gpt-oss-120b"](), 2048),
        "deepseek-v4-flash": (PRESETS["deepseek-v4-flash"](), 8192),
    }


def measure_copies(name: str, model: ModelSpec, tokens: int, repeats: int) -> list[CopyTimes]:
    """Measure every state type of a model in every order of block ids."""
    results = []
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    for state_type in model.state_types:
        bench = _TypeCopies(layout, state_type, tokens)
        if bench.size_bytes < _MIN_COPY_BYTES:
            continue
        memcpy = Memcpy(bench.size_bytes)
        for order in _ORDERS:
            copy = bench.order(order)
            samples = Samples()
            for _ in range(repeats):
                samples.add("plan", timed(partial(bench.plan, copy)))
                samples.add("load", bench.move(copy, "load"))
                samples.add("memcpy", memcpy.reused())
                samples.add("save", bench.move(copy, "save"))
            results.append(
                CopyTimes(
                    name,
                    state_type,
                    order,
                    bench.size_bytes,
                    samples.median("plan"),
                    samples.paired_ratio("load", "memcpy"),
                    samples.paired_ratio("save", "memcpy"),
                )
            )
    return results


class _TypeCopies:
    """Pages of one state type's layers, an arena, and the copies between them."""

    def __init__(self, layout: ArtifactLayout, state_type: StateType, tokens: int) -> None:
        import torch

        from hetero_connector.engine.messages import ArtifactCopy
        from hetero_connector.engine.worker.copy_plan import CopyPlanner
        from hetero_connector.engine.worker.host_device import HostDevice

        self._layout, self._type = layout, state_type
        size = layout.chunk_tokens
        ends = range(size, tokens + 1, size)
        if state_type.family is Family.BOUNDARY:
            ends = range(tokens, tokens + 1)
        artifacts = [ArtifactCopy(state_type, end - size, end, 0) for end in ends]
        self._artifacts = _placed(layout, artifacts)
        self.size_bytes = sum(
            layout.rank_bytes(state_type, a.start, a.end) for a in self._artifacts
        )
        last = self._artifacts[-1]
        self._arena = touched(last.offset + layout.rank_bytes(state_type, last.start, last.end))
        start = self._artifacts[0].start
        self._ranges = {
            x.group: x.pages_needed(start, last.end) for x in layout.model.page_groups[state_type]
        }
        self._planner = CopyPlanner(layout, 0, {x.layer for x in layout.model.layers})
        self._device = HostDevice()
        self._device.attach(self._arena, 0)
        self._layers = [x.layer for x in layout.model.layers_of(state_type)]
        for layer in layout.model.layers_of(state_type):
            blocks = len(self._ranges[layer.group]) + 2
            memory = touched(blocks * layer.page_stride_bytes)
            view = torch.from_numpy(memory).view(blocks, layer.page_stride_bytes)
            runs = layout.page_runs(layer, 0)
            self._device.add_layer(layer, view[:, : layer.page_bytes], runs)

    def order(self, order: str) -> Any:
        """Return the complete load with block ids in that order."""
        from hetero_connector.engine.messages import ArtifactSpan, Blocks, Load

        blocks = {}
        for group, pages in self._ranges.items():
            ids = np.arange(1, len(pages) + 1)
            if order == "descending":
                ids = ids[::-1]
            elif order == "scattered":
                ids = np.random.default_rng(0).permutation(ids)
            blocks[self._type, group] = Blocks(pages.start, ids.tolist())
        first, last = self._artifacts[0], self._artifacts[-1]
        offsets = [a.offset for a in self._artifacts]
        span = ArtifactSpan(self._type, first.start, last.end, first.end - first.start, offsets)
        return Load("benchmark", [span], blocks, parked=False, resume_tokens=last.end)

    def plan(self, load: Any) -> Any:
        return self._planner.plan_loads([load])

    def move(self, load: Any, direction: str) -> float:
        """Return the seconds of all layers' copies, without their planning."""
        plan = self.plan(load)
        if direction == "save":
            save = self._device.prepare_saves(plan)
            started = time.perf_counter()
            save(self._layers)
            return time.perf_counter() - started
        waits = self._device.load(plan, [self._layers], lambda: lambda: None)
        started = time.perf_counter()
        for wait in waits:
            wait()
        return time.perf_counter() - started


def _placed(layout: ArtifactLayout, artifacts: list[Any]) -> list[Any]:
    """Return the artifacts in consecutive slots, as a new store assigns them."""
    slot = max(layout.rank_bytes(a.state_type, a.start, a.end) for a in artifacts)
    slot = -(-slot // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    return [a._replace(offset=index * slot) for index, a in enumerate(artifacts)]


def measure_overlap(repeats: int) -> dict[str, float]:
    """Return the median TTFT of an 8,100-token prompt, in seconds: own hit, and both restores."""
    samples = Samples()
    prompt = prompt_tokens(8100, 1)
    arguments: dict[str, Any] = {"max_model_len": 8448}
    with (
        EngineProcess("dense-bench", {"dram_gib": 0.5, "layerwise": "on"}, **arguments) as on,
        EngineProcess("dense-bench", {"dram_gib": 0.5, "layerwise": "off"}, **arguments) as off,
    ):
        engines = {"overlap": on, "at start": off}
        for engine in engines.values():
            for _ in range(8):  # computes it, then touches every page of the engine's cache
                engine.complete(prompt)
                engine.reset_prefix_cache()
        order = random.Random(0)
        for _ in range(repeats):
            for name, engine in order.sample(list(engines.items()), len(engines)):
                for sample in (name, f"{name}: local"):
                    engine.wake()
                    samples.add(sample, engine.complete(prompt).ttft_s)
                engine.reset_prefix_cache()
    return samples.medians()


def measure_ssd(directory: Path, repeats: int) -> dict[str, list[tuple[int, float]]]:
    """Return, by curve, points of (bytes of an extent, bandwidth over that of dd)."""
    curves: dict[str, list[tuple[int, float]]] = {}
    memory = touched(_SSD_BYTES)
    disk = DirectDisk(directory, _SSD_BYTES)
    try:
        with _direct_file(directory / "slab", memory) as file:
            kinds: tuple[Callable[[], FileTransfer], ...] = (
                partial(_nixl, memory, file, directory),
                partial(PreadFiles, memory, [file]),
            )
            for open_transfer in kinds:
                transfer = open_transfer()
                try:
                    for size in SSD_EXTENTS:
                        ratios = _ssd_ratios(transfer, disk, size, repeats)
                        for direction, ratio in ratios.items():
                            name = f"{transfer.name} {direction.value}"
                            curves.setdefault(name, []).append((size, ratio))
                finally:
                    transfer.close()
    finally:
        disk.close()
    return curves


def _nixl(memory: np.ndarray, file: OpenFile, directory: Path) -> FileTransfer:
    """Return the NIXL that is chosen here. Raises RuntimeError if it does not work."""
    chosen = choose_file_transfer(memory, [file], directory)
    if not chosen.transfer.name.startswith("nixl"):
        chosen.transfer.close()
        raise RuntimeError(f"NIXL is measured, too, so it must work: {chosen.reason}")
    return chosen.transfer


def _ssd_ratios(
    transfer: FileTransfer, disk: DirectDisk, extent_bytes: int, repeats: int
) -> dict[Direction, float]:
    extents = [Extent(0, at, at, extent_bytes) for at in range(0, _SSD_BYTES, extent_bytes)]
    references: dict[Direction, Callable[[], float]] = {
        Direction.READ: disk.read_bandwidth,
        Direction.WRITE: disk.write_bandwidth,
    }
    ratios: dict[Direction, list[float]] = {direction: [] for direction in references}
    for _ in range(repeats):
        for direction, reference in references.items():
            seconds = timed(partial(_move, transfer, direction, extents))
            ratios[direction].append(_SSD_BYTES / seconds / reference())
    return {direction: statistics.median(values) for direction, values in ratios.items()}


def _move(transfer: FileTransfer, direction: Direction, extents: list[Extent]) -> None:
    wait_for(transfer.submit(direction, extents), _TIMEOUT_S)


@contextmanager
def _direct_file(path: Path, memory: np.ndarray) -> Iterator[OpenFile]:
    path.write_bytes(os.urandom(len(memory)))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        yield OpenFile(fd, len(memory))
    finally:
        os.close(fd)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layerwise_transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--no-files", action="store_true", help="write nothing to results/")
    parser.add_argument("--dir", type=Path, help="directory of the SSD files (default: .cache)")
    arguments = parser.parse_args()
    parent = arguments.dir or Path.cwd() / ".cache"
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="benchmark-", dir=parent))
    try:
        copies = [c for n, (m, t) in copy_models().items() for c in measure_copies(n, m, t, 9)]
        ssd = measure_ssd(scratch, 5)
        overlap = measure_overlap(9)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    figures = _figures(copies, overlap, ssd)
    text = _report(copies, overlap, ssd, figures)
    details = {"overlap": overlap, "ssd": ssd, "copies": [vars(c) for c in copies]}
    publish(
        "layerwise_transfer",
        text,
        figures,
        details,
        as_json=arguments.json,
        write=not arguments.no_files,
    )


def _figures(
    copies: list[CopyTimes], overlap: dict[str, float], ssd: dict[str, list[tuple[int, float]]]
) -> dict[str, float]:
    added = {name: overlap[name] - overlap[f"{name}: local"] for name in ("overlap", "at start")}
    best = {
        f"{kind}_{way}_over_dd": max(r for n, p in ssd.items() if _is(n, kind, way) for _, r in p)
        for kind in ("nixl", "pread")
        for way in ("read", "write")
    }
    return rounded(
        {
            "copy_load_worst": max(c.load_over_memcpy for c in copies),
            "copy_save_worst": max(c.save_over_memcpy for c in copies),
            "overlap_over_at_start": added["overlap"] / added["at start"],
            **best,
        }
    )


def _is(curve: str, kind: str, way: str) -> bool:
    return curve.startswith(kind) and curve.endswith(way)


def _report(
    copies: list[CopyTimes],
    overlap: dict[str, float],
    ssd: dict[str, list[tuple[int, float]]],
    figures: dict[str, float],
) -> str:
    copy_rows = [
        [
            f"{c.model} {c.state_type.value}",
            c.order,
            f"{c.size_bytes / 1e6:.1f}",
            f"{1e3 * c.plan_s:.2f}",
            f"{c.load_over_memcpy:.2f}",
            f"{c.save_over_memcpy:.2f}",
        ]
        for c in copies
    ]
    copy_header = ["copies", "blocks", "MB", "plan ms", "load/memcpy", "save/memcpy"]
    ssd_header = ["SSD, x dd", *(f"{size >> 10} KiB" for size in SSD_EXTENTS)]
    ssd_rows = [[name, *(f"{r:.2f}" for _, r in points)] for name, points in ssd.items()]
    return "\n\n".join(
        [
            f"{machine_line()}; medians",
            table(copy_header, copy_rows),
            table(["TTFT, ms", "median"], [[n, f"{1e3 * s:.1f}"] for n, s in overlap.items()]),
            table(ssd_header, ssd_rows),
            table(["figure", "value"], [[n, f"{v:.4g}"] for n, v in figures.items()]),
        ]
    )


if __name__ == "__main__":
    main()
