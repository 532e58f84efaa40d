"""Identify a request's multi-modal items by their content, not by their names.

vLLM names an item by a hash of its content, by the client's id, or by a counter, and these names
look alike: a client may choose any 64 hexadecimal digits. That is safe for vLLM, whose caches end
with the process. But stored chunks remain, and requests of other tenants find them. So a chunk's
key contains digests of the tensors that the model reads.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from blake3 import blake3
from xxhash import xxh3_64_intdigest

from hetero_connector.artifacts.canonical import encode
from hetero_connector.config import HeteroConfig
from hetero_connector.containers import BoundedDict
from hetero_connector.errors import IdentityError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = logging.getLogger("vllm.heterocache")

ROW_DIGEST_BYTES = 32


class MediaIds(Enum):
    """The identity of multi-modal items in chunk keys."""

    CONTENT = "by the tensors that the model reads"
    NAMES = "by vLLM's names, which may be the clients'"
    NONE = "not at all: requests with items are not cached"


class MediaItem(NamedTuple):
    """One item's placeholders in the prompt, and the digest of its content."""

    start: int
    end: int
    digest: bytes


class Overlaps:
    """Finds the items that overlap a range of tokens; items may nest."""

    def __init__(self, items: Iterable[MediaItem]) -> None:
        self._items = sorted(items)
        self._starts = [item.start for item in self._items]
        self._furthest = list(accumulate((item.end for item in self._items), max))
        """For each item, the largest end of it and all items before it."""

    def within(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """Return (offset from `start`, digest) of each item that overlaps [start, end)."""
        found = []
        for index in range(bisect_left(self._starts, end) - 1, -1, -1):
            if self._furthest[index] <= start:
                break
            item = self._items[index]
            if item.end > start:
                found.append((item.start - start, item.digest))
        return found[::-1]


class DigestCache:
    """Digests of processed items, by object: vLLM's cache returns the same object again."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[weakref.ref[Any], bytes]] = {}

    def get(self, data: Any) -> bytes | None:
        """Return the digest of this very object, if it is known."""
        entry = self._digests.get(id(data))
        return entry[1] if entry is not None and entry[0]() is data else None

    def put(self, data: Any, digest: bytes) -> None:
        """Remember the digest as long as the object lives."""
        key = id(data)
        self._digests[key] = (weakref.ref(data, lambda _: self._digests.pop(key, None)), digest)


class TrustedNames:
    """The names that have stood for a single content since the engine started.

    vLLM's encoder cache looks items up by name, and so does its prefix cache. After a name has
    stood for two contents, or for one that was not digested, they may return the state of either.
    A name whose content is no longer known here is distrusted, too.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._contents = BoundedDict[str, bytes | None](capacity)
        self._dropped = _Dropped()
        self.any_distrusted = False
        """True once any name was distrusted or dropped."""

    def trust(self, name: str, digest: bytes) -> bool:
        """Record the name's content; return False if it is distrusted or stood for another one."""
        if self.is_distrusted(name):
            return False
        known = self._contents.get(name, digest)
        self._put(name, digest if known == digest else None)
        return known == digest

    def distrust(self, name: str) -> None:
        self._put(name, None)

    def is_distrusted(self, name: str) -> bool:
        if name in self._contents:
            return self._contents[name] is None
        return name in self._dropped

    def _put(self, name: str, digest: bytes | None) -> None:
        is_full = len(self._contents) == self._contents.capacity
        if is_full and name not in self._contents:
            self._dropped.add(next(iter(self._contents)))
        self.any_distrusted |= is_full or digest is None
        self._contents[name] = digest


class _Dropped:
    """A set of names as one bit for each: a few that were never added seem to be in it, too."""

    _BITS = 1 << 26
    """8 MiB. After a million names one in 70 others seems to be in it."""

    def __init__(self) -> None:
        self._bits = bytearray()
        """Empty until the first name is added."""
        self._seed = secrets.randbits(64)

    def __contains__(self, name: str) -> bool:
        byte, bit = self._place(name)
        return bool(self._bits and self._bits[byte] & bit)

    def add(self, name: str) -> None:
        if not self._bits:
            self._bits = bytearray(self._BITS // 8)
        byte, bit = self._place(name)
        self._bits[byte] |= bit

    def _place(self, name: str) -> tuple[int, int]:
        digest = xxh3_64_intdigest(name.encode(errors="surrogatepass"), self._seed)
        byte, bit = divmod(digest % self._BITS, 8)
        return byte, 1 << bit


def media_ids(config: HeteroConfig, vllm_config: VllmConfig) -> MediaIds:
    """Return how this engine identifies multi-modal items. Logs a warning if it cannot."""
    model = vllm_config.model_config
    if not model.supports_multimodal_inputs:
        return MediaIds.CONTENT
    media, encoders = model.get_multimodal_config(), vllm_config.ec_transfer_config
    has_cache = media.mm_processor_cache_gb > 0
    if not config.trust_client_media_ids:
        if encoders is not None and encoders.is_ec_consumer:
            # Items may come without their tensors. What is left is equal for images of one size.
            logger.warning(
                "HeteroConnector: requests with multi-modal items are not cached: an EC consumer "
                "(--ec-transfer-config) may get their embeddings by name, without their contents. "
                "Set trust_client_media_ids if clients can be trusted"
            )
            return MediaIds.NONE
        if not (has_cache and media.mm_processor_cache_type == "shm"):
            return MediaIds.CONTENT
        logger.warning(
            "HeteroConnector: requests with multi-modal items are not cached: with "
            "--mm-processor-cache-type shm their contents do not reach the engine core. Set lru, "
            "or trust_client_media_ids if clients can be trusted"
        )
    elif has_cache or vllm_config.cache_config.enable_prefix_caching:
        return MediaIds.NAMES
    else:
        logger.warning(
            "HeteroConnector: requests with multi-modal items are not cached: without a prefix "
            "cache and with --mm-processor-cache-gb 0 vLLM names items by counting them. Switch "
            "either on, or trust_client_media_ids off"
        )
    return MediaIds.NONE


def content_digest(data: Mapping[str, Any] | None) -> bytes:
    """Return the digest of all tensors of a processed item (`MultiModalKwargsItem`).

    Raises IdentityError if the item is not in this process or contains other objects.
    """
    if data is None:
        raise IdentityError("their contents are not in this process")
    state = blake3()
    for name in sorted(data):
        state.update(encode(name))
        _update(state, data[name].data)
    return state.digest()


def media_item(feature: MultiModalFeatureSpec, digest: bytes) -> MediaItem:
    """Return the item at its place in the prompt, with its mask of placeholders in the digest."""
    position = feature.mm_position
    mask = None if position.is_embed is None else tensor_digest(position.is_embed)
    identity = encode([feature.modality, digest, position.length, mask])
    return MediaItem(position.offset, position.offset + position.length, blake3(identity).digest())


def row_digests(tensor: torch.Tensor) -> bytes:
    """Return `ROW_DIGEST_BYTES` for each row of a CPU tensor: of its type, shape and elements."""
    kind = encode([str(tensor.dtype), list(tensor.shape[1:])])
    rows = tensor.detach().contiguous().flatten(1).view(torch.uint8).numpy()
    return b"".join(blake3(kind).update(row.data).digest() for row in rows)


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a CPU tensor: of its type, shape and elements."""
    state = blake3()
    _update(state, tensor)
    return state.digest()


def _update(state: blake3, value: object) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        state.update(encode([str(value.dtype), list(value.shape)]))
        state.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    elif isinstance(value, (list, tuple)):
        state.update(encode(["sequence", len(value)]))
        for item in value:
            _update(state, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        state.update(encode(value))
    else:
        raise IdentityError(f"they contain a {type(value).__name__}, which cannot be digested")
