"""Compile the kernel without a GPU, to see the machine code that one would run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from heterocache_cuda import kernels
from heterocache_cuda.mover import ELEMENTS, LAUNCH_SIZES, Mode, Tile

ARCHITECTURES = (80, 90, 100, 120)
"""Ampere, Hopper and two Blackwells: compute capability times ten."""
_WARP_THREADS = 32
_OPTIONS = {**LAUNCH_SIZES.options, "enable_fp_fusion": False}  # else Triton warns
_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\s")
_LOCAL_MEMORY = re.compile(r"\b(STACK|LOCAL):(\d+)")


@dataclass(frozen=True)
class Compiled:
    """A variant of the kernel in machine code."""

    load_widths: frozenset[int]
    """Bytes of each different load of global memory by a thread."""
    store_widths: frozenset[int]
    local_bytes: int
    """Stack and local memory of a thread: more than 0 if registers are spilled."""


def compile_mover(
    architecture: int, mode: Mode, tile: Tile, kernel: Any = kernels.move_pages
) -> Compiled:
    """Compile a variant of `move_pages` as a launch would: its arguments are pointers."""
    values = {
        "MODE": int(mode),
        "ELEMENT": ELEMENTS[tile.element_bytes],
        "ALIGNMENT": tile.alignment,
        "ROWS": tile.rows,
        "WORDS": tile.words,
    }
    source = ASTSource(
        fn=kernel,
        signature={x.name: x.annotation or "*i64" for x in kernel.params},
        constexprs={(x.num,): values[x.name] for x in kernel.params if x.is_constexpr},
        attrs={(x.num,): [["tt.divisibility", 16]] for x in kernel.params if not x.annotation},
    )
    target = GPUTarget("cuda", architecture, _WARP_THREADS)
    code = compile_source(source, target=target, options=_OPTIONS).asm
    widths: dict[str, set[int]] = {"ld": set(), "st": set()}
    for kind, vector, bits in _ACCESS.findall(code["ptx"]):
        widths[kind].add(int(vector or 1) * int(bits) // 8)
    return Compiled(frozenset(widths["ld"]), frozenset(widths["st"]), _local_bytes(code["cubin"]))


def _local_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _LOCAL_MEMORY.findall(usage)
    if not found:
        raise RuntimeError(f"cuobjdump printed no use of local memory: {usage}")
    return sum(int(size) for _, size in found)
