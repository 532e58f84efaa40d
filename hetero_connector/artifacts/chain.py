"""Chain hashing: each chunk of a prompt is named by a hash over everything before it.

    key(i) = BLAKE2b-128(key(i-1) | length of extra | extra(i) | token ids of chunk i)

key(-1) is a root derived from the model's fingerprint, the generation and the version of the
weights. So two models never share a key, and neither does one engine before and after a reset or
an update of its weights. `extra` is everything else that can change the bytes of the state over
that range (LoRA, multi-modal inputs, cache salt). Chunks are hashed when they are needed: a match
that fails at the first chunk has hashed one chunk.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.generation import FIRST
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange

KEY_BYTES = 16
_TOKEN_TYPE = "I"  # uint32: four bytes on every platform CPython supports
_EXTRA_LENGTH = struct.Struct("<Q")
_key = attrgetter("key")

ExtraKeys = Callable[[int, int], bytes]
"""(start, end) -> what identifies the state over these tokens besides the tokens; b"" for nothing.

Must be unambiguous: build it with `artifacts.canonical.encode`."""


def no_extra_keys(start: int, end: int) -> bytes:
    """Return b"": the extra keys of a request that has none."""
    return b""


class ChunkHasher:
    """Makes the chunk keys under one root: a pure function of parent, tokens and extra keys."""

    def __init__(self, root: bytes, chunk_tokens: int) -> None:
        """`root`: the key that every chain begins with."""
        if chunk_tokens <= 0:
            raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
        if len(root) != KEY_BYTES:
            raise ValueError(f"a root has {KEY_BYTES} bytes, got {len(root)}")
        self.root = root
        self.chunk_tokens = chunk_tokens

    def key(self, parent: ChunkKey, token_ids: Iterable[int], extra: bytes) -> ChunkKey:
        """Return the key of the chunk `token_ids` after `parent` (`record.ROOT` for the first).

        Raises ValueError for a token id outside [0, 2**32), such as a placeholder.
        """
        state = hashlib.blake2b(self.root if parent == ROOT else parent, digest_size=KEY_BYTES)
        state.update(_EXTRA_LENGTH.pack(len(extra)) + extra)
        state.update(_token_bytes(token_ids))
        return ChunkKey(state.digest())


class ChainHasher(ChunkHasher):
    """Makes the chunk keys of one model. Knows how its root is made, and can make others."""

    def __init__(
        self,
        fingerprint: bytes,
        chunk_tokens: int,
        generation: bytes = FIRST.tag,
        weights: bytes = b"",
    ) -> None:
        """`fingerprint`: `Fingerprint.digest`. `generation`: `Generation.tag`. `weights`: the
        version of weights that are no longer those of the model's files.

        Raises ValueError if the fingerprint is empty.
        """
        if not fingerprint:
            raise ValueError("the fingerprint is empty: keys of two models would collide")
        document = encode(
            ["heterocache chain root", fingerprint, chunk_tokens, generation, weights]
        )
        super().__init__(hashlib.blake2b(document, digest_size=KEY_BYTES).digest(), chunk_tokens)
        self._fingerprint = fingerprint

    def with_root(self, generation: bytes, weights: bytes) -> ChainHasher:
        """Return a hasher of the same model in another generation, or with other weights."""
        return ChainHasher(self._fingerprint, self.chunk_tokens, generation, weights)


def _token_bytes(token_ids: Iterable[int]) -> array[int]:
    try:
        tokens = array(_TOKEN_TYPE, token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


class RequestChain:
    """The chain of one request, which grows as its tokens arrive. Not thread-safe.

    Every full chunk is hashed once, when it is first needed.
    """

    def __init__(self, hasher: ChunkHasher, extra_keys: ExtraKeys = no_extra_keys) -> None:
        self._hasher = hasher
        self._extra_keys = extra_keys
        self._token_ids: list[int] = []
        self._chunks: list[ChunkRange] = []

    def rehashed(self, hasher: ChunkHasher) -> RequestChain:
        """Return the chain of the same request by another hasher, not hashed yet."""
        chain = RequestChain(hasher, self._extra_keys)
        chain.extend(self._token_ids)
        return chain

    @property
    def chunk_tokens(self) -> int:
        """The number of tokens of a full chunk."""
        return self._hasher.chunk_tokens

    @property
    def root(self) -> bytes:
        """Return the key that the chain begins with."""
        return self._hasher.root

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens without hashing them."""
        self._token_ids.extend(token_ids)

    def chunks(self, limit_tokens: int | None = None) -> Iterator[ChunkRange]:
        """Iterate over the full chunks up to `limit_tokens`, which are hashed one by one."""
        limit = self.num_tokens if limit_tokens is None else min(limit_tokens, self.num_tokens)
        count = limit // self._hasher.chunk_tokens
        hashed = self._chunks[:count]
        return itertools.chain(hashed, map(self._chunk, range(len(hashed), count)))

    def last_hashed(self, limit_tokens: int) -> ChunkRange | None:
        """Return the last full chunk up to `limit_tokens` that has been hashed; None for none."""
        count = min(limit_tokens // self._hasher.chunk_tokens, len(self._chunks))
        return self._chunks[count - 1] if count else None

    def tail(self, end: int) -> ChunkRange:
        """Return the short chunk that ends at `end`.

        Raises ValueError if `end` is a chunk boundary or beyond the known tokens.
        """
        size = self._hasher.chunk_tokens
        if not 0 < end <= self.num_tokens:
            raise ValueError(f"no tail ends at {end}: {self.num_tokens} tokens are known")
        if end % size == 0:
            raise ValueError(f"no tail ends at {end}: it is a boundary of {size}-token chunks")
        return self._hash(self._key_before(end // size), end // size * size, end)

    def ending_at(self, end: int) -> ChunkRange:
        """Return the full or short chunk that ends at `end`. Raises ValueError as `tail` does."""
        size = self._hasher.chunk_tokens
        if end % size or not 0 < end <= self.num_tokens:
            return self.tail(end)
        return self._chunk(end // size - 1)

    def keys_back_from(self, num_chunks: int) -> Iterator[ChunkKey]:
        """Iterate over the keys of the first `num_chunks` full chunks, the last one first."""
        if num_chunks:
            self._chunk(num_chunks - 1)
        return map(_key, reversed(self._chunks[:num_chunks]))

    def _chunk(self, index: int) -> ChunkRange:
        size = self._hasher.chunk_tokens
        while len(self._chunks) <= index:
            start = len(self._chunks) * size
            parent = self._chunks[-1].key if self._chunks else ROOT
            self._chunks.append(self._hash(parent, start, start + size))
        return self._chunks[index]

    def _key_before(self, index: int) -> ChunkKey:
        return self._chunk(index - 1).key if index else ROOT

    def _hash(self, parent: ChunkKey, start: int, end: int) -> ChunkRange:
        extra = self._extra_keys(start, end)
        key = self._hasher.key(parent, self._token_ids[start:end], extra)
        return ChunkRange(key, parent, start, end)
