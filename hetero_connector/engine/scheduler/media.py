"""Name a request's multi-modal items by their content, whatever they are called.

vLLM names an item by a hash of its content, by what the client calls it, or by a counter, and
the names look alike: a client may give any 64 hexadecimal digits. vLLM can afford that, because
its caches die with the process. A stored chunk does not, and other tenants' requests find it. So
an item enters a chunk's key by the tensors that the model reads, digested here.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from blake3 import blake3

from hetero_connector.artifacts.canonical import encode
from hetero_connector.config import HeteroConfig
from hetero_connector.errors import IdentityError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

logger = logging.getLogger("vllm.heterocache")

_MOST_NAMES = 1 << 16


class MediaIds(Enum):
    """Say how multi-modal items are told apart in a chunk's key."""

    CONTENT = "what the model reads of them"
    NAMES = "vLLM's names, which may be the clients'"
    NONE = "nothing: requests with items are not cached"


class MediaItem(NamedTuple):
    """One item's placeholders in the prompt, and the digest of what it holds."""

    start: int
    end: int
    digest: bytes


class Overlaps:
    """All items that overlap a range of tokens, however they nest."""

    def __init__(self, items: Iterable[MediaItem]) -> None:
        self._items = sorted(items)
        self._starts = [item.start for item in self._items]
        self._furthest = list(accumulate((item.end for item in self._items), max))
        """By item: where the last of it and of all before it ends."""

    def within(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """(offset from `start`, digest) of each item that overlaps `start` to `end`."""
        found = []
        for index in range(bisect_left(self._starts, end) - 1, -1, -1):
            if self._furthest[index] <= start:
                break
            item = self._items[index]
            if item.end > start:
                found.append((item.start - start, item.digest))
        return found[::-1]


class DigestCache:
    """Digests of processed items, by object: vLLM's cache hands out the same one again."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[weakref.ref[Any], bytes]] = {}

    def get(self, data: Any) -> bytes | None:
        """Return the digest of this very object, if it is known."""
        held = self._digests.get(id(data))
        return held[1] if held is not None and held[0]() is data else None

    def put(self, data: Any, digest: bytes) -> None:
        """Remember it for as long as the object lives."""
        key = id(data)
        self._digests[key] = (weakref.ref(data, lambda _: self._digests.pop(key, None)), digest)


class BelievedNames:
    """Names that stood for one content only since the engine started.

    vLLM's encoder cache answers by name: once a name stood for two contents, or for one that
    nobody read, it may bring either's embeddings.
    """

    def __init__(self) -> None:
        self._contents: OrderedDict[str, bytes | None] = OrderedDict()
        self.any_doubted = False
        """True if a name has been doubted since the start."""

    def believe(self, name: str, digest: bytes) -> bool:
        """Return whether the name has stood for this content only."""
        known = self._contents.get(name, digest)
        self._put(name, digest if known == digest else None)
        return known == digest

    def doubt(self, name: str) -> None:
        """Believe the name no more."""
        self._put(name, None)

    def is_doubted(self, name: str) -> bool:
        """Return whether the name stood for several contents."""
        return self._contents.get(name, b"") is None

    def _put(self, name: str, digest: bytes | None) -> None:
        self.any_doubted |= digest is None
        self._contents[name] = digest
        self._contents.move_to_end(name)
        if len(self._contents) > _MOST_NAMES:
            self._contents.popitem(last=False)


def media_ids(config: HeteroConfig, vllm_config: VllmConfig) -> MediaIds:
    """By what multi-modal items are told apart. Warns where they cannot be."""
    model = vllm_config.model_config
    if not model.supports_multimodal_inputs:
        return MediaIds.CONTENT  # there are none
    media = model.get_multimodal_config()
    has_cache = media.mm_processor_cache_gb > 0
    if not config.trust_client_media_ids:
        if not (has_cache and media.mm_processor_cache_type == "shm"):
            return MediaIds.CONTENT
        logger.warning(
            "HeteroConnector: requests with multi-modal items are not cached: with "
            "--mm-processor-cache-type shm their contents do not reach the engine core. Set lru, "
            "or trust_client_media_ids if clients may be believed"
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
    """Digest all tensors of a processed item (`MultiModalKwargsItem`).

    Raises IdentityError where the item is not here or holds something else than tensors.
    """
    if data is None:
        raise IdentityError("their contents are not in this process")
    state = blake3()
    for name in sorted(data):
        state.update(encode(name))
        _update(state, data[name].data)
    return state.digest()


def placed(feature: MultiModalFeatureSpec, digest: bytes) -> MediaItem:
    """Return the item where its request has it. Its mask says which placeholders it fills."""
    position = feature.mm_position
    mask = None if position.is_embed is None else tensor_digest(position.is_embed)
    identity = encode([feature.modality, digest, position.length, mask])
    return MediaItem(position.offset, position.offset + position.length, blake3(identity).digest())


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Digest of a tensor on the CPU: its type, shape and elements."""
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
        raise IdentityError(f"they hold a {type(value).__name__} that is not read here")
