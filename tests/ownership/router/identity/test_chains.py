"""Chains of texts equal those that an engine makes of all their tokens, however they grew."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.extra_keys import text_keys
from ownership.router.identity import ChainCache, ChainNaming, ModelTokenizer, NamedPart
from tests.ownership.router.identity.tokenizers_of_kinds import model_tokenizer, trained

ROOT = ChainHasher(b"model", 16).root
PLAIN = ChainNaming(ROOT, 16)


def engine_keys(kind: str, text: str, naming: ChainNaming, *, is_wrapped: bool) -> list[bytes]:
    """Return the keys as an engine makes them, from the whole text."""
    tokens = trained(kind).encode(text, add_special_tokens=is_wrapped).ids
    extra = text_keys(naming.salt, naming, naming.adapter_name, naming.adapter)
    chain = RequestChain(naming.hasher, extra)
    chain.extend(tokens)
    return [chunk.key for chunk in chain.chunks()]


def words(rng: random.Random, count: int) -> str:
    made = [
        rng.choice(string.ascii_letters) * rng.randint(1, 9) + rng.choice([" ", " ", "\n", ", "])
        for _ in range(count)
    ]
    return "".join(made)


def turn(rng: random.Random, count: int) -> str:
    return f"<|im_start|>{rng.choice(['user', 'assistant'])}\n{words(rng, count)}<|im_end|>\n"


@pytest.mark.parametrize("kind", ["llama3", "qwen", "gemma", "unknown_pattern"])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 32), is_wrapped=st.booleans())
def test_growing_forked_and_edited_texts_have_the_engines_keys(
    kind: str, seed: int, is_wrapped: bool
) -> None:
    rng = random.Random(seed)
    cache = ChainCache(rng.choice([1 << 12, 1 << 16, 1 << 24]))
    texts = [turn(rng, 600)]
    for _ in range(12):
        text = rng.choice(texts)
        if rng.random() < 0.3:
            at = rng.randrange(len(text))
            text = text[:at] + words(rng, 3) + text[at + rng.choice([0, 10, 3000]) :]
        text += turn(rng, rng.choice([1, 20, 500]))
        texts.append(text)
        naming = rng.choice(
            [PLAIN, ChainNaming(ROOT, 16, "salt", "a", b"adapter", rng.choice([0, 2]))]
        )
        chain = cache.of_text(model_tokenizer(kind), text, naming, is_wrapped=is_wrapped)
        assert list(chain.keys) == engine_keys(kind, text, naming, is_wrapped=is_wrapped)
        expected = trained(kind).encode(text, add_special_tokens=is_wrapped).ids
        assert chain.num_tokens == len(expected)
        assert cache.size_bytes <= 1 << 24


@pytest.mark.parametrize("kind", ["llama3", "gemma"])
def test_a_turn_costs_its_own_tokens(kind: str) -> None:
    rng, cache, tokenizer = random.Random(1), ChainCache(), model_tokenizer(kind)
    text = "".join(turn(rng, 200) for _ in range(100))
    first = cache.of_text(tokenizer, text, PLAIN, is_wrapped=False)
    assert first.tokenized == first.num_tokens
    for _ in range(5):
        text += turn(rng, 100)
        chain = cache.of_text(tokenizer, text, PLAIN, is_wrapped=False)
        new = len(tokenizer.tokens(text[-1_000:]))
        assert chain.tokenized < 5 * new < chain.num_tokens / 5


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_text_that_is_not_named_in_time_goes_on_where_it_ended(*, is_wrapped: bool) -> None:
    rng, tokenizer, parts = random.Random(7), model_tokenizer("llama3"), list[NamedPart]()
    text = turn(rng, 3_000)
    whole = ChainCache().of_text(tokenizer, text, PLAIN, is_wrapped=is_wrapped)
    cache, calls, chain = ChainCache(seed=7, on_named=parts.append), 0, None
    while chain is None:
        calls += 1
        assert calls < 100, "a call goes on where the last one ended"
        with suppress(TimeoutError):
            chain = cache.of_text(tokenizer, text, PLAIN, is_wrapped=is_wrapped, until_s=0.0)
    assert chain.keys == whole.keys
    assert 4 < calls == len(parts) + 1
    assert chain.tokenized < whole.tokenized / 4


class TellingCaches:
    """Caches of one seed that tell each other what they name, over a wire that loses parts."""

    def __init__(self, rng: random.Random, count: int, lost: float, sizes: Sequence[int]) -> None:
        self._rng, self._lost = rng, lost
        self.caches = [
            ChainCache(rng.choice(sizes), seed=7, on_named=partial(self._tell, own))
            for own in range(count)
        ]

    def _tell(self, own: int, part: NamedPart) -> None:
        message = msgspec.msgpack.encode(part)
        for at, cache in enumerate(self.caches):
            if at != own and self._rng.random() >= self._lost:
                cache.take_in(msgspec.msgpack.decode(message, type=NamedPart))


@pytest.mark.parametrize("kind", ["llama3", "gemma"])
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 32), lost=st.sampled_from([0.0, 0.3]))
def test_what_other_caches_have_named_is_right(kind: str, seed: int, lost: float) -> None:
    rng = random.Random(seed)
    told = TellingCaches(rng, 3, lost, [1 << 14, 1 << 16, 1 << 24])
    texts = [turn(rng, 600)]
    for _ in range(16):
        text = rng.choice(texts[-3:])
        if rng.random() < 0.2:
            at = rng.randrange(len(text))
            text = text[:at] + words(rng, 3) + text[at:]
        text += turn(rng, rng.choice([20, 500, 3_000]))
        texts.append(text)
        naming = rng.choice([PLAIN, PLAIN, ChainNaming(ROOT, 16, "salt")])
        cache = rng.choice(told.caches)
        chain = cache.of_text(model_tokenizer(kind), text, naming, is_wrapped=False)
        assert list(chain.keys) == engine_keys(kind, text, naming, is_wrapped=False)
        assert cache.size_bytes <= 1 << 24


@pytest.mark.parametrize("kind", ["llama3", "gemma"])
def test_a_turn_costs_its_own_tokens_at_any_of_the_caches(kind: str) -> None:
    rng, tokenizer = random.Random(4), model_tokenizer(kind)
    told = TellingCaches(rng, 4, 0.0, [1 << 24])
    text = "".join(turn(rng, 200) for _ in range(100))
    told.caches[0].of_text(tokenizer, text, PLAIN, is_wrapped=False)
    for number in range(12):
        text += turn(rng, 100)
        cache = told.caches[number % 4]
        chain = cache.of_text(tokenizer, text, PLAIN, is_wrapped=False)
        assert chain.tokenized < chain.num_tokens / 20
    sizes = [cache.size_bytes for cache in told.caches]
    assert max(sizes) < 1.1 * min(sizes)


def test_a_part_after_a_lost_one_is_not_taken_in() -> None:
    parts: list[NamedPart] = []
    rng, tokenizer = random.Random(5), model_tokenizer("llama3")
    one, other = ChainCache(seed=7, on_named=parts.append), ChainCache(seed=7)
    text = turn(rng, 40_000)
    named = one.of_text(tokenizer, text, PLAIN, is_wrapped=False)
    first, second, *later = parts
    assert later
    other.take_in(second)
    assert other.size_bytes == 0
    for part in (first, first, second, *later):
        other.take_in(part)
    found = other.of_text(tokenizer, text, PLAIN, is_wrapped=False)
    assert found.keys == named.keys
    assert found.tokenized < named.tokenized / 20


def test_a_text_is_not_known_under_another_tokenizer() -> None:
    rng, ours = random.Random(6), model_tokenizer("llama3")
    theirs = copy(ours)
    theirs.digest = b"another"
    text, one = turn(rng, 3_000), ChainCache(seed=7)
    one.of_text(ours, text, PLAIN, is_wrapped=False)
    found = one.of_text(theirs, text, PLAIN, is_wrapped=False)
    assert found.tokenized == found.num_tokens


def test_a_text_is_known_to_all_sessions_but_not_under_another_naming() -> None:
    rng, cache, tokenizer = random.Random(2), ChainCache(), model_tokenizer("llama3")
    shared = turn(rng, 3000)

    def tokenized(text: str, naming: ChainNaming, *, is_wrapped: bool = False) -> bool:
        chain = cache.of_text(tokenizer, text, naming, is_wrapped=is_wrapped)
        return chain.tokenized > chain.num_tokens / 2

    assert tokenized(shared + "one", PLAIN)
    assert not tokenized(shared + "two", PLAIN)
    assert tokenized(shared + "two", ChainNaming(ROOT, 16, salt="s"))
    assert not tokenized(shared + "two", ChainNaming(ROOT, 16, salt="s"))
    assert tokenized(shared, ChainNaming(ROOT, 16, salt="s", salt_clearings=1))
    assert tokenized(shared, ChainNaming(ROOT, 16, adapter=b"a"))
    assert tokenized(shared, ChainNaming(ROOT, 32))
    assert tokenized(shared, ChainNaming(ROOT[::-1], 16))
    assert tokenized(shared, PLAIN, is_wrapped=True)


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    rng, cache, tokenizer = random.Random(3), ChainCache(300_000), model_tokenizer("llama3")
    kept = turn(rng, 2000)
    cache.of_text(tokenizer, kept, PLAIN, is_wrapped=False)
    for _ in range(40):
        cache.of_text(tokenizer, turn(rng, 2000), PLAIN, is_wrapped=False)
        assert cache.size_bytes <= 300_000
        chain = cache.of_text(tokenizer, kept, PLAIN, is_wrapped=False)
        assert chain.tokenized < chain.num_tokens / 2
    assert len(cache._lineages) > 2
    known = {name for lineage in cache._lineages.values() for name in lineage.marks}
    assert len(cache._index) <= len(known)
    for lineage in list(cache._lineages.values()):
        assert all(cache._index[mark.digest][0] is lineage for mark in lineage.marks)


def test_token_ids_are_named_as_they_are() -> None:
    tokens = list(range(100))
    chain = RequestChain(ChainHasher(b"model", 16))
    chain.extend(tokens)
    named = ChainCache().of_tokens(tokens, PLAIN)
    assert list(named.keys) == [chunk.key for chunk in chain.chunks()]
    assert list(named.ends) == [16, 32, 48, 64, 80, 96]
    with pytest.raises(ValueError, match="token ids"):
        ChainCache().of_tokens([1, -1], PLAIN)
    with pytest.raises(ValueError, match="token ids"):
        ChainCache().of_tokens([1, "x"], PLAIN)  # type: ignore[list-item]


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(ValueError, match="Unicode"):
        ChainCache().of_text(model_tokenizer("llama3"), "a \ud800" * 4000, PLAIN, is_wrapped=False)


def test_the_identity_of_a_naming_depends_on_all_of_it() -> None:
    namings = [
        PLAIN,
        ChainNaming(ROOT, 16, salt="s"),
        ChainNaming(ROOT, 16, salt="s", salt_clearings=1),
        ChainNaming(ROOT, 16, adapter=b"s"),
        ChainNaming(ROOT, 16, model_clearings=1),
        ChainNaming(ROOT, 16, adapter_name="a", adapter=b"s", model_clearings=1),
        ChainNaming(ROOT, 32),
    ]
    assert len({naming.identity for naming in namings}) == len(namings)
    assert PLAIN.extras == (b"", b"")
    assert namings[1].extras == (encode([b"", [["salt", "s"]]]), encode([b"", []]))


def test_special_tokens_around_a_text_are_found() -> None:
    tokenizer = model_tokenizer("llama3")
    assert isinstance(tokenizer, ModelTokenizer)
    assert tokenizer.before == [trained("llama3").token_to_id("<s>")]
    assert tokenizer.after == []
