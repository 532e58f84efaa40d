"""vLLM's own prefix cache, when nothing that was computed before may be found any more.

vLLM resets it only while no request has pages, which under load may be never. So each block loses
its prefix hash, and the requests that run publish no more of theirs. Their answers go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_connector.engine.scheduler.replays import can_hide

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

_ALL_BLOCKS = 1 << 40
"""More than a request has: vLLM publishes the blocks after those that it counts as published."""


def forget_own_pages(manager: KVCacheManager) -> bool:
    """Let no request hit a page from before now, or one that a running request fills later.

    Returns False, and does nothing, where vLLM also publishes blocks that are partly full, by
    another count: with recurrent state in its "align" mode.
    """
    if not _can_forget(manager):
        return False
    pool = manager.block_pool
    pool.evict_blocks({x.block_id for x in pool.blocks if x.block_hash is not None})
    for blocks_of_type in _managers(manager):
        for request_id, blocks in blocks_of_type.req_to_blocks.items():
            if blocks:
                blocks_of_type.num_cached_block[request_id] = _ALL_BLOCKS
    return True


def forget_pages_of(manager: KVCacheManager, request_id: str) -> None:
    """Let no other request hit the pages of this one, which has just been admitted."""
    if not _can_forget(manager):
        return
    for blocks_of_type in _managers(manager):
        if blocks := blocks_of_type.req_to_blocks.get(request_id):
            manager.block_pool.evict_blocks({x.block_id for x in blocks if not x.is_null})
            blocks_of_type.num_cached_block[request_id] = _ALL_BLOCKS


def _can_forget(manager: KVCacheManager) -> bool:
    """Return True if no block is published by another count than the one that is raised here, and
    vLLM has the attributes that this needs, which are not public."""
    return (
        can_hide(manager)
        and hasattr(manager.block_pool, "blocks")
        and not getattr(manager.coordinator, "enable_partial_hash_hits", True)
        and all(getattr(x, "mamba_cache_mode", "none") == "none" for x in _managers(manager))
    )


def _managers(manager: KVCacheManager) -> Any:
    return manager.coordinator.single_type_managers
