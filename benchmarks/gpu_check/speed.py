"""Bandwidth of the mover against a pinned copy of the same bytes; pinning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from heterocache_cuda.batched import compare, copy_pages, plan_copies
from heterocache_cuda.bounce import BounceBuffer
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import (
    LAUNCH_SIZES,
    TILE_WORDS,
    Job,
    LaunchSizes,
    Mode,
    Moves,
    Part,
    Tile,
    plan_moves,
)
from heterocache_cuda.pinned import PIECE_BYTES, PinnedArena

from benchmarks.gpu_check.exactness import moves_of
from benchmarks.gpu_check.setting import (
    KIB,
    Result,
    Setting,
    Verdict,
    pin,
    random_bytes,
    size_name,
    times_by_turns,
    verdict,
)
from benchmarks.measure import table, timed
from hetero_connector import machine
from hetero_connector.store.arena import Arena
from hetero_connector.units import GIB, MIB, size_text

GOAL_LARGE, GOAL_SMALL = 0.9, 0.5
"""Parts of a pinned copy's bandwidth, for pieces of at least 16 KiB and for smaller ones."""
_LARGE = 16 * KIB
_PIN_PIECES = (64 * MIB, PIECE_BYTES)
_PIN_EDGE = 2 * MIB


@dataclass(frozen=True)
class Restore:
    """Pages of one size in scattered blocks, and artifacts in scattered slots."""

    pages: torch.Tensor
    """`[layers, blocks, bytes] uint8`; block 0 is not used."""
    ids: torch.Tensor
    """Blocks of every layer, in the order of the artifacts."""
    slots: torch.Tensor
    arena: torch.Tensor
    """`[slots, layers, pages, bytes]`: the pinned memory."""
    part: Part
    moves: Moves
    data: torch.Tensor

    @classmethod
    def of(cls, setting: Setting, piece: int, tile_words: int = TILE_WORDS) -> Restore:
        layers, in_artifact = setting.sizes.layers, setting.sizes.artifact_pages
        artifact = layers * in_artifact * piece
        count = max(1, setting.sizes.copy_bytes // artifact)
        num_pages = count * in_artifact
        shape = (layers, num_pages + 1, piece)
        pages = torch.empty(shape, dtype=torch.uint8, device=setting.device)
        rng = np.random.default_rng(piece)
        slots = rng.permutation(count)
        ids = 1 + rng.permutation(num_pages).reshape(count, in_artifact)
        jobs = [
            Job(PageLayout.of(layer), i * in_artifact * piece, piece, in_artifact)
            for i, layer in enumerate(pages)
        ]
        none = np.zeros(layers, np.int64)
        part = Part(
            np.array([job.row() for job in jobs], np.int64),
            [Tile.of(piece, 16, tile_words)] * layers,
            none,
            [ids.astype(np.int64)],
            setting.arena.address + slots.astype(np.int64) * artifact,
            none,
        )
        moves = plan_moves([part])
        arena = setting.host[: count * artifact].view(count, layers, in_artifact, piece)
        data = setting.mover().upload(moves)
        return cls(pages, torch.from_numpy(ids), torch.from_numpy(slots), arena, part, moves, data)

    @property
    def size_bytes(self) -> int:
        return self.arena.numel()

    def is_exact(self) -> bool:
        """Return whether each page has the bytes of its artifact."""
        for layer, pages in enumerate(self.pages):
            stored = self.arena[self.slots, layer].flatten(0, 1)
            if not torch.equal(pages[self.ids.view(-1).to(pages.device)].cpu(), stored):
                return False
        return True


def check_bandwidth(setting: Setting) -> Result:
    """Compare the mover with a pinned copy by piece, direction and the sizes of a launch."""
    sizes = setting.sizes
    setting.host[: sizes.copy_bytes].copy_(torch.from_numpy(random_bytes(sizes.copy_bytes, 5)))
    figures: dict[str, float] = {}
    rows, slow, wrong = [], [], []
    for piece in sizes.pieces:
        restore = Restore.of(setting, piece)
        row = [size_name(piece)]
        for mode in (Mode.LOAD, Mode.SAVE):
            ratios, gbps = _by_programs(setting, restore, mode)
            name = f"{mode.name.lower()}_{size_name(piece)}"
            engines = ratios.get("engines")
            best = max(ratios["default"], engines or 0)
            figures[name] = ratios["default"]
            if engines:
                figures[f"{name}_engines"] = engines
            if best < (GOAL_LARGE if piece >= _LARGE else GOAL_SMALL):
                slow.append(f"{name} {best:.2f}")
            for way, move in _ways(setting, restore, mode).items():
                if not _is_exact(restore, mode, move):
                    wrong.append(f"{name} by {way}")
            cells = [ratios.get(x) for x in ("default", *map(str, sizes.programs), "engines")]
            row += [f"{gbps:.1f}", *("" if x is None else f"{x:.2f}" for x in cells)]
        rows.append(row)
    header = ["GB/s", "default", *(str(x) for x in sizes.programs), "engines"]
    ends = [f"load {x}" for x in header] + [f"save {x}" for x in header]
    problems = [*(f"wrong bytes: {x}" for x in wrong), *(f"slow: {x}" for x in slow)]
    summary = "; ".join(problems) or f"all at or above {GOAL_LARGE} and {GOAL_SMALL} of a copy"
    tables = [table(["piece", *ends], rows), _by_tile(setting)]
    return Result(verdict(not problems), summary, tables, figures)


def _by_programs(setting: Setting, restore: Restore, mode: Mode) -> tuple[dict[str, float], float]:
    """Return bandwidths over that of one copy, by number of programs, and that copy's GB/s."""
    jobs = {"copy": _copy(restore, mode), **_ways(setting, restore, mode)}
    for programs in setting.sizes.programs:
        sizes = LaunchSizes(programs=programs, most_programs_per_job=programs)
        jobs[str(programs)] = _launch(setting, restore, mode, sizes)
    samples = times_by_turns(jobs, setting.sizes.turns, torch.cuda.Stream())
    ratios = {x: samples.paired_ratio("copy", x) for x in jobs if x != "copy"}
    return ratios, restore.size_bytes / samples.median("copy") / 1e9


def _ways(setting: Setting, restore: Restore, mode: Mode) -> dict[str, Callable[[], object]]:
    """Return the kernel, and the copy engines where they can and may move such pages."""
    ways = {"default": _launch(setting, restore, mode, LAUNCH_SIZES)}
    piece = restore.pages.shape[2]
    if piece >= setting.sizes.engines_from and setting.driver.can_copy_batches:
        (copies,) = plan_copies([restore.part], setting.arena.address)

        def copy() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            copy_pages(setting.driver, mode, copies, stream)

        ways["engines"] = copy
    return ways


def _by_tile(setting: Setting) -> str:
    """Compare tiles and warps at the default number of programs, for loads."""
    rows = []
    for words in setting.sizes.tile_words:
        restores = {piece: Restore.of(setting, piece, words) for piece in setting.sizes.pieces[::3]}
        for warps in setting.sizes.num_warps:
            row = [f"{words} words, {warps} warps"]
            for restore in restores.values():
                jobs = {
                    "copy": _copy(restore, Mode.LOAD),
                    "move": _launch(setting, restore, Mode.LOAD, LaunchSizes(num_warps=warps)),
                }
                samples = times_by_turns(jobs, setting.sizes.turns, torch.cuda.Stream())
                row.append(f"{samples.paired_ratio('copy', 'move'):.2f}")
            rows.append(row)
    return table(["loads", *map(size_name, setting.sizes.pieces[::3])], rows)


def _launch(
    setting: Setting, restore: Restore, mode: Mode, sizes: LaunchSizes
) -> Callable[[], object]:
    mover = setting.mover(sizes)
    return lambda: mover.launch(mode, restore.moves, restore.data)


def _copy(restore: Restore, mode: Mode) -> Callable[[], object]:
    host = restore.arena.view(-1)
    device = restore.pages.view(-1)[: len(host)]
    if mode is Mode.LOAD:
        return lambda: device.copy_(host, non_blocking=True)
    return lambda: host.copy_(device, non_blocking=True)


def _is_exact(restore: Restore, mode: Mode, move: Callable[[], object]) -> bool:
    """Move once more, after the target was overwritten, and compare."""
    target = restore.pages if mode is Mode.LOAD else restore.arena
    source = restore.arena if mode is Mode.LOAD else restore.pages
    source.copy_(torch.from_numpy(random_bytes(source.numel(), 6)).view(source.shape))
    target.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # copy engines need one that is not the default
        move()
    torch.cuda.synchronize()
    return restore.is_exact()


def check_copy_table(setting: Setting) -> Result:
    """Measure from which page on copy engines are faster, as an engine would."""
    if not setting.driver.can_copy_batches:
        return Result(Verdict.NOT_RUN, "the driver has no cuMemcpyBatchAsync (CUDA 12.8)")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = compare(
            setting.mover(),
            setting.driver,
            setting.device,
            stream.cuda_stream,
            stream.synchronize,
            page_sizes=[x for x in setting.sizes.pieces if x >= setting.sizes.engines_from],
            total_bytes=setting.sizes.copy_bytes // 4,
        )
    ways = {"loads": Mode.LOAD, "saves": Mode.SAVE}
    figures = {f"engines_{w}_from_bytes": float(found[x]) for w, x in ways.items() if x in found}
    texts = [f"{w}: {size_text(found[x]) if x in found else 'never'}" for w, x in ways.items()]
    return Result(Verdict.PASS, f"faster from, {', '.join(texts)}", figures=figures)


def check_bounce(setting: Setting) -> Result:
    """Save and load by way of a small pinned buffer, as where the arena cannot be pinned."""
    restore = Restore.of(setting, setting.sizes.pieces[-1])
    arena = np.zeros(restore.size_bytes, np.uint8)
    addresses = restore.part.addresses - setting.arena.address + arena.ctypes.data
    part = restore.part._replace(addresses=addresses)
    buffer = torch.empty(
        2 * restore.size_bytes // len(addresses),
        dtype=torch.uint8,
        pin_memory=setting.device.type == "cuda",
    )
    finish = torch.cuda.synchronize
    bounce = BounceBuffer(setting.mover(), arena, buffer, finish)
    restore.pages.copy_(
        torch.from_numpy(random_bytes(restore.pages.numel(), 14)).view_as(restore.pages)
    )
    bounce.move(Mode.SAVE, part)  # compiles
    torch.cuda.synchronize()
    seconds = timed(lambda: bounce.move(Mode.SAVE, part))
    restore.arena.copy_(torch.from_numpy(arena).view_as(restore.arena))
    exact = restore.is_exact()
    restore.pages.zero_()
    torch.cuda.synchronize()
    bounce.move(Mode.LOAD, part)
    exact &= restore.is_exact()
    gbps = restore.size_bytes / seconds / 1e9
    summary = f"{'exact' if exact else 'WRONG bytes'}; saves at {gbps:.1f} GB/s"
    return Result(verdict(exact), summary, figures={"bounce_save_gbps": gbps})


def check_pinning(setting: Setting) -> Result:
    """Pin new arenas in one call, and in pieces on several threads."""
    rows, figures = [], {}
    for size_bytes in setting.sizes.pinned_bytes:
        if size_bytes > machine.memory().available_bytes // 2:
            rows.append([size_text(size_bytes), "", "", "", "too little free memory"])
            continue
        row, gib = [size_text(size_bytes)], size_bytes / GIB
        for piece in (size_bytes, *_PIN_PIECES):
            reserved, pinned = _time_pinning(setting, size_bytes, piece)
            way = "one_call" if piece == size_bytes else size_name(piece)
            figures[f"pin_{way}_s_per_gib"] = pinned / gib
            row.append(f"{pinned / gib:.3f}")
        rows.append([*row, f"{reserved / gib:.3f}"])
    header = ["arena", "one call", *map(size_text, _PIN_PIECES), "reserving it"]
    text = table(header, rows)
    return Result(Verdict.PASS, "every call succeeded; seconds per GiB", [text], figures)


def _time_pinning(setting: Setting, size_bytes: int, piece: int) -> tuple[float, float]:
    """Return the seconds of reserving a new arena and of pinning it. Raises CudaError."""
    made: list[Arena] = []
    held: list[PinnedArena] = []
    reserved = timed(lambda: made.append(Arena.create(size_bytes)))
    try:
        pinned = timed(lambda: held.append(pin(made[0], setting.driver, piece)))
        held[0].close()
    finally:
        made[0].close()
    return reserved, pinned


def check_pinned_edge(setting: Setting) -> Result:
    """Move a page across the edge of two page-locked pieces, and copy across it."""
    arena = Arena.create(2 * _PIN_EDGE)
    try:
        pinned = pin(arena, setting.driver, _PIN_EDGE)
        try:
            arena.view[:] = random_bytes(2 * _PIN_EDGE, 13)
            page = 64 * KIB
            first = _PIN_EDGE - page // 2
            stored = torch.from_numpy(arena.view[first : first + page])
            pages = torch.zeros((2, page), dtype=torch.uint8, device=setting.device)
            addresses = np.array([arena.address + first], np.int64)
            moves, _ = moves_of([pages], np.array([[1]], np.int64), addresses)
            mover = setting.mover()
            mover.launch(Mode.LOAD, moves, mover.upload(moves))
            torch.cuda.synchronize()
            exact = torch.equal(pages[1].cpu(), stored)
            copied = "also works"
            try:
                pages[1].copy_(stored, non_blocking=True)
                torch.cuda.synchronize()
            except RuntimeError as error:
                copied = f"fails ({error})".partition("\n")[0]
        finally:
            pinned.close()
    finally:
        arena.close()
    summary = f"the mover {'is exact' if exact else 'moved other bytes'}; a copy across it {copied}"
    return Result(verdict(exact), summary)
