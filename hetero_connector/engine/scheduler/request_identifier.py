"""Identify a request's state beyond its tokens: by its adapter, media, embeddings and salt.

An adapter's files, an item's tensors and embeddings are digested on threads of their own. Until
that is done `match` has no answer, so vLLM asks again. Requests whose adapter or items cannot be
read in time are not cached. Embeddings have no deadline: they are in memory, so their digest ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.chain import ExtraKeys
from hetero_connector.artifacts.extra_keys import first_keys, text_keys
from hetero_connector.artifacts.model_files import locate_model, lora_digest
from hetero_connector.engine.scheduler.background_thread import BackgroundThread
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.media import (
    ROW_DIGEST_BYTES,
    DigestCache,
    MediaIds,
    MediaItem,
    Overlaps,
    TrustedNames,
    content_digest,
    media_item,
    row_digests,
)
from hetero_connector.errors import IdentityError
from hetero_connector.metrics import Recorder

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.heterocache")

_WAIT_S = 1e-3
"""Longest wait in a hook. To check the files of a known adapter takes a tenth of it."""
_FRESH_S = 0.1
"""Files that were read longer ago are checked again before a request may be admitted."""
_MAX_REASONS = 100


class UnidentifiedReason(Enum):
    """The reason why a request has no identity."""

    PENDING = "its adapter, media or embeddings are still being read"
    NEVER = "it is not cached"


@dataclass(frozen=True)
class RequestIdentity:
    """The identity of a request's adapter, media and prompt embeddings."""

    lora: bytes = b""
    """Digest of the adapter; b"" for none."""
    media: tuple[MediaItem, ...] = ()
    embeddings: bytes = b""
    """`row_digests` of the prompt's embeddings; b"" for none."""


PLAIN = RequestIdentity()


@dataclass
class _Reading:
    """The digests that were ordered for one request."""

    begun_s: float
    lora: Future[bytes] | None = None
    media: list[Future[bytes]] = field(default_factory=list)
    embeddings: Future[bytes] | None = None
    is_checked: bool = False
    """True once the adapter's files were checked for the first time."""

    @property
    def futures(self) -> list[Future[bytes]]:
        return [*self.media, *(x for x in (self.lora, self.embeddings) if x is not None)]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def cancel(self) -> None:
        """Leave out what has not begun."""
        for future in self.futures:
            future.cancel()


@dataclass
class RequestIdentifier:
    """Identifies requests. Used on the scheduler's thread."""

    recorder: Recorder
    media_ids: MediaIds = MediaIds.CONTENT
    deadline_s: float = 2.0
    """A request whose adapter or items are not read after this time is served uncached."""
    clock: Callable[[], float] = time.monotonic
    adapter_thread: BackgroundThread = field(
        default_factory=lambda: BackgroundThread("heterocache-adapters")
    )
    media_thread: BackgroundThread = field(
        default_factory=lambda: BackgroundThread("heterocache-media")
    )
    embeddings_thread: BackgroundThread = field(
        default_factory=lambda: BackgroundThread("heterocache-embeddings")
    )

    def __post_init__(self) -> None:
        self._results: dict[str, RequestIdentity | UnidentifiedReason] = {}
        self._readings: dict[str, _Reading] = {}
        self._adapters = _Adapters()
        self._digests = DigestCache()
        self._names = TrustedNames()
        self._logged: set[str] = set()

    def begin(self, request: Request) -> None:
        """`on_new_request`: begin to read, so that the identity is known at the first match."""
        if _is_plain(request):
            return
        if not cacheable(request):
            self._give_up(request, "")
        elif request.lora_request is not None and request.lora_request.load_inplace:
            self._give_up(request, "with load_inplace vLLM reads its files again in every step")
        elif request.mm_features and self.media_ids is MediaIds.NONE:
            self._give_up(request, "this engine cannot identify their contents")
        elif self._order(request, reading := _Reading(self.clock())):
            self._readings[request.request_id] = reading
        else:
            reading.cancel()
            self._give_up(request, "too many adapters, items or embeddings wait")

    def identify(self, request: Request) -> RequestIdentity | UnidentifiedReason:
        """Return the request's identity as far as it is known now. Never waits for a file."""
        if _is_plain(request):
            return PLAIN if cacheable(request) else UnidentifiedReason.NEVER
        request_id = request.request_id
        if request_id not in self._results:
            if request_id not in self._readings:
                self.begin(request)
            if request_id in self._readings:
                self._advance(request, self._readings[request_id])
        return self._results.get(request_id, UnidentifiedReason.PENDING)

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished."""
        self._results.pop(request_id, None)
        self._drop_reading(request_id)

    def _drop_reading(self, request_id: str) -> None:
        """Forget what is being read for a request; what has not begun is not read."""
        if (reading := self._readings.pop(request_id, None)) is not None:
            reading.cancel()

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """The digests of the adapters that vLLM has loaded, by name. Any thread may ask."""
        return self._adapters.by_name.copy()

    def close(self) -> None:
        """Stop the threads."""
        self.adapter_thread.close()
        self.media_thread.close()
        self.embeddings_thread.close()

    def on_adapter_loaded(self, lora: LoRARequest, digest: bytes | None) -> None:
        """Record the files that vLLM has loaded before any request needs them.

        `digest`: None if it is not known which content vLLM has loaded.
        """
        if digest is None or lora.load_inplace:
            self._adapters.distrust(lora)
        else:
            self._adapters.record(lora, digest)

    def is_distrusted(self, request: Request) -> bool:
        """True if vLLM may compute the request with other content than it was identified by.

        It may have another item's embeddings for one of its items, or other weights under the id
        of its adapter.
        """
        lora = request.lora_request
        if lora is not None and self._adapters.is_distrusted(lora):
            return True
        return self._names.any_distrusted and any(
            self._names.is_distrusted(feature.identifier) for feature in request.mm_features
        )

    def _order(self, request: Request, reading: _Reading) -> bool:
        """Order the unknown digests; False, with some of them ordered, if too many are queued."""
        if request.lora_request is not None:
            reading.lora = self._read_adapter(request.lora_request)
            if reading.lora is None:
                return False
        for feature in request.mm_features if self.media_ids is MediaIds.CONTENT else ():
            if (future := self._read_item(feature.data)) is None:
                return False
            reading.media.append(future)
        if (embeddings := request.prompt_embeds) is not None:
            reading.embeddings = self.embeddings_thread.submit(lambda: row_digests(embeddings))
            return reading.embeddings is not None
        return True

    def _read_adapter(self, lora: LoRARequest) -> Future[bytes] | None:
        path = str(lora.lora_path)
        return self.adapter_thread.submit(lambda: read_adapter(path))

    def _read_item(self, data: Any) -> Future[bytes] | None:
        known = self._digests.get(data)
        if known is None:
            return self.media_thread.submit(lambda: content_digest(data))
        future: Future[bytes] = Future()
        future.set_result(known)
        return future

    def _advance(self, request: Request, reading: _Reading) -> None:
        """Finish the reading if it is done or too late."""
        others = [future for future in reading.futures if future is not reading.lora]
        if not reading.is_checked and all(future.done() for future in others):
            reading.is_checked = True
            self._check_adapter(request, reading)
        if reading.is_done:
            self._finish(request, reading)
        elif self._is_too_late(reading):
            self._give_up(request, "their adapter or items were not read in time")

    def _check_adapter(self, request: Request, reading: _Reading) -> None:
        """Read the adapter's files again if that was long ago: vLLM may load them from now on."""
        lora = request.lora_request
        if lora is None or reading.lora is None:
            return
        if self.clock() - reading.begun_s > _FRESH_S:
            if (again := self._read_adapter(lora)) is not None:
                reading.lora.cancel()
                reading.lora = again
            reading.begun_s = self.clock()
        if self._adapters.is_known(lora) and self.adapter_thread.busy_s < _WAIT_S:
            wait([reading.lora], _WAIT_S)

    def _is_too_late(self, reading: _Reading) -> bool:
        """True if the adapter or an item is waited for too long; embeddings have no deadline."""
        is_lora_read = reading.lora is None or reading.lora.done()
        threads = [] if is_lora_read else [self.adapter_thread]
        threads += [] if all(x.done() for x in reading.media) else [self.media_thread]
        waited_s = [self.clock() - reading.begun_s, *(thread.busy_s for thread in threads)]
        return bool(threads) and max(waited_s) > self.deadline_s

    def _finish(self, request: Request, reading: _Reading) -> None:
        """Store the identity, or give up if something could not be read."""
        if reading.media:
            for feature, future in zip(request.mm_features, reading.media, strict=True):
                if future.exception() is None:
                    self._digests.put(feature.data, future.result())
        error = next(filter(None, (future.exception() for future in reading.futures)), None)
        if error is None and self.media_ids is MediaIds.CONTENT:
            error = self._record_names(request.mm_features)
        lora = b""
        if error is None and reading.lora is not None:
            assert request.lora_request is not None
            lora = reading.lora.result()
            error = self._adapters.record(request.lora_request, lora)
        if error is not None:
            self._give_up(request, str(error))
        else:
            self._readings.pop(request.request_id, None)
            media = self._media_items(request, reading)
            rows = b"" if reading.embeddings is None else reading.embeddings.result()
            self._results[request.request_id] = RequestIdentity(lora, media, rows)

    def _media_items(self, request: Request, reading: _Reading) -> tuple[MediaItem, ...]:
        features = request.mm_features
        if self.media_ids is MediaIds.NAMES:
            return tuple(media_item(x, encode(["name", x.identifier])) for x in features)
        return tuple(
            media_item(feature, future.result())
            for feature, future in zip(features, reading.media, strict=True)
        )

    def _record_names(self, features: Sequence[MultiModalFeatureSpec]) -> IdentityError | None:
        """Record the contents of vLLM's names; return an error if one stands for several."""
        error = None
        for feature in features:
            digest = self._digests.get(feature.data)
            if digest is None or not self._names.trust(feature.identifier, digest):
                self._names.distrust(feature.identifier)
                error = IdentityError(f"the name {feature.identifier!r} stands for several items")
        return error

    def _give_up(self, request: Request, reason: str) -> None:
        self._drop_reading(request.request_id)
        self._results[request.request_id] = UnidentifiedReason.NEVER
        if self.media_ids is MediaIds.CONTENT:
            self._record_names(request.mm_features)
        if not cacheable(request):
            return
        self.recorder.add("heterocache_unidentified_requests")
        message = f"{_kind(request)} are not cached: {reason}"
        if message not in self._logged and len(self._logged) < _MAX_REASONS:
            self._logged.add(message)
            logger.warning("%s", message)


class _Adapters:
    """The content of each adapter, as long as it stays the same.

    vLLM loads an adapter's files when it is told to or first needs them, again after it has dropped
    the weights, and in place. Its prefix cache goes by the adapter's name and path. Once there was
    other content under an id, or under a name and path, it is unknown here what vLLM computes with,
    and what its pages were computed with: requests with it are not cached any more.
    """

    def __init__(self) -> None:
        self._contents: dict[int | tuple[str, str], bytes | None] = {}
        """By id, and by name and path. None: there was another one before."""
        self._pages: dict[int, set[tuple[str, str]]] = {}
        """The names and paths under which pages were computed with an id's weights."""
        self.by_name: dict[str, bytes] = {}
        """The digests of adapters that have not changed."""

    def is_known(self, lora: LoRARequest) -> bool:
        """True if the adapter's files have been read before."""
        return lora.lora_int_id in self._contents

    def is_distrusted(self, lora: LoRARequest) -> bool:
        """True if there was other content under the adapter's id."""
        return self._contents.get(lora.lora_int_id, b"") is None

    def record(self, lora: LoRARequest, digest: bytes) -> IdentityError | None:
        """Record the digest of the adapter's files; return an error if it has changed."""
        pages = (lora.lora_name, str(lora.lora_path))
        self._pages.setdefault(lora.lora_int_id, set()).add(pages)
        known = {self._contents.setdefault(x, digest) for x in (lora.lora_int_id, pages)}
        if known == {digest}:
            self.by_name[lora.lora_name] = digest
            return None
        self.distrust(lora)
        return IdentityError(
            "its files changed, or were replaced in place; load them under another name"
        )

    def distrust(self, lora: LoRARequest) -> None:
        """Note that the content under the adapter's id is unknown, and that of its pages."""
        self._contents[lora.lora_int_id] = None
        for pages in self._pages.get(lora.lora_int_id, ()):
            self._contents[pages] = None
        self.by_name.pop(lora.lora_name, None)


def read_adapter(path: str) -> bytes:
    """Return the digest of an adapter's files. Files that have not changed are read once."""
    return lora_digest(locate_model(path).path)


def _is_plain(request: Request) -> bool:
    has_tensors = request.mm_features or request.prompt_embeds is not None
    return request.lora_request is None and not has_tensors


def _kind(request: Request) -> str:
    if request.lora_request is not None:
        return f"requests with adapter {request.lora_request.lora_name!r}"
    items = "multi-modal items" if request.mm_features else "prompt embeddings"
    return f"requests with {items}"


def cacheable(request: Request) -> bool:
    """True if this request's state may be stored and restored.

    Pooling may need the hidden states of every token, and a streaming session rewrites its own
    past: neither can resume from a prefix.
    """
    return request.pooling_params is None and not request.resumable


def adapter_name(request: Request) -> str:
    """Return the name of the request's adapter, as vLLM serves it; "" for none."""
    lora = request.lora_request
    return "" if lora is None else str(lora.lora_name)


def extra_keys(request: Request, identity: RequestIdentity, clearings: Clearings) -> ExtraKeys:
    """Return a function of (start, end): the key, besides tokens, of that range's state."""
    salt, model, rows = request.cache_salt, adapter_name(request), identity.embeddings
    if not identity.media and not rows:
        return text_keys(salt, clearings, model, identity.lora)
    overlaps = Overlaps(identity.media)

    def keys(start: int, end: int) -> bytes:
        own: list[object] = [["media", *item] for item in overlaps.within(start, end)]
        if start == 0:
            own += first_keys(salt, clearings, model)
        if digests := rows[start * ROW_DIGEST_BYTES : end * ROW_DIGEST_BYTES]:
            tokens = request.prompt_is_token_ids
            mask = None if tokens is None else list(tokens[start:end])
            own.append(["embeds", digests, mask])
        # Up to its first item, a prompt has the keys of the same text alone.
        return encode([identity.lora, own]) if own or salt or identity.lora else b""

    return keys
