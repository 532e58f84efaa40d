"""Compile the kernels without a GPU, to see the machine code that one would run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from heterocache_cuda import kernels
from heterocache_cuda.mover import ELEMENTS, NUM_WARPS, Mode, Tile

ARCHITECTURES = (80, 90, 100, 120)
"""Ampere, Hopper and two Blackwells: compute capability times ten."""
_WARP_THREADS = 32
_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\s")


@dataclass(frozen=True)
class Compiled:
    """A variant of a kernel in machine code."""

    cubin_bytes: int
    load_widths: frozenset[int]
    """Bytes of each different load of global memory by a thread."""
    store_widths: frozenset[int]


def compile_mover(architecture: int, mode: Mode, tile: Tile) -> Compiled:
    """Compile a variant of `move_pages`."""
    constants = {
        "MODE": int(mode),
        "ELEMENT": ELEMENTS[tile.element_bytes],
        "ALIGNMENT": tile.alignment,
        "ROWS": tile.rows,
        "WORDS": tile.words,
    }
    return _compile(kernels.move_pages, architecture, constants, pointers=range(3), integers=())


def _compile(
    kernel: object,
    architecture: int,
    constants: dict[str, object],
    pointers: Sequence[int],
    integers: Sequence[int],
) -> Compiled:
    names = kernel.arg_names  # type: ignore[attr-defined]
    types = dict.fromkeys(constants, "constexpr")
    types |= {names[i]: "*i64" for i in pointers} | {names[i]: "i32" for i in integers}
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    target = GPUTarget("cuda", architecture, _WARP_THREADS)
    code = compile_source(source, target=target, options={"num_warps": NUM_WARPS}).asm
    widths: dict[str, set[int]] = {"ld": set(), "st": set()}
    for kind, vector, bits in _ACCESS.findall(code["ptx"]):
        widths[kind].add(int(vector or 1) * int(bits) // 8)
    return Compiled(len(code["cubin"]), frozenset(widths["ld"]), frozenset(widths["st"]))
