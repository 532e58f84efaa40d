"""On a real engine an image restores exactly its own state, whatever its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from hetero_connector.engine.scheduler import request_identifier
from hetero_connector.engine.scheduler.request_identifier import RequestIdentity
from tests.engine.harness import (
    Completion,
    assert_no_leaks,
    delta,
    engine,
    forget,
    forget_local,
    generate,
    metric,
    prompt_tokens,
)

pytestmark = pytest.mark.engine

EXACT, VISIBLE = 1e-4, 0.05
PROMPT = prompt_tokens(650)
BOUNDARY = 672  # whole pages of 32 tokens, of 682
WHOLE_CHUNKS = 512


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((160, 120))


CAT, DOG = picture(1), picture(2)


def answer(llm: Any, image: Image.Image, uuid: str | None = None) -> Completion:
    """The image's tokens come before the prompt's."""
    prompt: dict[str, Any] = {
        "prompt_token_ids": PROMPT,
        "multi_modal_data": {"image": image},
    }
    if uuid is not None:
        prompt["multi_modal_uuids"] = {"image": [uuid]}
    return generate(llm, prompt, max_tokens=4)


def fresh(llm: Any) -> None:
    """Drop vLLM's pages and processed images, as a restart does; the store stays."""
    forget_local(llm)
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    arguments: dict[str, Any] = {"skip_tokenizer_init": False, "disable_log_stats": False}
    with engine("blip2", {"dram_gib": 0.1}, **arguments) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    if "llm" not in request.fixturenames:
        yield
        return
    llm = request.getfixturevalue("llm")
    forget(llm)
    yield
    assert_no_leaks(llm)


def test_power_an_image_left_out_of_the_key_is_seen(llm: Any) -> None:
    cat, dog = answer(llm, CAT), answer(llm, DOG)
    assert delta(cat, dog) > VISIBLE
    forget(llm)
    with patch.object(request_identifier, "RequestIdentity", lambda *_: RequestIdentity()):
        answer(llm, CAT)
        forget_local(llm)
        mixed = answer(llm, DOG)
    assert mixed.num_cached_tokens == BOUNDARY
    assert delta(mixed, dog) > VISIBLE


def test_an_image_restores_only_its_own_state(llm: Any) -> None:
    cat = answer(llm, CAT)
    fresh(llm)
    dog = answer(llm, DOG)
    assert dog.num_cached_tokens == 0
    for image, expected in ((CAT, cat), (DOG, dog)):
        fresh(llm)
        restored = answer(llm, image)
        assert restored.num_cached_tokens == BOUNDARY
        assert delta(restored, expected) <= EXACT


def test_a_client_s_name_brings_neither_another_image_nor_a_miss(llm: Any) -> None:
    cat = answer(llm, CAT, uuid="mine")
    fresh(llm)
    renamed = answer(llm, CAT, uuid="yours")
    assert renamed.num_cached_tokens == BOUNDARY
    assert delta(renamed, cat) <= EXACT
    fresh(llm)
    dog = answer(llm, DOG)
    fresh(llm)
    before = metric("heterocache_unidentified_requests_total")
    forged = answer(llm, DOG, uuid="mine")  # a name that has been a cat's
    assert forged.num_cached_tokens == 0
    assert delta(forged, dog) <= EXACT
    assert metric("heterocache_unidentified_requests_total") == before + 1


@pytest.mark.slow
def test_images_that_vllm_only_counts_are_told_apart_across_restarts(tmp_path: Path) -> None:
    """Without prefix and processor cache the first image after each start has the same name."""
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path), "ssd_gib": 0.5}
    arguments: dict[str, Any] = {
        "enable_prefix_caching": False, "mm_processor_cache_gb": 0, "skip_tokenizer_init": False,
    }  # fmt: skip
    with engine("blip2", extra, **arguments) as llm:
        cat = answer(llm, CAT)
        assert cat.num_cached_tokens == 0
    with engine("blip2", extra, **arguments) as llm:
        dog = answer(llm, DOG)
        assert dog.num_cached_tokens == 0
        assert delta(cat, dog) > VISIBLE
        restored = answer(llm, CAT)
        assert restored.num_cached_tokens == WHOLE_CHUNKS
        assert delta(restored, cat) <= EXACT


@pytest.mark.slow
def test_trusted_names_do_not_help_if_vllm_only_counts(tmp_path: Path) -> None:
    extra = {"dram_gib": 0.1, "trust_client_media_ids": True}
    with engine(
        "blip2",
        extra,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        skip_tokenizer_init=False,
    ) as llm:
        assert [answer(llm, CAT).num_cached_tokens for _ in range(2)] == [0, 0]
