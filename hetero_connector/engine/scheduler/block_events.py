"""Block events: tell routers which blocks of a prompt this engine can restore.

vLLM publishes an event for each block that enters or leaves its own prefix cache, if
`kv_events_config.enable_kv_cache_events` is set. Once a step it also takes the connector's: they
name blocks in DRAM (medium `CPU`) and on SSD (medium `STORAGE`), by vLLM's own hashes, in the KV
cache group of full attention, the one that routers index. `announcements` decides which chunks.

A chunk is described while a request has its tokens: when it is saved, or restored. What a start
finds on SSD is announced when the first request has found it.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.engine.scheduler.announcements import (
    Announcements,
    BlocksStored,
    Change,
    ChunkBlocks,
    Medium,
)
from hetero_connector.engine.scheduler.requests import RequestTracker, replayable
from hetero_connector.spec import ModelSpec
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import ChunkCopies

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_INDEXED_KINDS = ("full_attention", "mla_attention")
"""The kinds of KV cache groups whose blocks routers index."""
_MEDIA = {Medium.CPU: MEDIUM_CPU, Medium.STORAGE: MEDIUM_STORAGE}
_LOCALITY = "LOCAL"
_MAX_CHUNKS = 256
"""Changed chunks that one step looks at, and below the events it publishes: both take at most a few
milliseconds of a step. What is left is for the next step."""
_MAX_EVENTS = 128


@dataclass(frozen=True)
class EventGroup:
    """The KV cache group whose blocks are announced."""

    index: int
    kind: str
    block_tokens: int
    hash_tokens: int
    """Tokens of each of `Request.block_hashes`."""

    @classmethod
    def of(cls, kv_cache: KVCacheConfig) -> Self | None:
        """Return the first group that routers index; None if the model has none."""
        for index, group in enumerate(kv_cache.kv_cache_groups):
            kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
            if kind in _INDEXED_KINDS:
                tokens = group.kv_cache_spec.block_size
                return cls(index, kind, tokens, kv_cache.hash_block_size or tokens)
        return None


class BlockEvents:
    """Makes the block events of one engine. `has_news` may be asked by any thread."""

    def __init__(
        self, group: EventGroup, model: ModelSpec, store: ArtifactStore, replay_tokens: int | None
    ) -> None:
        """`replay_tokens`: the length of a window replay; None if the engine makes none."""
        self._group = group
        self._model = model
        self._prefix_types = frozenset(model.prefix_types)
        self._store = store
        self._announcements = Announcements(replay_tokens)
        self._to_describe: deque[tuple[RequestTracker, ChunkRange]] = deque()
        self._described: list[ChunkKey] = []
        """Chunks that were described in this step."""
        self._manager: KVCacheManager | None = None
        self._cached_blocks: object = None
        """vLLM's map of its cached blocks, which a reset of its prefix cache replaces."""
        store.note_changes()

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's own prefix cache, whose resets consumers apply to every medium."""
        self._manager = kv_cache_manager
        self._cached_blocks = kv_cache_manager.block_pool.cached_block_hash_to_block

    @property
    def has_news(self) -> bool:
        """Return whether a step would have something to publish, as far as is known."""
        return self.has_backlog or self._store.has_changed

    @property
    def has_backlog(self) -> bool:
        """Return whether the last step has left events to publish."""
        return self._announcements.has_backlog

    def on_stored(self, tracker: RequestTracker, chunk: ChunkRange) -> None:
        """Note a chunk of a request that is stored, or will be once it is copied."""
        self._to_describe.append((tracker, chunk))

    def on_admitted(self, tracker: RequestTracker) -> None:
        """Note what an admitted request has found stored."""
        matched, size = tracker.matched_chunks, tracker.chain.chunk_tokens
        if matched:
            self.on_stored(tracker, tracker.chain.ending_at(matched * size))
        if tracker.restore is not None:
            last = tracker.restore.plan.chunks[-1].chunk
            if last.end <= tracker.chain.num_tokens:  # else it has tokens of another's answer
                self.on_stored(tracker, last)

    def on_new_root(self, root: bytes | None) -> None:
        """Withdraw what is stored under other roots: no request finds it. None: nor anything."""
        self._to_describe.clear()
        self._announcements.set_root(root)

    def take(self) -> list[KVCacheEvent]:
        """Return the events of this step."""
        self._describe_noted()
        # Without news a step does not even take the store's lock.
        changed = self._store.take_changed(_MAX_CHUNKS) if self._store.has_changed else []
        if changed or self._described:
            self._update([*self._described, *changed])
            self._described.clear()
        self._watch_resets()
        return [self._event(change) for change in self._announcements.take(_MAX_EVENTS)]

    def _watch_resets(self) -> None:
        """Announce everything again if vLLM has reset its prefix cache.

        It publishes `AllBlocksCleared` then, for which consumers forget every medium, ours as well.
        vLLM puts that into the batch first, and these events after it.
        """
        if self._manager is not None:
            cached = self._manager.block_pool.cached_block_hash_to_block
            if cached is not self._cached_blocks:
                self._cached_blocks = cached
                self._announcements.repeat()

    def _update(self, chunks: list[ChunkKey]) -> None:
        """Look up the present copies of these chunks."""
        known = [key for key in dict.fromkeys(chunks) if key in self._announcements]
        for key, copies in zip(known, self._store.copies_of(known), strict=True):
            if copies is None:
                self._announcements.update(key, (), is_checkpoint=False, is_stored=False)
                continue
            end = self._announcements.end_of(key)
            self._announcements.update(
                key,
                self._media(copies),
                is_checkpoint=self._model.is_complete(copies.state_types, end),
                is_stored=copies.is_held,
            )

    def _media(self, copies: ChunkCopies) -> tuple[Medium, ...]:
        """Return the media that hold all prefix-proportional state: the slower, if only both do."""
        needed, media = self._prefix_types, []
        if needed <= copies.dram:
            media.append(Medium.CPU)
        if needed <= copies.ssd or (not media and needed <= copies.state_types):
            media.append(Medium.STORAGE)
        return tuple(media)

    def _describe_noted(self) -> None:
        while self._to_describe:
            tracker, chunk = self._to_describe.popleft()
            undescribed = []
            while chunk.key not in self._announcements:
                undescribed.append(chunk)
                if chunk.parent == ROOT:
                    break
                chunk = tracker.chain.ending_at(chunk.start)
            for earlier in reversed(undescribed):
                self._announcements.describe(self._blocks_of(tracker, earlier))
                self._described.append(earlier.key)

    def _blocks_of(self, tracker: RequestTracker, chunk: ChunkRange) -> ChunkBlocks:
        request, size = tracker.request, self._group.block_tokens
        hashes = resolve_block_hashes(request.block_hashes, self._group.hash_tokens, size)
        first, last = chunk.start // size, min(chunk.end // size, len(hashes))
        lora = request.lora_request
        return ChunkBlocks(
            chunk,
            tracker.chain.root,
            tuple(maybe_convert_block_hash(hashes[i]) for i in range(first, last)),
            maybe_convert_block_hash(hashes[first - 1]) if first else None,
            array("I", request.all_token_ids[first * size : last * size]),
            lora.adapter_id if lora else None,
            lora.name if lora else None,
            _extra_keys(request, range(first * size, last * size, size)),
            replayable(request),
        )

    def _event(self, change: Change) -> KVCacheEvent:
        group, medium = self._group, _MEDIA[change.medium]
        if not isinstance(change, BlocksStored):
            return BlockRemoved(
                block_hashes=list(change.hashes),
                medium=medium,
                group_idx=group.index,
                locality=_LOCALITY,
            )
        blocks, first = change.blocks, change.first
        return BlockStored(
            block_hashes=list(blocks.hashes[first:]),
            parent_block_hash=blocks.hashes[first - 1] if first else blocks.parent_hash,
            token_ids=blocks.tokens[first * group.block_tokens :].tolist(),
            block_size=group.block_tokens,
            lora_id=blocks.lora_id,
            medium=medium,
            lora_name=blocks.lora_name,
            extra_keys=None if blocks.extra_keys is None else list(blocks.extra_keys[first:]),
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            locality=_LOCALITY,
        )


def _extra_keys(request: Request, starts: range) -> list[tuple[object, ...] | None] | None:
    """Return the extra keys of the blocks that start there; None if the request has none."""
    has_any = (
        request.lora_request
        or request.cache_salt
        or request.mm_features
        or request.prompt_embeds is not None
    )
    if not has_any:
        return None
    keys = (generate_block_hash_extra_keys(request, at, at + starts.step, 0)[0] for at in starts)
    untagged: list[tuple[object, ...] | None] | None = to_event_extra_keys(list(keys))
    return untagged
