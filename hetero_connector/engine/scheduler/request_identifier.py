"""Name a request's state by more than its tokens: adapter, media, embeddings, salt.

An adapter's files and an item's tensors are read on threads of their own. Until they are known
vLLM is told to ask again; what cannot be known in time is not cached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.identity import locate_model, lora_digest
from hetero_connector.engine.scheduler.background_thread import BackgroundThread
from hetero_connector.engine.scheduler.media import (
    BelievedNames,
    DigestCache,
    MediaIds,
    MediaItem,
    Overlaps,
    content_digest,
    placed,
    tensor_digest,
)
from hetero_connector.errors import IdentityError
from hetero_connector.metrics import Recorder

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.heterocache")

_PATIENCE_S = 1e-3
"""A look at the files of an adapter that is known takes a tenth of that."""
_FRESH_S = 0.1
"""Files that were read longer ago are looked at again before a request may be admitted."""
_MOST_REASONS = 100


class Unidentified(Enum):
    """Why a request has no identity."""

    PENDING = "it is being read"
    NEVER = "it is not cached"


@dataclass(frozen=True)
class RequestIdentity:
    """What names a request's state besides its tokens, its salt and its embeddings."""

    lora: bytes = b""
    """Digest of the adapter; b"" for none."""
    media: tuple[MediaItem, ...] = ()


PLAIN = RequestIdentity()


@dataclass
class _Reading:
    """What has been asked for on behalf of one request."""

    begun_s: float
    lora: Future[bytes] | None = None
    media: Sequence[Future[bytes]] = ()
    asked: bool = False

    @property
    def futures(self) -> list[Future[bytes]]:
        return [*self.media, *([self.lora] if self.lora is not None else ())]

    @property
    def unread(self) -> bool:
        return not all(future.done() for future in self.futures)


@dataclass
class RequestIdentifier:
    """Finds out each request's identity. Called from the scheduler's thread."""

    recorder: Recorder
    media_ids: MediaIds = MediaIds.CONTENT
    deadline_s: float = 2.0
    """After that a request is served uncached."""
    clock: Callable[[], float] = time.monotonic
    adapter_thread: BackgroundThread = field(
        default_factory=lambda: BackgroundThread("heterocache-adapters")
    )
    media_thread: BackgroundThread = field(
        default_factory=lambda: BackgroundThread("heterocache-media")
    )

    def __post_init__(self) -> None:
        self._found: dict[str, RequestIdentity | Unidentified] = {}
        self._readings: dict[str, _Reading] = {}
        self._adapters = _Adapters()
        self._digests = DigestCache()
        self._names = BelievedNames()
        self._said: set[str] = set()
        """What has been logged."""

    def begin(self, request: Request) -> None:
        """`on_new_request`: start to read, so that it is known when vLLM first asks."""
        if request.lora_request is None and not request.mm_features:
            return
        if not cacheable(request):
            self._give_up(request, "")
        elif request.mm_features and self.media_ids is MediaIds.NONE:
            self._give_up(request, "this engine cannot tell their contents")
        elif (reading := self._begin(request)) is None:
            self._give_up(request, "too many adapters or items wait to be read")
        else:
            self._readings[request.request_id] = reading

    def identity(self, request: Request) -> RequestIdentity | Unidentified:
        """Return what is known of the request; nothing here waits for a file."""
        if request.lora_request is None and not request.mm_features:
            return PLAIN if cacheable(request) else Unidentified.NEVER
        request_id = request.request_id
        if request_id not in self._found:
            if request_id not in self._readings:
                self.begin(request)
            if request_id in self._readings:
                self._look(request, self._readings[request_id])
        return self._found.get(request_id, Unidentified.PENDING)

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._found.pop(request_id, None)
        self._readings.pop(request_id, None)

    def close(self) -> None:
        """Read nothing more."""
        self.adapter_thread.close()
        self.media_thread.close()

    def doubts(self, request: Request) -> bool:
        """Return whether another item's embeddings may have been used for one of the request's."""
        return self._names.any_doubted and any(
            self._names.is_doubted(feature.identifier) for feature in request.mm_features
        )

    def _begin(self, request: Request) -> _Reading | None:
        """Order what is not known; None if there is no room for it."""
        reading = _Reading(self.clock())
        if request.lora_request is not None:
            reading.lora = self._read_adapter(request.lora_request)
            if reading.lora is None:
                return None
        if self.media_ids is MediaIds.CONTENT:
            media = [self._read(feature.data) for feature in request.mm_features]
            reading.media = [future for future in media if future is not None]
            if len(reading.media) < len(media):
                return None
        return reading

    def _read_adapter(self, lora: LoRARequest) -> Future[bytes] | None:
        path = str(lora.lora_path)
        return self.adapter_thread.submit(lambda: read_adapter(path))

    def _read(self, data: Any) -> Future[bytes] | None:
        known = self._digests.get(data)
        if known is None:
            return self.media_thread.submit(lambda: content_digest(data))
        future: Future[bytes] = Future()
        future.set_result(known)
        return future

    def _look(self, request: Request, reading: _Reading) -> None:
        """Take over what has been read since; decide if nothing more is to be awaited."""
        if not reading.asked:
            reading.asked = True
            self._look_at_adapter(request, reading)
        if not reading.unread:
            self._settle(request, reading)
        elif self._is_too_late(reading):
            self._give_up(request, "their adapter or items were not read in time")

    def _look_at_adapter(self, request: Request, reading: _Reading) -> None:
        """vLLM may load the files from now on: they are to be what was read."""
        lora = request.lora_request
        if lora is None:
            return
        if reading.lora is not None and self.clock() - reading.begun_s > _FRESH_S:
            reading.lora = self._read_adapter(lora) or reading.lora
        in_time = self._adapters.knows(lora) and self.adapter_thread.late_s < _PATIENCE_S
        if reading.unread and in_time:
            wait(reading.futures, _PATIENCE_S)

    def _is_too_late(self, reading: _Reading) -> bool:
        threads = [self.adapter_thread] if reading.lora is not None else []
        threads += [self.media_thread] if reading.media else []
        late_s = [self.clock() - reading.begun_s, *(thread.late_s for thread in threads)]
        return max(late_s) > self.deadline_s

    def _settle(self, request: Request, reading: _Reading) -> None:
        """Everything has been read, or could not be."""
        if reading.media:
            for feature, future in zip(request.mm_features, reading.media, strict=True):
                if future.exception() is None:
                    self._digests.put(feature.data, future.result())
        error = next(filter(None, (future.exception() for future in reading.futures)), None)
        if error is None and self.media_ids is MediaIds.CONTENT:
            error = self._ambiguous(request.mm_features)
        lora = b""
        if error is None and reading.lora is not None:
            assert request.lora_request is not None
            lora = reading.lora.result()
            error = self._adapters.changed(request.lora_request, lora)
        if error is not None:
            self._give_up(request, str(error))
        else:
            self._readings.pop(request.request_id, None)
            self._found[request.request_id] = RequestIdentity(lora, self._media(request, reading))

    def _media(self, request: Request, reading: _Reading) -> tuple[MediaItem, ...]:
        features = request.mm_features
        if self.media_ids is MediaIds.NAMES:
            return tuple(placed(x, encode(["name", x.identifier])) for x in features)
        return tuple(
            placed(feature, future.result())
            for feature, future in zip(features, reading.media, strict=True)
        )

    def _ambiguous(self, features: Sequence[MultiModalFeatureSpec]) -> IdentityError | None:
        """Note which contents vLLM's names stand for; an error if one stands for several."""
        error = None
        for feature in features:
            digest = self._digests.get(feature.data)
            if digest is None or not self._names.believe(feature.identifier, digest):
                self._names.doubt(feature.identifier)
                error = IdentityError(f"the name {feature.identifier!r} stands for several items")
        return error

    def _give_up(self, request: Request, reason: str) -> None:
        self._readings.pop(request.request_id, None)
        self._found[request.request_id] = Unidentified.NEVER
        if self.media_ids is MediaIds.CONTENT:
            self._ambiguous(request.mm_features)
        if not cacheable(request):
            return
        self.recorder.add("heterocache_unidentified_requests")
        message = f"{_kind(request)} are not cached: {reason}"
        if message not in self._said and len(self._said) < _MOST_REASONS:
            self._said.add(message)
            logger.warning("%s", message)


class _Adapters:
    """Content of each adapter, as long as its id stands for the same content.

    vLLM loads an adapter's files when it first needs them, again after it had to drop the weights,
    and in place of them where a request says so. Once files were seen to differ from those that
    the id stood for first, nobody can say here which of them an engine computes with: requests
    with that id are not cached any more.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, bytes | None] = {}
        """None: it has stood for different content."""

    def knows(self, lora: LoRARequest) -> bool:
        """Return whether its files have been read before."""
        return lora.lora_int_id in self._by_id

    def changed(self, lora: LoRARequest, digest: bytes) -> IdentityError | None:
        """Note that its files have this digest; an error if the id has stood for another one."""
        known = self._by_id.setdefault(lora.lora_int_id, digest)
        if known == digest:
            return None
        self._by_id[lora.lora_int_id] = None
        return IdentityError("its files changed; load them under another name")


def read_adapter(path: str) -> bytes:
    """Digest an adapter's files; of those that did not change since, once."""
    return lora_digest(locate_model(path).path)


def _kind(request: Request) -> str:
    if request.lora_request is None:
        return "requests with multi-modal items"
    return f"requests with adapter {request.lora_request.lora_name!r}"


def cacheable(request: Request) -> bool:
    """Return whether this request's state may be stored and restored at all.

    Pooling reads hidden states of every token, and a streaming session rewrites its own
    past: neither resumes from a prefix.
    """
    return request.pooling_params is None and not request.resumable


def extra_keys(request: Request, identity: RequestIdentity) -> Callable[[int, int], bytes]:
    """Return what besides tokens identifies the state of a range of this request's tokens."""
    salt, embeds = request.cache_salt, request.prompt_embeds
    if identity == PLAIN and not salt and embeds is None:
        return lambda start, end: b""
    overlaps = Overlaps(identity.media)

    def keys(start: int, end: int) -> bytes:
        own: list[object] = [["media", *item] for item in overlaps.within(start, end)]
        if salt and start == 0:
            own.append(["salt", salt])
        if embeds is not None and start < len(embeds):
            tokens = request.prompt_is_token_ids
            mask = None if tokens is None else list(tokens[start:end])
            own.append(["embeds", tensor_digest(embeds[start:end]), mask])
        return encode([identity.lora, own])

    return keys
