"""Shared boundaries: what a restore passes and others resume from goes into vLLM's prefix cache.

vLLM hits a prefix where every KV cache group has it. A restore gives a request the windows and
recurrent states of its last boundary alone. A request that leaves the chain earlier would hit
nothing, and load the whole prefix again into pages of its own. So a restore also loads the boundary
state of the last boundary where stored chains fork, into blocks of no request. vLLM's prefix cache
gets these blocks when all ranks have loaded them, never before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero_connector.artifacts.record import ChunkKey, ChunkRange
from hetero_connector.spec import ModelSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_FAR = 1 << 40
_RESERVE = 8
"""One block in so many stays free: nothing is shared where requests may need the blocks."""


@dataclass
class _Claim:
    """The right to blocks that vLLM counts as free; lost when it gives one of them away."""

    lost: bool = False

    def on_reuse(self, block: KVCacheBlock) -> None:
        """Note that vLLM has given a block to a request, or has reset its prefix cache."""
        self.lost = True


@dataclass(frozen=True)
class SharedPages:
    """Blocks for the boundary state of one boundary, by KV cache group, in the order of pages."""

    request: Request
    chunk: ChunkRange
    """The chunk that ends at the boundary."""
    pages: Mapping[int, range]
    blocks: Mapping[int, list[KVCacheBlock]]
    claim: _Claim
    is_held: bool
    """True: vLLM counts them as used until all ranks have loaded them."""

    def table(self, group: int, pages: range) -> list[int]:
        """Return the block ids of these pages of a group, as a `BlockTable` does."""
        first = self.pages[group].start
        blocks = self.blocks[group][pages.start - first : pages.stop - first]
        return [block.block_id for block in blocks]

    def all_blocks(self) -> list[KVCacheBlock]:
        """Return the blocks of all groups."""
        return [block for blocks in self.blocks.values() for block in blocks]


class SharedBoundaries:
    """The shared boundaries of one engine that are being loaded. Used on one thread only."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._prefix_groups = {x.group for t in model.prefix_types for x in model.layers_of(t)}
        self._manager: KVCacheManager | None = None
        self._loading: dict[int, SharedPages] = {}
        """Pages that some rank has not loaded yet, by the number of their load."""

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's prefix cache; nothing is shared if it lacks what is needed for it."""
        if self._model.boundary_types and can_share(kv_cache_manager):
            self._manager = kv_cache_manager

    @property
    def is_supported(self) -> bool:
        """True if boundary state of this model can be shared in this engine."""
        return self._manager is not None

    def is_loading(self, key: ChunkKey) -> bool:
        """True while the boundary state at the end of this chunk is being loaded."""
        return any(x.chunk.key == key for x in self._loading.values())

    def loaders(self) -> dict[ChunkKey, str]:
        """Return the ids of the requests that load shared boundaries, by chunk."""
        return {x.chunk.key: x.request.request_id for x in self._loading.values()}

    def is_wanted(self, request: Request, chunk: ChunkRange) -> bool:
        """True unless the boundary at the chunk's end is in vLLM's prefix cache, or soon will be.

        The chunk is one of the request's prompt.
        """
        if self._manager is None or self.is_loading(chunk.key):
            return False
        pages = self._pages(chunk.end)
        return pages is not None and not all(
            self._is_cached(request, group, run) for group, run in pages.items()
        )

    def take(self, request: Request, chunk: ChunkRange, *, parked: bool) -> SharedPages | None:
        """Take blocks for the boundary state at the chunk's end; None if few are free.

        `parked`: the load runs between steps. Else it has ended before a later step writes to the
        blocks, so vLLM may count them as free already: a reset need not wait for them.
        """
        if not self.is_wanted(request, chunk) or (pages := self._pages(chunk.end)) is None:
            return None
        assert self._manager is not None
        pool = self._manager.block_pool
        number = sum(map(len, pages.values()))
        if pool.get_num_free_blocks() - number < pool.num_gpu_blocks // _RESERVE:
            return None
        new = iter(pool.get_new_blocks(number))
        blocks = {group: [next(new) for _ in run] for group, run in pages.items()}
        taken = SharedPages(request, chunk, pages, blocks, _Claim(), parked)
        if not parked:
            pool.unpin_blocks(taken.all_blocks(), taken.claim.on_reuse)
        return taken

    def on_ordered(self, load_id: int, taken: SharedPages) -> None:
        """Note the load of these pages."""
        self._loading[load_id] = taken

    def on_loaded(self, load_id: int) -> None:
        """Publish the pages of a load that all ranks have ended, unless they were dropped."""
        taken = self._loading.pop(load_id, None)
        if taken is None:
            return
        assert self._manager is not None
        pool = self._manager.block_pool
        if not taken.claim.lost:
            for group, run in taken.pages.items():
                # Vacant places of the pages before, which vLLM passes over.
                blocks = [pool.null_block] * run.start + taken.blocks[group]
                size = self._managers[group].block_size
                pool.cache_full_blocks(taken.request, blocks, run.start, run.stop, size, group)
        if taken.is_held:
            pool.free_blocks(taken.all_blocks())

    def drop(self) -> None:
        """Publish nothing of what is being loaded: it may be outdated, or its load has failed."""
        for taken in self._loading.values():
            taken.claim.lost = True

    @property
    def _managers(self) -> Any:
        assert self._manager is not None
        return self._manager.coordinator.single_type_managers

    def _pages(self, boundary: int) -> dict[int, range] | None:
        """Return the pages that vLLM hits at a boundary, by group of boundary state.

        None if they are not those that a restore loads.
        """
        pages: dict[int, range] = {}
        for group, manager in enumerate(self._managers):
            if group in self._prefix_groups or not manager.kv_cache_spec.prefix_cacheable:
                continue
            size = manager.block_size
            if boundary % size or not manager.get_num_skipped_tokens(_FAR):
                return None  # else a group that keeps every page would take as many again
            run = range(manager.get_num_skipped_tokens(boundary) // size, boundary // size)
            if run:
                pages[group] = run
        for group, needed in self._needed(boundary):
            run = pages.get(group, range(0))
            if needed.start < run.start or needed.stop > run.stop:
                return None
        return pages or None

    def _needed(self, boundary: int) -> Iterator[tuple[int, range]]:
        """Yield the pages that a restore to the boundary loads, with their group."""
        for state_type in self._model.boundary_types_at(boundary):
            for layer in self._model.page_groups[state_type]:
                if needed := layer.pages_needed(0, boundary):
                    yield layer.group, needed

    def _is_cached(self, request: Request, group: int, pages: range) -> bool:
        from vllm.v1.core.kv_cache_utils import resolve_block_hashes

        assert self._manager is not None
        pool, size = self._manager.block_pool, self._managers[group].block_size
        hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, size)
        return all(pool.get_cached_block(hashes[page], [group]) for page in pages)


def can_share(manager: KVCacheManager) -> bool:
    """True if vLLM's prefix cache takes blocks of no request, in the way that is used here.

    Under speculative decoding vLLM drops the last block of a hit, so it would not hit what is
    shared.
    """
    pool = getattr(manager, "block_pool", None)
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    methods = ("get_new_blocks", "unpin_blocks", "free_blocks", "cache_full_blocks")
    return (
        bool(managers)
        and all(hasattr(pool, x) for x in methods)
        and bool(getattr(pool, "enable_caching", False))
        and all(getattr(x, "block_pool", None) is pool for x in managers)
        and not any(x.use_eagle for x in managers)
    )
