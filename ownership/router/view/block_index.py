"""The blocks that an engine has, as its KV events say, and the prefix from which it can resume.

Events name blocks by hashes that depend on the engine's settings and seed. They carry the blocks'
tokens, too, and by these alone a block gets its key here: a chunk of one block in a chain like the
connector's. So all engines with blocks of one size share a naming.

Groups with full attention need every block of a prefix, those with a window its last blocks, and
recurrent ones the block at its end. The latter two send hashes without positions: a block of theirs
has the hash of the full-attention block that ends at the same token.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from hetero_connector.artifacts.chain import KEY_BYTES
from hetero_connector.artifacts.record import ROOT, ChunkKey
from ownership.router.identity import ChainNaming
from ownership.scheduling.step import WorkerPrefix

_ROOT = hashlib.blake2b(b"blocks of KV events", digest_size=KEY_BYTES).digest()
_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_WINDOWED = frozenset({"sliding_window", "sliding_window_mla"})
_RECURRENT = "mamba"
_GPU = "GPU"
_MEDIUMS = frozenset({_GPU, "CPU", "STORAGE", "DISK"})

Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """vLLM's event of that name; fields that are not needed here are left out."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """vLLM's event of that name."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """vLLM's event of that name."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@lru_cache(maxsize=4096)
def block_naming(block_size: int, salt: str | None, adapter: str) -> ChainNaming:
    """Return how blocks of this size are named. `adapter`: its name; "" for none."""
    digest = hashlib.blake2b(adapter.encode(), digest_size=KEY_BYTES).digest() if adapter else b""
    return ChainNaming(_ROOT, block_size, salt, adapter, digest)


class _Group(NamedTuple):
    kind: str
    block_size: int
    window_blocks: int
    """Blocks before a boundary that must be there."""


@dataclass(slots=True)
class _Block:
    places: set[tuple[str, int]] = field(default_factory=set)
    """Medium and group."""
    key: ChunkKey | None = None
    naming: ChainNaming | None = None


class BlockIndex:
    """The blocks of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: dict[int, _Group] = {}
        self._blocks: dict[Hash, _Block] = {}
        self._by_key: dict[ChunkKey, _Block] = {}

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    @property
    def block_size(self) -> int:
        """The tokens of a full-attention block; 0 before the first one."""
        with self._lock:
            return max((x.block_size for x in self._groups.values() if x.kind in _FULL), default=0)

    @property
    def is_understood(self) -> bool:
        """False if prefixes cannot be told: a group's kind or size of blocks has no rule here."""
        with self._lock:
            size = self.block_size
            return not size or all(
                group.block_size == size
                if group.kind in _FULL
                else group.block_size % size == 0 and group.kind in {*_WINDOWED, _RECURRENT}
                for group in self._groups.values()
            )

    def apply(self, event: Event) -> None:
        """Take an event, in the order in which they were published."""
        with self._lock:
            if isinstance(event, AllBlocksCleared):
                self._clear()
            elif event.locality != "REMOTE" and _medium(event) in _MEDIUMS:
                if isinstance(event, BlockStored):
                    self._store(event)
                else:
                    self._remove(event)

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._clear()

    def prefix(self, keys: Sequence[ChunkKey]) -> WorkerPrefix:
        """Return the prefix of a chain from which the engine can resume.

        Nothing counts as DRAM: other workers cannot read it.
        """
        with self._lock:
            if not self.is_understood:
                return WorkerPrefix()
            return WorkerPrefix(self._reach(keys, (_GPU,)), 0, self._reach(keys, _MEDIUMS))

    def _reach(self, keys: Sequence[ChunkKey], mediums: Sequence[str] | frozenset[str]) -> int:
        size = self.block_size
        full = [n for n, group in self._groups.items() if group.kind in _FULL]
        others = {n: group for n, group in self._groups.items() if group.kind not in _FULL}
        runs = dict.fromkeys(others, 0)
        reach = 0
        for index, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                break
            groups = {group for medium, group in block.places if medium in mediums}
            if not groups.issuperset(full):
                break
            end = (index + 1) * size
            is_boundary = True
            for number, group in others.items():
                if end % group.block_size:
                    is_boundary = False
                    continue
                runs[number] = runs[number] + 1 if number in groups else 0
                needed = min(group.window_blocks, end // group.block_size)
                is_boundary &= runs[number] >= needed
            if is_boundary:
                reach = end
        return reach

    def _store(self, event: BlockStored) -> None:
        number, size = event.group_idx or 0, event.block_size
        kind = event.kv_cache_spec_kind or "full_attention"
        known = self._groups.get(number)
        if known is None or known.kind != kind or size % known.block_size == 0:
            if size <= 0:
                return  # a placeholder, without tokens
            window = event.kv_cache_spec_sliding_window or 0
            blocks = math.ceil(max(0, window - 1) / size) if kind in _WINDOWED else 1
            self._groups[number] = _Group(kind, size, blocks)
        elif size != known.block_size:
            return  # a part of a block
        place = _medium(event), number
        if kind in _FULL:
            self._store_chain(event, place)
        else:
            for name in event.block_hashes:
                self._blocks.setdefault(name, _Block()).places.add(place)

    def _store_chain(self, event: BlockStored, place: tuple[str, int]) -> None:
        """Store blocks that follow each other, as far as their keys are known."""
        size, adapter = event.block_size, event.lora_name or ""
        if len(event.token_ids) != size * len(event.block_hashes):
            return
        parent, naming = ROOT, None
        if event.parent_block_hash is not None:
            before = self._blocks.get(event.parent_block_hash)
            if before is None or before.key is None:
                return
            parent, naming = before.key, before.naming
        for index, name in enumerate(event.block_hashes):
            extra = _others(event.extra_keys, index, adapter)
            if naming is None and all(isinstance(x, str) for x in extra) and len(extra) < 2:
                naming, extra = block_naming(size, extra[0] if extra else None, adapter), []
            if naming is None or extra:
                return  # media or embeddings: tokens do not name the rest
            tokens = event.token_ids[index * size : (index + 1) * size]
            parent = naming.hasher.key(parent, tokens, naming.extras[parent != ROOT])
            block = self._blocks.setdefault(name, _Block())
            block.places.add(place)
            block.key, block.naming = parent, naming
            self._by_key[parent] = block

    def _remove(self, event: BlockRemoved) -> None:
        medium = _medium(event)
        for name in event.block_hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            if event.group_idx is None:
                block.places = {place for place in block.places if place[0] != medium}
            else:
                block.places.discard((medium, event.group_idx))
            if not block.places:
                del self._blocks[name]
                if block.key is not None:
                    self._by_key.pop(block.key, None)

    def _clear(self) -> None:
        self._blocks.clear()
        self._by_key.clear()


def _medium(event: BlockStored | BlockRemoved) -> str:
    return (event.medium or _GPU).upper()


def _others(extra_keys: list[list[Any] | None] | None, index: int, adapter: str) -> list[Any]:
    """Return a block's extra keys without the adapter's name."""
    keys = (extra_keys[index] if extra_keys and index < len(extra_keys) else None) or []
    return [x for x in keys if not (adapter and x == adapter)]
