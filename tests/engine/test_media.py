"""Multi-modal items are identified by their content, wherever and however they overlap."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from hetero_connector.engine.scheduler.media import (
    DigestCache,
    MediaItem,
    Overlaps,
    TrustedNames,
    content_digest,
    media_item,
    tensor_digest,
)
from hetero_connector.errors import IdentityError


def item(**data: object) -> MultiModalKwargsItem:
    elements = {
        name: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
        for name, value in data.items()
    }
    return MultiModalKwargsItem(elements)


def test_an_item_is_all_of_its_tensors() -> None:
    pixels = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    flipped = pixels.clone()
    flipped[1, 2, 3] += 1e-3
    variants = [
        item(pixels=pixels, grid=torch.tensor([1, 2])),
        item(pixels=flipped, grid=torch.tensor([1, 2])),
        item(pixels=pixels, grid=torch.tensor([2, 1])),
        item(pixels=pixels, grid=[torch.tensor([1]), torch.tensor([2])]),
        item(pixels=pixels, other=torch.tensor([1, 2])),
        item(pixels=pixels.reshape(3, 2, 4), grid=torch.tensor([1, 2])),
        item(pixels=pixels.double(), grid=torch.tensor([1, 2])),
        item(pixels=pixels.bfloat16(), grid=torch.tensor([1, 2])),
        item(pixels=pixels, grid=torch.tensor([1, 2]), seconds=0.5),
        item(pixels=pixels, grid=torch.tensor([1, 2]), seconds=None),
    ]
    assert len({content_digest(x) for x in variants}) == len(variants)
    strided = pixels.transpose(0, 2).contiguous().transpose(0, 2)
    assert not strided.is_contiguous()
    again = content_digest(item(grid=torch.tensor([1, 2]), pixels=strided))
    assert again == content_digest(variants[0])


@pytest.mark.parametrize("unknown", [None, item(pixels=object()), item(pixels={"a": 1})])
def test_an_item_whose_content_is_not_here_has_no_digest(
    unknown: MultiModalKwargsItem | None,
) -> None:
    with pytest.raises(IdentityError):
        content_digest(unknown)


def test_an_items_place_and_mask_are_part_of_its_identity() -> None:
    def at(offset: int, length: int, mask: list[bool] | None = None, kind: str = "image") -> bytes:
        where = PlaceholderRange(offset, length, None if mask is None else torch.tensor(mask))
        feature = MultiModalFeatureSpec(None, kind, "name", where)
        found = media_item(feature, b"content")
        assert (found.start, found.end) == (offset, offset + length)
        return found.digest

    assert at(3, 4) == at(50, 4)  # the chunk's key has the offset
    different = [
        at(3, 4), at(3, 5), at(3, 4, [True] * 4), at(3, 4, [True, False, True, True]),
        at(3, 4, kind="video"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_all_items_that_overlap_a_range_are_found() -> None:
    """The result equals that of a plain walk over all items."""
    rng = random.Random(7)
    for _ in range(300):
        items = [
            MediaItem(start, start + rng.randrange(0, 40), bytes([number]))
            for number in range(rng.randrange(0, 8))
            for start in [rng.randrange(0, 60)]
        ]
        overlaps = Overlaps(items)
        for start in range(0, 100, 7):
            end = start + rng.randrange(1, 20)
            expected = sorted(
                (x.start - start, x.end, x.digest) for x in items if x.start < end and x.end > start
            )
            assert overlaps.within(start, end) == [(o, d) for o, _, d in expected]


def test_a_name_is_trusted_while_it_stands_for_one_content() -> None:
    names = TrustedNames(capacity=3)
    assert all(names.trust(name, b"1") for name in ("a", "b", "a"))
    assert not names.trust("a", b"2")
    assert not names.trust("a", b"1")  # vLLM may still have either's embeddings
    names.distrust("b")
    assert not names.trust("b", b"1")
    for number in range(10):
        assert names.trust(str(number), b"1")
    assert len(names._contents) == 3


def test_a_name_that_was_dropped_is_distrusted() -> None:
    """vLLM may still have state under it, and then it has the item that it stood for before."""
    names = TrustedNames(capacity=3)
    assert not names.any_distrusted
    for number in range(10):
        assert names.trust(str(number), b"1")
    assert names.any_distrusted
    assert [names.is_distrusted(str(number)) for number in range(10)] == [True] * 7 + [False] * 3
    assert not names.trust("0", b"1")
    assert sum(names.trust(f"new {number}", b"1") for number in range(1000)) > 990


def test_a_digest_is_remembered_for_the_object_and_no_longer() -> None:
    digests = DigestCache()
    data = item(pixels=torch.zeros(3))
    assert digests.get(data) is None
    digests.put(data, b"digest")
    assert digests.get(data) == b"digest"
    assert digests.get(item(pixels=torch.zeros(3))) is None
    del data
    gc.collect()
    assert digests._digests == {}


def test_empty_and_scalar_tensors_have_digests() -> None:
    tensors = [torch.empty(0), torch.empty(0, 3), torch.tensor(0.0), torch.tensor([0.0])]
    assert len({tensor_digest(x) for x in tensors}) == 4
