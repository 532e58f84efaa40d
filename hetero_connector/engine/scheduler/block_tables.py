"""Block tables: which blocks of the engine hold the pages of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

BlockTable = Callable[[int, range], list[int]]
"""`table(group, pages)`: block ids of these pages of a KV cache group; 0 for a null block."""

_block_id = attrgetter("block_id")


def table_of(block_ids: Sequence[list[int]]) -> BlockTable:
    """Over the block ids of each group, as vLLM hands them out."""
    return lambda group, pages: block_ids[group][pages.start : pages.stop]


def current_table(manager: KVCacheManager, request_id: str) -> BlockTable:
    """The request's blocks as they are now, looked up only if a step has something to copy."""

    def ids(group: int, pages: range) -> list[int]:
        blocks = manager.get_blocks(request_id).blocks[group]
        return list(map(_block_id, blocks[pages.start : pages.stop]))

    return ids


def offers(output: SchedulerOutput, request_id: str) -> Iterable[tuple[int, int, int]]:
    """Recurrent states that vLLM passes on: (group, block id, boundary in tokens)."""
    state = output.kv_connector_block_state
    return state.boundary_state_offloads.get(request_id, ()) if state is not None else ()
