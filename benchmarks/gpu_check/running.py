"""Choose checks, run them and write what they found."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import triton
from heterocache_cuda import kernels
from heterocache_cuda.driver import Driver

from benchmarks.gpu_check.exactness import check_layouts
from benchmarks.gpu_check.order import check_events, check_graph, check_overlap
from benchmarks.gpu_check.processes import check_sanitizer, check_two_processes
from benchmarks.gpu_check.setting import (
    GpuDriver,
    Result,
    Setting,
    Sizes,
    Verdict,
    pinned_arena,
)
from benchmarks.gpu_check.speed import (
    check_bandwidth,
    check_bounce,
    check_copy_table,
    check_pinned_edge,
    check_pinning,
)
from benchmarks.gpu_check.stand_ins import Kernel, StandInDriver, gpu_stand_ins
from benchmarks.measure import machine_line, publish, rounded
from hetero_connector.store.arena import ArenaHandle

CHECKS: dict[str, Callable[[Setting], Result]] = {
    "layouts": check_layouts,
    "two-processes": check_two_processes,
    "events": check_events,
    "graph": check_graph,
    "bandwidth": check_bandwidth,
    "copy-table": check_copy_table,
    "bounce": check_bounce,
    "overlap": check_overlap,
    "pinning": check_pinning,
    "pinned-edge": check_pinned_edge,
    "sanitizer": check_sanitizer,
}


@contextmanager
def setting_of(
    sizes: Sizes, *, dry_run: bool, handle: ArenaHandle | None = None
) -> Iterator[Setting]:
    """Yield the GPU's setting, or one of stand-ins. `handle`: another process's arena."""
    with ExitStack() as stack:
        move = kernels.move_pages
        driver: GpuDriver
        if dry_run:
            gpu = stack.enter_context(gpu_stand_ins())
            device, driver = torch.device("cpu"), StandInDriver(gpu)
            move = Kernel(gpu, move)
        else:
            device, driver = torch.device("cuda"), Driver.open(torch.cuda.current_device())
        arena = stack.enter_context(pinned_arena(sizes.arena_bytes, driver, handle))
        yield Setting(device, sizes, arena, driver, move)


def run(
    names: Sequence[str], sizes: Sizes, *, dry_run: bool, as_json: bool, write: bool
) -> dict[str, Result]:
    """Run the checks, print their results, and write them if asked to."""
    results: dict[str, Result] = {}
    seconds: dict[str, float] = {}
    with setting_of(sizes, dry_run=dry_run) as setting:
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            started = time.perf_counter()
            try:
                results[name] = CHECKS[name](setting)
            except Exception as error:  # a failure too, and the other checks may still run
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                results[name] = Result(Verdict.FAIL, text)
            seconds[name] = time.perf_counter() - started
        # Before the end of the setting, which fails if a check has left the device unusable.
        _report(results, seconds, as_json=as_json, write=write)
    return results


def _report(
    results: Mapping[str, Result], seconds: Mapping[str, float], *, as_json: bool, write: bool
) -> None:
    gpu = gpu_line()
    tables = [f"{name}\n\n{x}" for name, result in results.items() for x in result.tables]
    lines = [
        f"{result.verdict:8}{name:15}{seconds[name]:4.0f} s  {result.summary}"
        for name, result in results.items()
    ]
    text = "\n\n".join([f"gpu_check: {gpu}\n{machine_line()}", *tables, "\n".join(lines)])
    figures = {key: value for result in results.values() for key, value in result.figures.items()}
    details = {
        "gpu": gpu,
        "verdicts": {name: result.verdict for name, result in results.items()},
        "summaries": {name: result.summary for name, result in results.items()},
        "seconds": rounded(seconds),
    }
    publish("gpu_check", text, rounded(figures), details, as_json=as_json, write=write)


def gpu_line() -> str:
    """Return the GPU and the versions of what drives it."""
    found = torch.cuda.get_device_properties(0)
    return (
        f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} "
        f"multiprocessors, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"triton {triton.__version__}"
    )


def missing() -> str | None:
    """Return what is missing for a check on a GPU, in a line; None if nothing is."""
    if torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f"no GPU: torch {torch.__version__}, {built}, finds none"
