"""Requests are identified by adapter, media, embeddings and salt, and no hook waits for a file."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.ec_transfer import ECTransferConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.config import HeteroConfig
from hetero_connector.connector import HeteroConnector
from hetero_connector.engine.scheduler import request_identifier
from hetero_connector.engine.scheduler.background_thread import BackgroundThread
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.media import MediaIds, content_digest, media_ids
from hetero_connector.engine.scheduler.request_identifier import (
    PLAIN,
    RequestIdentifier,
    RequestIdentity,
    UnidentifiedReason,
    read_adapter,
)
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.metrics import Recorder
from ownership.router.identity import ChainCache, ChainNaming
from tests.clock import Clock
from tests.engine.fakes import FakeRequest
from tests.engine.test_media import item
from tests.waiting import until

HASHER = ChainHasher(b"f" * 32, 256)
TOKENS = [7] * 1100


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def identifier(clock: Clock) -> Iterator[RequestIdentifier]:
    made = RequestIdentifier(
        Recorder(),
        clock=clock,
        adapter_thread=BackgroundThread("adapters", clock),
        media_thread=BackgroundThread("media", clock),
        embeddings_thread=BackgroundThread("embeddings", clock),
    )
    yield made
    made.close()


def found(
    identifier: RequestIdentifier, request: FakeRequest
) -> RequestIdentity | UnidentifiedReason:
    """Identify again and again until there is a result, as vLLM does."""

    def known() -> RequestIdentity | UnidentifiedReason | None:
        answer = identifier.identify(request)
        return None if answer is UnidentifiedReason.PENDING else answer

    return until(known)


def keys(identifier: RequestIdentifier, request: FakeRequest) -> list[str] | None:
    """Return the keys of the request's chunks; None if it is not cached."""
    identity = found(identifier, request)
    if isinstance(identity, UnidentifiedReason):
        return None
    tracker = RequestTracker.of(request, HASHER, identity, Clearings())
    tracker.grow()
    return [chunk.key.hex() for chunk in tracker.chain.chunks()]


def image(
    pixel: float, *, name: str, offset: int = 3, length: int = 256, kind: str = "image"
) -> MultiModalFeatureSpec:
    data = item(pixel_values=torch.full((3, 8, 8), pixel))
    return MultiModalFeatureSpec(data, kind, name, PlaceholderRange(offset, length))


_numbers = iter(range(1_000_000))


def request(*features: MultiModalFeatureSpec, lora: Any = None, **other: Any) -> FakeRequest:
    name = f"r{next(_numbers)}"
    return FakeRequest(name, TOKENS, mm_features=list(features), lora_request=lora, **other)


def adapter(path: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(f"a{number}", number, str(path))


def write_adapter(path: Path, content: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(content)
    (path / "adapter_config.json").write_text("{}")
    return path


@contextmanager
def disk_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let reads of adapters hang. Yields an event that a read sets, and one that ends the reads."""
    answer, begun, read = threading.Event(), threading.Event(), request_identifier.read_adapter

    def hanging(path: str) -> bytes:
        begun.set()
        assert answer.wait(60.0)
        return read(path)

    monkeypatch.setattr(request_identifier, "read_adapter", hanging)
    yield begun, answer
    answer.set()


def test_text_requests_are_identified_at_once(identifier: RequestIdentifier) -> None:
    assert identifier.identify(request()) is PLAIN
    assert (identifier._results, identifier._readings) == ({}, {})
    threads = (identifier.adapter_thread, identifier.media_thread, identifier.embeddings_thread)
    assert [thread._thread for thread in threads] == [None] * 3


def test_two_processes_that_count_images_share_no_key_of_different_images(clock: Clock) -> None:
    """With neither prefix cache nor processor cache vLLM names images by a counter."""
    first = RequestIdentifier(Recorder(), clock=clock)
    second = RequestIdentifier(Recorder(), clock=clock)
    passport = keys(first, request(image(1.0, name="renderer0-mm-1-image-0")))
    kitten = keys(second, request(image(2.0, name="renderer0-mm-1-image-0")))
    again = keys(second, request(image(1.0, name="renderer0-mm-2-image-0")))
    assert passport is not None
    assert kitten is not None
    assert not set(passport) & set(kitten)
    assert again == passport
    first.close()
    second.close()


def test_a_name_that_looks_like_a_hash_is_not_trusted_either(clock: Clock) -> None:
    victims = RequestIdentifier(Recorder(), clock=clock)
    forgers = RequestIdentifier(Recorder(), clock=clock)
    expected = keys(victims, request(image(1.0, name="ab" * 32)))
    forged = keys(forgers, request(image(2.0, name="ab" * 32)))
    assert expected is not None
    assert forged is not None
    assert not set(expected) & set(forged)
    victims.close()
    forgers.close()


def test_a_name_that_stands_for_two_images_is_not_cached_any_more(
    identifier: RequestIdentifier, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's encoder cache looks items up by name, so it may return either's embeddings."""
    running = request(image(1.0, name="mine"))
    assert keys(identifier, running) is not None
    assert not identifier.is_distrusted(running)
    assert keys(identifier, request(image(2.0, name="mine"), image(3.0, name="other"))) is None
    assert identifier.is_distrusted(running)
    assert not identifier.is_distrusted(request(image(3.0, name="other")))
    assert keys(identifier, request(image(1.0, name="mine"))) is None
    assert keys(identifier, request(image(3.0, name="other"))) is not None
    (warning,) = {record.message for record in caplog.records}
    assert "the name 'mine' stands for several items" in warning


def test_an_uncached_request_distrusts_names_without_a_digest(
    identifier: RequestIdentifier,
) -> None:
    assert keys(identifier, request(image(1.0, name="a"), resumable=True)) is None
    assert keys(identifier, request(image(1.0, name="a"))) is None


@pytest.mark.parametrize("data", [None, item(pixel_values=object())])
def test_an_item_whose_content_is_not_here_is_not_cached(
    identifier: RequestIdentifier, data: Any
) -> None:
    feature = MultiModalFeatureSpec(data, "image", "ab" * 32, PlaceholderRange(3, 256))
    assert keys(identifier, request(feature)) is None
    drained = identifier.recorder.drain()
    assert drained is not None
    assert drained["counters"] == {"heterocache_unidentified_requests{}": 1.0}


def test_names_are_trusted_if_the_operator_says_so(clock: Clock) -> None:
    names = RequestIdentifier(Recorder(), MediaIds.NAMES, clock=clock)
    contents = RequestIdentifier(Recorder(), clock=clock)
    feature = MultiModalFeatureSpec(None, "image", "cat", PlaceholderRange(3, 256))
    by_name = keys(names, request(feature))
    assert by_name is not None
    assert by_name == keys(names, request(image(1.0, name="cat")))
    by_content = keys(contents, request(image(1.0, name="cat")))
    assert by_content is not None
    assert not set(by_name) & set(by_content)
    names.close()
    contents.close()


def test_items_without_content_and_trusted_name_are_not_cached(clock: Clock) -> None:
    nothing = RequestIdentifier(Recorder(), MediaIds.NONE, clock=clock)
    assert keys(nothing, request(image(1.0, name="cat"))) is None
    assert keys(nothing, request()) is not None
    nothing.close()


@pytest.mark.parametrize(
    ("outer", "inner"), [((3, 1000), (10, 400)), ((3, 1000), (3, 1000)), ((3, 300), (200, 600))]
)
def test_every_item_that_overlaps_a_chunk_is_in_its_key(
    identifier: RequestIdentifier, outer: tuple[int, int], inner: tuple[int, int]
) -> None:
    """Audio and video of one file share placeholders; vLLM's own keys lack the second item."""

    def of(track: float) -> list[str]:
        made = keys(
            identifier,
            request(
                image(0.5, name="video", offset=outer[0], length=outer[1], kind="video"),
                image(track, name=f"a{track}", offset=inner[0], length=inner[1], kind="audio"),
            ),
        )
        assert made is not None
        return made

    one, two = of(1.0), of(2.0)
    first_other = inner[0] // 256
    assert one[:first_other] == two[:first_other]
    assert not set(one[first_other:]) & set(two[first_other:])


def test_salt_embeddings_and_adapters_enter_the_keys(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    embeds = torch.randn(1100, 8)
    other = embeds.clone()
    other[700, 3] += 1e-6
    mask = [False] * 1100
    variants = [
        request(),
        request(cache_salt="ann"),
        request(cache_salt="bob"),
        request(prompt_embeds=embeds),
        request(prompt_embeds=other),
        request(prompt_embeds=embeds, prompt_is_token_ids=mask),
        request(prompt_embeds=embeds, prompt_is_token_ids=[True, *mask[1:]]),
        request(image(1.0, name="a")),
        request(image(1.0, name="a", offset=4)),
        request(image(1.0, name="a"), cache_salt="ann"),
        request(lora=adapter(write_adapter(tmp_path / "1", b"one"), 1)),
        request(lora=adapter(write_adapter(tmp_path / "2", b"two"), 2)),
    ]
    made = [keys(identifier, x) for x in variants]
    last = [x[-1] for x in made if x is not None]
    assert len(set(last)) == len(variants)
    embedded, flipped = made[3], made[4]
    assert embedded is not None
    assert flipped is not None
    assert embedded[:2] == flipped[:2]  # the other row is in the third chunk
    assert embedded[2] != flipped[2]


@contextmanager
def busy_with_embeddings(identifier: RequestIdentifier) -> Iterator[None]:
    """Let the embeddings of another request be digested all the time."""
    ended = threading.Event()
    identifier.embeddings_thread.submit(lambda: ended.wait(60.0))
    yield
    ended.set()


@pytest.mark.parametrize("with_adapter", [False, True])
def test_embeddings_are_digested_on_a_thread_of_their_own_however_long_that_takes(
    identifier: RequestIdentifier, clock: Clock, tmp_path: Path, with_adapter: bool
) -> None:
    """They may be hundreds of megabytes, which neither vLLM's scheduler nor images wait for."""
    lora = adapter(write_adapter(tmp_path / "a", b"weights")) if with_adapter else None
    asked = request(image(1.0, name="a"), lora=lora, prompt_embeds=torch.randn(1100, 8))
    with busy_with_embeddings(identifier):
        identifier.begin(asked)
        assert identifier.identify(asked) is UnidentifiedReason.PENDING
        assert isinstance(found(identifier, request(image(2.0, name="b"))), RequestIdentity)
        reading = identifier._readings[asked.request_id]
        until(lambda: all(x.done() for x in reading.futures if x is not reading.embeddings))
        clock.now_s = 100.0
        assert identifier.identify(asked) is UnidentifiedReason.PENDING
    assert isinstance(found(identifier, asked), RequestIdentity)


def test_embeddings_of_a_request_that_has_gone_are_not_digested(
    identifier: RequestIdentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, alive = (request(prompt_embeds=torch.randn(1100, 8)) for _ in range(2))
    digested, digest = list[torch.Tensor](), request_identifier.row_digests

    def digest_and_note(embeddings: torch.Tensor) -> bytes:
        digested.append(embeddings)
        return digest(embeddings)

    monkeypatch.setattr(request_identifier, "row_digests", digest_and_note)
    with busy_with_embeddings(identifier):
        identifier.begin(gone)
        identifier.begin(alive)
        identifier.forget(gone.request_id)
    assert isinstance(found(identifier, alive), RequestIdentity)
    assert [x is alive.prompt_embeds for x in digested] == [True]


def test_embeddings_that_cannot_be_digested_are_not_cached(
    identifier: RequestIdentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(embeddings: torch.Tensor) -> bytes:
        raise RuntimeError("not on a CPU")

    monkeypatch.setattr(request_identifier, "row_digests", failing)
    asked = request(prompt_embeds=torch.randn(1100, 8))
    assert found(identifier, asked) is UnidentifiedReason.NEVER


@pytest.mark.parametrize("salt", [None, "ann"])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_text_before_the_first_image_has_the_keys_of_the_text_alone(
    identifier: RequestIdentifier, tmp_path: Path, salt: str | None, with_adapter: bool
) -> None:
    path = write_adapter(tmp_path / "a", b"weights")
    lora = adapter(path) if with_adapter else None
    text = keys(identifier, request(lora=lora, cache_salt=salt))
    with_image = keys(
        identifier, request(image(1.0, name="a", offset=600), lora=lora, cache_salt=salt)
    )
    assert text is not None
    assert with_image is not None
    assert text[:2] == with_image[:2]
    assert text[2] != with_image[2]
    digest = read_adapter(str(path)) if with_adapter else b""
    naming = ChainNaming(HASHER.root, 256, salt, "a1" if with_adapter else "", digest)
    routed = ChainCache(1 << 20).of_tokens(TOKENS, naming)  # as a router names the prompt
    assert [key.hex() for key in routed.keys] == text


def test_an_adapter_is_its_content_not_its_name_or_place(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    one = keys(identifier, request(lora=adapter(write_adapter(tmp_path / "a", b"same"), 1)))
    copy = keys(identifier, request(lora=adapter(write_adapter(tmp_path / "b", b"same"), 2)))
    assert one == copy


def test_a_disk_that_does_not_answer_delays_no_request(
    identifier: RequestIdentifier,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = adapter(write_adapter(tmp_path / "a", b"weights"))
    with disk_that_does_not_answer(monkeypatch) as (begun, answer):
        first = request(lora=lora)
        identifier.begin(first)
        assert begun.wait(60)
        for _ in range(100):
            assert identifier.identify(first) is UnidentifiedReason.PENDING
        clock.now_s = 3.0
        assert identifier.identify(first) is UnidentifiedReason.NEVER
        # While the disk hangs no other request waits for it.
        assert identifier.identify(request(lora=lora)) is UnidentifiedReason.NEVER
        answer.set()
        until(lambda: not identifier.adapter_thread.busy_s)
        assert keys(identifier, request(lora=lora)) is not None


@pytest.mark.parametrize("full", ["media", "embeddings"])
def test_of_a_request_that_finds_a_full_queue_nothing_is_read(
    identifier: RequestIdentifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    lora = adapter(write_adapter(tmp_path / "a", b"weights"))
    items = [image(float(n), name=f"i{n}") for n in range(4)]
    asked = request(*items, lora=lora, prompt_embeds=torch.randn(1100, 8))
    ordered, places = list[Future[bytes]](), {"media": 2 if full == "media" else 4}
    tried: Counter[str] = Counter()

    def thread_of(name: str) -> Any:
        def submit(job: object) -> Future[bytes] | None:
            tried[name] += 1
            if tried[name] > places.get(name, full != name):
                return None
            ordered.append(Future())
            return ordered[-1]

        return SimpleNamespace(submit=submit)

    for name in ("adapter", "media", "embeddings"):
        monkeypatch.setattr(identifier, f"{name}_thread", thread_of(name))
    identifier.begin(asked)
    assert identifier.identify(asked) is UnidentifiedReason.NEVER
    assert len(ordered) == (3 if full == "media" else 5)
    assert all(future.cancelled() for future in ordered)
    assert tried["media"] == (3 if full == "media" else 4), "none after the one that was refused"
    monkeypatch.undo()


def test_an_adapter_whose_files_are_still_to_be_read_is_read_once(
    identifier: RequestIdentifier, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request has waited so long that its files would be checked again."""
    read, ended, real = list[str](), threading.Event(), request_identifier.read_adapter

    def noted(path: str) -> bytes:
        read.append(path)
        return real(path)

    monkeypatch.setattr(request_identifier, "read_adapter", noted)
    asked = request(lora=adapter(write_adapter(tmp_path / "a", b"weights")))
    identifier.adapter_thread.submit(lambda: ended.wait(60.0))
    identifier.begin(asked)
    clock.now_s = 1.0
    assert identifier.identify(asked) is UnidentifiedReason.PENDING
    ended.set()
    assert isinstance(found(identifier, asked), RequestIdentity)
    assert read == [str(tmp_path / "a")]


def test_an_adapters_files_are_checked_once_per_request(
    identifier: RequestIdentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def missing(path: str) -> bytes:
        looked.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(request_identifier, "read_adapter", missing)
    unknown = request(lora=adapter(Path("/nowhere")))
    identifier.begin(unknown)
    for _ in range(50):
        assert found(identifier, unknown) is UnidentifiedReason.NEVER
    assert looked == ["/nowhere"]


def test_an_adapter_that_changes_while_its_request_waits_is_not_cached(
    identifier: RequestIdentifier, clock: Clock, tmp_path: Path
) -> None:
    """vLLM may load the new files for it."""
    lora = adapter(write_adapter(tmp_path / "a", b"weights"))
    assert keys(identifier, request(lora=lora)) is not None
    waiting = request(lora=lora)
    identifier.begin(waiting)
    until(lambda: identifier._readings[waiting.request_id].is_done)
    write_adapter(tmp_path / "a", b"another")
    clock.now_s = 1.0
    assert keys(identifier, waiting) is None


def test_of_a_request_that_has_waited_only_the_adapters_check_is_waited_for(
    identifier: RequestIdentifier,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its deadline begins with the check, not with the request, which waited for its turn."""
    lora = adapter(write_adapter(tmp_path / "a", b"weights"))
    assert keys(identifier, request(lora=lora)) is not None
    asked, waited = request(lora=lora, prompt_embeds=torch.randn(1100, 8)), []
    with busy_with_embeddings(identifier):
        identifier.begin(asked)
        reading = identifier._readings[asked.request_id]
        until(lambda: reading.lora is not None and reading.lora.done())
        until(lambda: identifier.adapter_thread._job_started_s is None)
        monkeypatch.setattr(request_identifier, "wait", lambda those, timeout: waited.append(those))
        clock.now_s = 100.0
        assert identifier.identify(asked) is UnidentifiedReason.PENDING
        assert not waited, "the files may change while the embeddings are digested"
    until(lambda: reading.embeddings is not None and reading.embeddings.done())
    with disk_that_does_not_answer(monkeypatch):
        assert identifier.identify(asked) is UnidentifiedReason.PENDING
        assert waited == [[reading.lora]]
        clock.passes(3.0)
        assert identifier.identify(asked) is UnidentifiedReason.NEVER


def test_what_vllm_has_loaded_counts_and_not_what_its_first_request_finds(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    lora = adapter(write_adapter(tmp_path / "a", b"loaded"))
    identifier.on_adapter_loaded(lora, read_adapter(lora.lora_path))
    write_adapter(tmp_path / "a", b"another")
    assert keys(identifier, request(lora=lora)) is None
    unchanged = adapter(write_adapter(tmp_path / "b", b"loaded"), 2)
    identifier.on_adapter_loaded(unchanged, read_adapter(unchanged.lora_path))
    assert keys(identifier, request(lora=unchanged)) is not None
    unknown = adapter(write_adapter(tmp_path / "c", b"loaded"), 3)
    identifier.on_adapter_loaded(unknown, None)
    assert keys(identifier, request(lora=unknown)) is None


def test_pages_of_a_name_and_path_are_not_those_of_its_later_content(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    """vLLM's prefix cache goes by both, also after the adapter was unloaded and loaded again."""
    path = write_adapter(tmp_path / "a", b"first")
    assert keys(identifier, request(lora=LoRARequest("x", 1, str(path)))) is not None
    write_adapter(path, b"second")
    assert keys(identifier, request(lora=LoRARequest("x", 2, str(path)))) is None
    write_adapter(path, b"first")
    assert keys(identifier, request(lora=LoRARequest("x", 3, str(path)))) is None
    assert keys(identifier, request(lora=LoRARequest("y", 4, str(path)))) is not None


def test_after_a_load_in_place_an_adapter_is_not_cached_under_any_of_its_paths(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    paths = [str(write_adapter(tmp_path / name, name.encode())) for name in ("a", "b")]
    first = request(lora=LoRARequest("x", 1, paths[0]))
    assert keys(identifier, first) is not None
    assert not identifier.is_distrusted(first)
    replaced = LoRARequest("x", 1, paths[1], load_inplace=True)
    identifier.on_adapter_loaded(replaced, read_adapter(paths[1]))
    assert identifier.is_distrusted(first)
    assert keys(identifier, request(lora=LoRARequest("x", 1, paths[0]))) is None
    assert keys(identifier, request(lora=replaced)) is None
    assert keys(identifier, request(lora=LoRARequest("x", 2, paths[0]))) is None, "pages of both"
    assert identifier.adapters == {}


def test_files_that_are_read_in_every_step_identify_nothing(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    path = str(write_adapter(tmp_path / "a", b"first"))
    assert keys(identifier, request(lora=LoRARequest("x", 1, path, load_inplace=True))) is None


def test_files_are_read_on_threads_of_their_own(
    identifier: RequestIdentifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: set[int] = set()

    def spied(read: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def reading(what: Any) -> bytes:
            readers.add(threading.get_ident())
            return read(what)

        return reading

    monkeypatch.setattr(request_identifier, "read_adapter", spied(request_identifier.read_adapter))
    monkeypatch.setattr(request_identifier, "content_digest", spied(content_digest))
    lora = adapter(write_adapter(tmp_path / "a", os.urandom(1000)))
    assert keys(identifier, request(image(1.0, name="a"), lora=lora)) is not None
    assert keys(identifier, request(lora=lora)) is not None
    assert len(readers) == 2
    assert threading.get_ident() not in readers


def test_an_image_that_vllm_cached_is_read_once(
    identifier: RequestIdentifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = image(1.0, name="a")
    expected = keys(identifier, request(feature))
    monkeypatch.setattr(request_identifier, "content_digest", None)
    later = request(feature)
    assert identifier.identify(later) is not UnidentifiedReason.PENDING
    assert keys(identifier, later) == expected


def test_nothing_is_kept_of_requests_that_have_ended(
    identifier: RequestIdentifier, tmp_path: Path
) -> None:
    rng = random.Random(1)
    lora = adapter(write_adapter(tmp_path / "a", b"weights"))
    for number in range(200):
        features = [image(1.0, name="a")] if rng.random() < 0.5 else []
        one = request(*features, lora=lora, resumable=rng.random() < 0.2)
        identifier.begin(one)
        if number % 3:
            found(identifier, one)
        identifier.forget(one.request_id)
    assert (identifier._results, identifier._readings) == ({}, {})


@pytest.mark.parametrize(
    ("trust", "cache_gb", "cache_type", "prefix_cache", "encoders", "expected", "warning"),
    [
        (False, 4, "lru", True, None, MediaIds.CONTENT, ""),
        (False, 0, "lru", False, None, MediaIds.CONTENT, ""),
        (False, 0, "shm", True, None, MediaIds.CONTENT, ""),  # no cache: the items are sent
        (False, 4, "shm", True, None, MediaIds.NONE, "--mm-processor-cache-type shm"),
        (False, 4, "lru", True, "ec_producer", MediaIds.CONTENT, ""),
        (False, 4, "lru", True, "ec_consumer", MediaIds.NONE, "--ec-transfer-config"),
        (False, 4, "lru", True, "ec_both", MediaIds.NONE, "--ec-transfer-config"),
        (True, 4, "lru", True, "ec_consumer", MediaIds.NAMES, ""),
        (True, 4, "shm", True, None, MediaIds.NAMES, ""),
        (True, 0, "lru", True, None, MediaIds.NAMES, ""),
        (True, 0, "lru", False, None, MediaIds.NONE, "--mm-processor-cache-gb 0"),
    ],
)
def test_items_are_identified_according_to_vllms_caches(
    caplog: pytest.LogCaptureFixture,
    trust: bool,
    cache_gb: float,
    cache_type: str,
    prefix_cache: bool,
    encoders: Any,
    expected: MediaIds,
    warning: str,
) -> None:
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb, mm_processor_cache_type=cache_type)
    model = SimpleNamespace(supports_multimodal_inputs=True, get_multimodal_config=lambda: media)
    transfer = encoders and ECTransferConfig(ec_connector="ECExampleConnector", ec_role=encoders)
    vllm_config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_cache),
        ec_transfer_config=transfer,
    )
    config = HeteroConfig(dram_gib=1.0, trust_client_media_ids=trust)
    assert media_ids(config, vllm_config) is expected
    assert bool(caplog.messages) == bool(warning)
    assert all(warning in message for message in caplog.messages)
    model.supports_multimodal_inputs = False
    assert media_ids(config, vllm_config) is MediaIds.CONTENT


def test_an_adapter_is_read_from_the_requests_arrival_on(identifier: RequestIdentifier) -> None:
    """vLLM calls `on_new_request` when a request arrives, and matches it when it could run."""
    connector = object.__new__(HeteroConnector)
    connector._scheduler = SimpleNamespace(identifier=identifier)  # type: ignore[assignment]
    arrived = request(image(1.0, name="a"))
    connector.on_new_request(arrived)
    assert arrived.request_id in identifier._readings
    connector._scheduler = None
    connector.on_new_request(request(image(1.0, name="a")))
