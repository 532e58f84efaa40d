"""Triton kernels that move pages and rows.

Memory is addressed by plain integers: pinned host memory has the same addresses on the device.
Each kernel has few variants, all of them by `constexpr`, so none is compiled while serving.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOAD: tl.constexpr = tl.constexpr(0)
SAVE: tl.constexpr = tl.constexpr(1)
CLEAR: tl.constexpr = tl.constexpr(2)

FIELDS: tl.constexpr = tl.constexpr(16)
"""Values of a job, see `mover.job_row`: 128 bytes, so that every job is aligned."""


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

    Programs with the same job take its pages in turn. A tile has ROWS rows of WORDS elements.
    """
    job = jobs + tl.program_id(1) * FIELDS
    base = tl.load(job)
    block_stride = tl.load(job + 1)
    offset = tl.load(job + 2)
    pitch = tl.load(job + 3)
    ids = block_ids + tl.load(job + 4)
    sources = artifacts + tl.load(job + 5)
    num_pages = tl.load(job + 6)
    artifact_pages = tl.load(job + 7)
    num_rows = tl.load(job + 9).to(tl.int32)
    second = tl.load(job + 10).to(tl.int32)
    third = tl.load(job + 11).to(tl.int32)

    # Only numbers of elements, and pointers, tell the compiler how wide an access may be.
    element_bytes: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    multiple: tl.constexpr = ALIGNMENT // element_bytes
    pointer: tl.constexpr = tl.pointer_type(ELEMENT)
    row_words = tl.multiple_of((tl.load(job + 8) // element_bytes).to(tl.int32), multiple)
    first_stride = tl.multiple_of(tl.load(job + 12) // element_bytes, multiple)
    second_stride = tl.multiple_of(tl.load(job + 13) // element_bytes, multiple)
    third_stride = tl.multiple_of(tl.load(job + 14) // element_bytes, multiple)
    row_of_tile = tl.arange(0, ROWS)[:, None]
    word_of_tile = tl.arange(0, WORDS)[None, :]

    index = tl.program_id(0).to(tl.int64)
    while index < num_pages:
        block = tl.load(ids + index)
        if block != 0:
            page = tl.multiple_of((base + block * block_stride).to(pointer), ALIGNMENT)
            stored = tl.load(sources + index // artifact_pages) + offset
            stored += (index % artifact_pages) * pitch
            stored = tl.multiple_of(stored.to(pointer), ALIGNMENT)
            for first_row in range(0, num_rows, ROWS):
                row = first_row + row_of_tile
                outer = row // third
                in_page = page + (row % third) * third_stride
                in_page += (outer % second) * second_stride + (outer // second) * first_stride
                in_artifact = stored + row.to(tl.int64) * row_words
                for first_word in range(0, row_words, WORDS):
                    word = first_word + word_of_tile
                    mask = (row < num_rows) & (word < row_words)
                    if MODE == LOAD:
                        value = tl.load(in_artifact + word, mask=mask, cache_modifier=".cg")
                        tl.store(in_page + word, value, mask=mask)
                    elif MODE == SAVE:
                        value = tl.load(in_page + word, mask=mask)
                        tl.store(in_artifact + word, value, mask=mask)
                    else:
                        zero = tl.full((ROWS, WORDS), 0, ELEMENT)
                        tl.store(in_page + word, zero, mask=mask)
        index += tl.num_programs(0)


@triton.jit
def gather_rows(
    source,  # address of row 0, int64
    source_stride,  # bytes, int64
    rows,  # [num_rows] int32 or int64; negative: the row becomes zeros
    target,  # address, int64
    target_stride,  # bytes, int64
    num_rows,
    row_bytes,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy rows by an index list on the device. A tile has ROWS rows of WORDS elements."""
    element_bytes: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    multiple: tl.constexpr = ALIGNMENT // element_bytes
    pointer: tl.constexpr = tl.pointer_type(ELEMENT)
    row_words = tl.multiple_of(row_bytes // element_bytes, multiple)
    source_words = tl.multiple_of(source_stride // element_bytes, multiple)
    target_words = tl.multiple_of(target_stride // element_bytes, multiple)
    source_row = tl.multiple_of(source.to(pointer), ALIGNMENT)
    target_row = tl.multiple_of(target.to(pointer), ALIGNMENT)
    word_of_tile = tl.arange(0, WORDS)[None, :]
    first_row = tl.program_id(0) * ROWS
    while first_row < num_rows:
        row = first_row + tl.arange(0, ROWS)
        wanted = tl.load(rows + row, mask=row < num_rows, other=-1).to(tl.int64)[:, None]
        row = row[:, None]
        in_source = source_row + wanted * source_words
        in_target = target_row + row.to(tl.int64) * target_words
        for first_word in range(0, row_words, WORDS):
            word = first_word + word_of_tile
            mask = (row < num_rows) & (word < row_words)
            value = tl.load(in_source + word, mask=mask & (wanted >= 0), other=0)
            tl.store(in_target + word, value, mask=mask)
        first_row += tl.num_programs(0) * ROWS
