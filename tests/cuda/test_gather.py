"""Gathered rows are those that numpy's indexing gives. Triton interprets the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heterocache_cuda import kernels
from heterocache_cuda.gather import gather_rows, gather_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from tests.cuda.memory import memory_of

KERNEL = InterpretedFunction(kernels.gather_rows.fn)
ROW_BYTES = st.sampled_from([1, 2, 3, 16, 20, 128, 576, 584, 656, 1152]) | st.integers(1, 700)
PLACES = st.tuples(st.integers(0, 17), st.sampled_from([0, 1, 3, 4, 8, 16]))
"""Bytes before the first row, and padding after each."""
INDEX_TYPES = st.sampled_from([torch.int32, torch.int64])


def rows_at(count: int, row_bytes: int, place: tuple[int, int]) -> torch.Tensor:
    """Return `[count, row_bytes] uint8` full of random bytes."""
    start, padding = place
    raw = torch.randint(0, 256, (start + count * (row_bytes + padding) + 64,), dtype=torch.uint8)
    return raw.as_strided((count, row_bytes), (row_bytes + padding, 1), start)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 20), ROW_BYTES, PLACES, PLACES, INDEX_TYPES)
def test_rows_are_gathered_as_by_numpy(
    data: st.DataObject,
    num_rows: int,
    row_bytes: int,
    source_place: tuple[int, int],
    target_place: tuple[int, int],
    index_type: torch.dtype,
) -> None:
    drawn = data.draw(st.lists(st.integers(-2, num_rows - 1), max_size=20))
    source = rows_at(num_rows, row_bytes, source_place)
    target = rows_at(len(drawn), row_bytes, target_place)
    expected, source_before = memory_of(target).clone(), memory_of(source).clone()
    indices = np.array(drawn, np.int64)
    rows = np.where(indices[:, None] >= 0, source.numpy()[np.maximum(indices, 0)], 0)
    start, stride = target.storage_offset(), target.stride(0)
    expected.as_strided(target.shape, (stride, 1), start).copy_(torch.from_numpy(rows))
    gather_rows(source, torch.tensor(drawn, dtype=index_type), target, kernel=KERNEL)
    assert torch.equal(memory_of(target), expected)
    assert torch.equal(memory_of(source), source_before)


@settings(max_examples=30)
@given(
    st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), ROW_BYTES, PLACES, PLACES
)
def test_tokens_are_gathered_through_the_block_table(
    data: st.DataObject,
    requests: int,
    pages: int,
    page_rows: int,
    row_bytes: int,
    place: tuple[int, int],
    target_place: tuple[int, int],
) -> None:
    num_blocks, (start, padding) = 9, place
    page = page_rows * (row_bytes + padding) + padding
    raw = torch.randint(0, 256, (start + num_blocks * page + 64,), dtype=torch.uint8)
    blocks = raw.as_strided(
        (num_blocks, page_rows, row_bytes), (page, row_bytes + padding, 1), start
    )
    numbers = st.integers(-2, pages * page_rows - 1)
    count = data.draw(st.integers(0, 9))
    positions = data.draw(
        st.lists(
            st.lists(numbers, min_size=count, max_size=count),
            min_size=requests,
            max_size=requests,
        )
    )
    wide = torch.randint(0, num_blocks, (requests, pages + 2), dtype=torch.int32)
    table = wide[:, 1 : pages + 1]
    target = rows_at(requests * count, row_bytes, target_place)
    positions_array = np.array(positions, np.int64).reshape(requests, count)
    before, expected = memory_of(target).clone(), np.zeros((requests * count, row_bytes), np.uint8)
    for number, (request, position) in enumerate(
        (r, p) for r, row in enumerate(positions_array.tolist()) for p in row
    ):
        if position >= 0:
            block = int(table[request, position // page_rows])
            expected[number] = blocks[block, position % page_rows].numpy()
    gather_tokens(
        blocks,
        torch.from_numpy(positions_array),
        table,
        target.unflatten(0, (requests, count)),
        kernel=KERNEL,
    )
    assert np.array_equal(target.numpy(), expected)
    target.copy_(before.as_strided(target.shape, target.stride(), target.storage_offset()))
    assert torch.equal(memory_of(target), before), "bytes between the rows have changed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_of_any_type_keep_their_bytes(dtype: torch.dtype) -> None:
    source = torch.randint(0, 256, (6, 64), dtype=torch.uint8).view(dtype)
    target = torch.zeros(4, source.shape[1], dtype=dtype)
    gather_rows(source, torch.tensor([5, -1, 0, 5]), target, kernel=KERNEL)
    expected = source.view(torch.uint8)[[5, 0, 0, 5]]
    expected[1] = 0
    assert torch.equal(target.view(torch.uint8), expected)


def test_a_launch_with_other_numbers_is_the_same_variant() -> None:
    """Triton would compile again for a number that is 1, large, or a multiple of 16."""
    for parameter in kernels.gather_rows.params:
        if parameter.name in ("indices", "block_table"):
            assert parameter.do_not_specialize_on_alignment
        elif not parameter.is_constexpr:
            assert parameter.do_not_specialize
            assert parameter.annotation_type == "i64"


ROWS = torch.zeros(4, 8, dtype=torch.uint8)
INDICES = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("source", "indices", "target", "message"),
    [
        (ROWS, INDICES, ROWS, r"fills a target \(2, 8\)"),
        (ROWS, INDICES, torch.zeros(2, 8), "torch.float32"),
        (ROWS[0], INDICES, ROWS[:2], "source"),
        (ROWS[:, ::2], INDICES, ROWS[:2, :4], "each row of the source must be contiguous"),
        (ROWS, INDICES.to(torch.int16), ROWS[:2], "must be int32 or int64, not torch.int16"),
        (ROWS, torch.zeros(4, dtype=torch.int64)[::2], ROWS[:2], "must be contiguous"),
        (ROWS, INDICES.to("meta"), ROWS[:2], "indices must be on cpu, not meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    source: torch.Tensor, indices: torch.Tensor, target: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gather_rows(source, indices, target, kernel=KERNEL)


def test_host_memory_that_is_not_pinned_is_refused() -> None:
    target = torch.zeros(2, 8, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="pinned"):
        gather_rows(ROWS, INDICES.to("meta"), target, kernel=KERNEL)


def test_a_block_table_of_other_requests_is_refused() -> None:
    pages, positions = torch.zeros(3, 4, 8, dtype=torch.uint8), torch.zeros(2, 5, dtype=torch.int64)
    table, target = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, 5, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a row for each of the 2 requests"):
        gather_tokens(pages, positions, table, target, kernel=KERNEL)
