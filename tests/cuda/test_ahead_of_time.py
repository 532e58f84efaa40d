"""The machine code for each GPU has accesses as wide as the alignment allows, and no spills."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from heterocache_cuda import kernels
from heterocache_cuda.ahead_of_time import ARCHITECTURES, Compiled, compile_mover
from heterocache_cuda.mover import Mode, Tile
from triton import knobs

WHOLE_PAGES = Tile.of(32768, 16)
SMALL_PAGES = Tile.of(512, 16)
TINY_ROWS = Tile.of(16, 16)
HEADS_OF_TOKENS = Tile.of(256, 16)
LATENTS = Tile.of(656, 16)
V4_ROWS = Tile.of(584, 8)
ODD_PAGES = Tile.of(4096 + 8, 8)
TILES = [WHOLE_PAGES, SMALL_PAGES, TINY_ROWS, HEADS_OF_TOKENS, LATENTS, V4_ROWS, ODD_PAGES]
NARROW_TILES = [Tile.of(36, 4), Tile.of(6, 2), Tile.of(4095, 1), Tile.of(1, 1)]
TABLE_ENTRY = {8}
"""Bytes of the numbers that a program reads about its job."""


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def assert_wide(code: Compiled, tile: Tile, *, reads: bool = True) -> None:
    assert code.store_widths == {tile.alignment}
    assert code.load_widths == TABLE_ENTRY | ({tile.alignment} if reads else set())
    assert code.local_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_pages_are_moved_by_accesses_of_their_alignment(architecture: int, tile: Tile) -> None:
    for mode in Mode:
        code = compile_mover(architecture, mode, tile)
        assert_wide(code, tile, reads=mode is not Mode.CLEAR)


@pytest.mark.parametrize("tile", NARROW_TILES, ids=str)
def test_pages_at_odd_addresses_are_moved_by_narrow_accesses(tile: Tile) -> None:
    for mode in (Mode.LOAD, Mode.SAVE):
        assert_wide(compile_mover(90, mode, tile), tile)


MOVER_HINTS = [
    "pages = tl.multiple_of(tl.load(job).to(pointer), ALIGNMENT)",
    "block_stride = tl.multiple_of(tl.load(job + 1) // element_bytes, multiple)",
    "in_artifact = tl.multiple_of(stored.to(pointer), ALIGNMENT) + row * row_words",
    "row_words = tl.multiple_of((tl.load(job + 8) // element_bytes).to(tl.int32), multiple)",
    "first_stride = tl.multiple_of(tl.load(job + 12) // element_bytes, multiple)",
    "second_stride = tl.multiple_of(tl.load(job + 13) // element_bytes, multiple)",
    "third_stride = tl.multiple_of(tl.load(job + 14) // element_bytes, multiple)",
]


def kernels_without(hint: str, folder: Path) -> ModuleType:
    """Return the kernels with one line of them without its hint."""
    name, _, hinted = hint.partition(" = tl.multiple_of(")
    value, _, rest = hinted.partition(", multiple)" if ", multiple)" in hinted else ", ALIGNMENT)")
    plain = f"{name} = {value}{rest}"
    source = Path(kernels.__file__).read_text()
    assert source.count(hint) == 1
    path = folder / "kernels_without.py"
    path.write_text(source.replace(hint, plain))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("hint", MOVER_HINTS, ids=lambda hint: hint.split()[0])
def test_without_a_hint_the_mover_has_narrower_accesses(hint: str, tmp_path: Path) -> None:
    kernel = kernels_without(hint, tmp_path).move_pages
    code = compile_mover(90, Mode.LOAD, LATENTS, kernel)
    assert 16 not in code.load_widths & code.store_widths
