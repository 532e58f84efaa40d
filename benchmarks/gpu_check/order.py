"""Copies on their own streams: events order them, graphs and products run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from heterocache_cuda.mover import LAUNCH_SIZES, UPLOADS, LaunchSizes, Mode

from benchmarks.gpu_check.setting import (
    KIB,
    Result,
    Setting,
    random_bytes,
    time_on,
    times_by_turns,
    verdict,
)
from benchmarks.gpu_check.speed import Restore
from benchmarks.measure import table

_PIECE = 16 * KIB
_LARGE_UPLOAD = 8 << 20
"""More than any upload before, so new memory must be page-locked."""
GOAL_SLOWDOWN = 1.1
"""A matrix product while the mover works, over one during a copy by the copy engine."""


def check_events(setting: Setting) -> Result:
    """Order a save after a spinning kernel: the stream waits, the CPU goes on."""
    restore = Restore.of(setting, _PIECE)
    mover = setting.mover()
    forward, saves = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(saves):  # compiles, and fills the cache of pinned memory
        mover.launch(Mode.SAVE, restore.moves, mover.upload(restore.moves))
    torch.cuda.synchronize()
    pages = random_bytes(restore.pages.numel(), 9)
    restore.pages.copy_(torch.from_numpy(pages).view(restore.pages.shape))
    restore.arena.zero_()
    torch.cuda.synchronize()

    torch.cuda._sleep(setting.sizes.spin_cycles)
    spun = forward.record_event()
    saves.wait_event(spun)
    with torch.cuda.stream(saves):
        mover.launch(Mode.SAVE, restore.moves, mover.upload(restore.moves))
        saved = saves.record_event()
    facts = {
        "nothing is saved while the kernel spins": not restore.arena.any(),
        "the save's event has not fired": not saved.query(),
        "the CPU has gone on": not spun.query(),
    }
    saved.synchronize()
    facts["the save came after the kernel"] = spun.query()
    facts["the saved bytes are right"] = restore.is_exact()

    def waits(size_bytes: int) -> bool:
        """Upload while the kernel spins, and return whether it has ended then."""
        torch.cuda._sleep(setting.sizes.spin_cycles)
        spun = forward.record_event()
        with torch.cuda.stream(saves):
            mover.upload(restore.moves._replace(data=np.zeros(size_bytes // 8, np.int64)))
        waited: bool = spun.query()
        torch.cuda.synchronize()
        return waited

    with torch.cuda.stream(saves):
        mover.reserve_uploads()
    facts["an upload of a reserved size does not wait"] = not waits(max(UPLOADS))
    waited = waits(_LARGE_UPLOAD)
    result = _result(facts)
    note = f"; a first upload of its size {'waits' if waited else 'does not wait'} for the device"
    figures = {"first_upload_waits": float(waited)}
    return replace(result, summary=result.summary + note, figures=figures)


def check_graph(setting: Setting) -> Result:
    """Replay a captured product while loads run on another stream."""
    restore = Restore.of(setting, _PIECE)
    restore.arena.copy_(
        torch.from_numpy(random_bytes(restore.size_bytes, 10)).view(restore.arena.shape)
    )
    side = min(1024, setting.sizes.matrix)
    left, right = (_matrix(setting, side, seed) for seed in (1, 2))
    product = left @ right
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = left @ right
    mover, loads = setting.mover(), torch.cuda.Stream()
    restore.pages.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(loads):
        for _ in range(setting.sizes.copies):
            mover.launch(Mode.LOAD, restore.moves, mover.upload(restore.moves))
    right_products = True
    for _ in range(setting.sizes.replays):
        left.neg_()  # so the product changes, exactly
        product.neg_()
        graph.replay()
        torch.cuda.current_stream().synchronize()
        right_products &= torch.equal(captured, product)
    torch.cuda.synchronize()
    return _result(
        {
            "the graph's products are right": right_products,
            "loads meanwhile are right": restore.is_exact(),
        }
    )


def check_overlap(setting: Setting) -> Result:
    """Time matrix products alone, during a pinned copy, and while the mover works."""
    restore = Restore.of(setting, _PIECE)
    left, right = (_matrix(setting, setting.sizes.matrix, seed) for seed in (3, 4))
    out = left @ right
    side = torch.cuda.Stream()

    def products() -> None:
        for _ in range(setting.sizes.products):
            torch.mm(left, right, out=out)

    def during(copies: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with torch.cuda.stream(side):
                for _ in range(setting.sizes.copies):
                    copies()
            products()

        return run

    def copy_bytes() -> None:
        flat = restore.arena.view(-1)
        restore.pages.view(-1)[: len(flat)].copy_(flat, non_blocking=True)

    def move(programs: int) -> Callable[[], None]:
        sizes = LaunchSizes(programs=programs, most_programs_per_job=programs)
        mover = setting.mover(sizes)
        return lambda: mover.launch(Mode.LOAD, restore.moves, restore.data)

    jobs: dict[str, Callable[[], None]] = {"alone": products, "during a copy": during(copy_bytes)}
    counts = sorted({*setting.sizes.programs, LAUNCH_SIZES.programs})
    jobs |= {f"with {count} programs": during(move(count)) for count in counts}
    stream = torch.cuda.Stream()
    samples = times_by_turns(jobs, setting.sizes.turns, stream)
    default = move(LAUNCH_SIZES.programs)
    lasted = time_on(side, lambda: [default() for _ in range(setting.sizes.copies)])
    slowdown = {name: samples.paired_ratio(name, "alone") for name in jobs if name != "alone"}
    relative = samples.paired_ratio(f"with {LAUNCH_SIZES.programs} programs", "during a copy")
    outlasted = lasted >= samples.median("alone")
    rows = [[name, f"{x:.3f}"] for name, x in slowdown.items()]
    summary = f"{relative:.3f} of a product during a copy (goal {GOAL_SLOWDOWN})"
    if not outlasted:
        summary += "; the copies ended before the products, so it means little"
    figures = {f"product_{name.replace(' ', '_')}": x for name, x in slowdown.items()}
    return Result(
        verdict(relative <= GOAL_SLOWDOWN and outlasted),
        summary,
        [table(["matrix product", "slow-down"], rows)],
        figures | {"product_with_mover_over_with_copy": relative},
    )


def _matrix(setting: Setting, side: int, seed: int) -> torch.Tensor:
    values = torch.randn((side, side), generator=torch.Generator().manual_seed(seed))
    return values.to(setting.device, torch.bfloat16)


def _result(facts: dict[str, bool]) -> Result:
    wrong = [fact for fact, holds in facts.items() if not holds]
    summary = f"not so: {'; '.join(wrong)}" if wrong else "; ".join(facts)
    return Result(verdict(not wrong), summary)
