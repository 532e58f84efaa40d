"""The Triton kernel that moves pages.

Memory is addressed by plain integers: pinned host memory has the same addresses on the device.
It has few variants, all of them by `constexpr`, so none is compiled while serving.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOAD: tl.constexpr = tl.constexpr(0)
SAVE: tl.constexpr = tl.constexpr(1)
CLEAR: tl.constexpr = tl.constexpr(2)

FIELDS: tl.constexpr = tl.constexpr(16)
"""Values of a job, in the order of `mover.Job.row`: 128 bytes, so that every job is aligned."""


@triton.jit
def move_pages(
    jobs,  # [jobs, FIELDS] int64
    block_ids,  # [...] int64; 0: the page is left alone
    artifacts,  # [...] int64: the address of each artifact
    MODE: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of every address, in bytes
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy, or clear, the pages of one job per `program_id(1)`.

    Programs with the same job take its tiles in turn. A tile is ROWS rows of WORDS elements: a
    piece of one large page, or many small pages.
    """
    job = jobs + tl.program_id(1) * FIELDS
    offset = tl.load(job + 2)
    pitch = tl.load(job + 3)
    ids = block_ids + tl.load(job + 4)
    sources = artifacts + tl.load(job + 5)
    num_pages = tl.load(job + 6)
    artifact_pages = tl.load(job + 7)
    num_rows = tl.load(job + 9)
    second = tl.load(job + 10).to(tl.int32)
    third = tl.load(job + 11).to(tl.int32)

    # Only numbers of elements, and pointers, tell the compiler how wide an access may be.
    element_bytes: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    multiple: tl.constexpr = ALIGNMENT // element_bytes
    pointer: tl.constexpr = tl.pointer_type(ELEMENT)
    pages = tl.multiple_of(tl.load(job).to(pointer), ALIGNMENT)
    block_stride = tl.multiple_of(tl.load(job + 1) // element_bytes, multiple)
    row_words = tl.multiple_of((tl.load(job + 8) // element_bytes).to(tl.int32), multiple)
    first_stride = tl.multiple_of(tl.load(job + 12) // element_bytes, multiple)
    second_stride = tl.multiple_of(tl.load(job + 13) // element_bytes, multiple)
    third_stride = tl.multiple_of(tl.load(job + 14) // element_bytes, multiple)

    tiles_of_row = (row_words + WORDS - 1) // WORDS
    num_tiles = (num_pages * num_rows + ROWS - 1) // ROWS * tiles_of_row
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_tiles:
        number = (tile // tiles_of_row) * ROWS + tl.arange(0, ROWS)
        word = (tile % tiles_of_row).to(tl.int32) * WORDS + tl.arange(0, WORDS)[None, :]
        index = number // num_rows
        row = (number % num_rows).to(tl.int32)
        block = tl.load(ids + index, mask=index < num_pages, other=0)
        mask = (block != 0)[:, None] & (word < row_words)
        outer = row // third
        in_page = pages + block * block_stride + (row % third) * third_stride
        in_page += (outer % second) * second_stride + (outer // second) * first_stride
        page_words = in_page[:, None] + word
        if MODE == CLEAR:
            tl.store(page_words, tl.full((ROWS, WORDS), 0, ELEMENT), mask=mask)
        else:
            stored = tl.load(sources + index // artifact_pages, mask=block != 0, other=0)
            stored += offset + (index % artifact_pages) * pitch
            in_artifact = tl.multiple_of(stored.to(pointer), ALIGNMENT) + row * row_words
            stored_words = in_artifact[:, None] + word
            if MODE == LOAD:
                value = tl.load(stored_words, mask=mask, cache_modifier=".cg")
                tl.store(page_words, value, mask=mask)
            else:
                tl.store(stored_words, tl.load(page_words, mask=mask), mask=mask)
        tile += tl.num_programs(0)
