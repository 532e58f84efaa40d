"""Block tables: the blocks of the engine that hold a request's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

BlockTable = Callable[[int, range], list[int]]
"""`table(group, pages)` returns the block ids of these pages of a KV cache group; 0: null block."""

RecurrentState = tuple[int, int, int]
"""A recurrent state that vLLM keeps: (KV cache group, block id, boundary in tokens)."""

_block_id = attrgetter("block_id")


def table_of(block_ids: Sequence[list[int]]) -> BlockTable:
    """Return the table of given block ids, one list for each group."""
    return lambda group, pages: block_ids[group][pages.start : pages.stop]


def current_table(manager: KVCacheManager, request_id: str) -> BlockTable:
    """Return a table that asks vLLM for the request's blocks each time it is called."""

    def ids(group: int, pages: range) -> list[int]:
        blocks = manager.get_blocks(request_id).blocks[group]
        return list(map(_block_id, blocks[pages.start : pages.stop]))

    return ids


def recurrent_states(output: SchedulerOutput, request_id: str) -> Sequence[RecurrentState]:
    """Return the request's recurrent states that vLLM offers to save in this step."""
    state = output.kv_connector_block_state
    return state.boundary_state_offloads.get(request_id, ()) if state is not None else ()
