import hashlib
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.chain import ChainHasher, RequestChain, no_extra_keys
from hetero_connector.artifacts.generation import FIRST
from hetero_connector.artifacts.record import ROOT, ChunkKey

FINGERPRINT = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain_of(tokens: list[int], size: int = 4, fingerprint: bytes = FINGERPRINT) -> RequestChain:
    chain = RequestChain(ChainHasher(fingerprint, size))
    chain.extend(tokens)
    return chain


def keys(tokens: list[int], size: int = 4, fingerprint: bytes = FINGERPRINT) -> list[bytes]:
    return [c.key for c in chain_of(tokens, size, fingerprint).chunks()]


class CountingHasher(ChainHasher):
    hashed = 0

    def key(self, parent: ChunkKey, token_ids: list[int], extra: bytes) -> ChunkKey:
        self.hashed += 1
        return super().key(parent, token_ids, extra)


def test_key_is_the_documented_hash() -> None:
    root = encode(["heterocache chain root", FINGERPRINT, 2, FIRST.tag, b""])
    parent = hashlib.blake2b(root, digest_size=16).digest()
    content = parent + struct.pack("<Q", 3) + b"xyz" + struct.pack("<2I", 7, 2**32 - 1)
    expected = hashlib.blake2b(content, digest_size=16).digest()
    assert ChainHasher(FINGERPRINT, 2).key(ROOT, [7, 2**32 - 1], b"xyz") == expected


def test_ranges_and_parents_form_a_chain() -> None:
    chunks = list(chain_of(list(range(11))).chunks())
    assert [(c.start, c.end) for c in chunks] == [(0, 4), (4, 8)]
    assert chunks[0].parent == ROOT
    assert chunks[1].parent == chunks[0].key
    assert all(len(c.key) == 16 for c in chunks)


@given(TOKENS, st.lists(st.integers(0, 40), max_size=5))
def test_growing_in_any_steps_gives_the_same_chain(tokens: list[int], cuts: list[int]) -> None:
    chain = chain_of([])
    edges = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    for start, end in itertools.pairwise(edges):
        chain.extend(tokens[start:end])
        list(chain.chunks())
    assert [c.key for c in chain.chunks()] == keys(tokens)


@given(TOKENS, TOKENS)
def test_two_prompts_share_keys_exactly_as_far_as_they_share_tokens(
    a: list[int], b: list[int]
) -> None:
    for size in (1, 3):
        pairs = zip(keys(a, size), keys(b, size), strict=False)
        for index, (key_a, key_b) in enumerate(pairs, start=1):
            assert (key_a == key_b) == (a[: index * size] == b[: index * size])


@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40))
def test_models_have_disjoint_keys(one: bytes, other: bytes) -> None:
    tokens = list(range(12))
    assert set(keys(tokens, fingerprint=one)).isdisjoint(keys(tokens, fingerprint=other)) == (
        one != other
    )


def test_chunk_sizes_have_disjoint_keys_even_over_the_same_tokens() -> None:
    two, four = chain_of([1, 2, 3, 4], 2), chain_of([1, 2, 3, 4], 4)
    assert two.ending_at(2).key != four.tail(2).key


def test_extra_keys_change_their_chunk_and_all_after() -> None:
    asked: list[tuple[int, int]] = []

    def extra(start: int, end: int) -> bytes:
        asked.append((start, end))
        return b"lora" if start == 4 else b""

    chain = RequestChain(ChainHasher(FINGERPRINT, 4), extra)
    chain.extend(range(12))
    with_extra = [c.key for c in chain.chunks()]
    list(chain.chunks())
    assert asked == [(0, 4), (4, 8), (8, 12)]
    plain = keys(list(range(12)))
    assert [a == b for a, b in zip(with_extra, plain, strict=True)] == [True, False, False]


def test_extra_keys_cannot_be_mistaken_for_tokens() -> None:
    hasher = ChainHasher(FINGERPRINT, 2)
    assert hasher.key(ROOT, [0x01020304], b"\x01") != hasher.key(ROOT, [], b"\x01\x04\x03\x02\x01")
    token = struct.pack("<I", 5)
    assert hasher.key(ROOT, [5], b"") != hasher.key(ROOT, [], token)


def test_hashing_is_lazy_and_never_repeated() -> None:
    hasher = CountingHasher(FINGERPRINT, 4)
    chain = RequestChain(hasher)
    chain.extend(range(4000))
    assert hasher.hashed == 0
    walk = chain.chunks()
    next(walk)
    assert hasher.hashed == 1
    assert len(list(chain.chunks(limit_tokens=43))) == 10
    assert hasher.hashed == 10
    list(chain.chunks())
    list(chain.chunks())
    assert hasher.hashed == 1000


@given(TOKENS.filter(bool), st.data())
def test_the_parent_of_a_tail_is_the_last_full_chunk(
    tokens: list[int], data: st.DataObject
) -> None:
    chain = chain_of(tokens)
    end = data.draw(st.integers(1, len(tokens)))
    chunk = chain.ending_at(end)
    start = (end - 1) // 4 * 4
    assert (chunk.start, chunk.end) == (start, end)
    assert chunk.parent == (chain.ending_at(start).key if start else ROOT)
    assert chunk.key == chain_of(tokens[:end]).ending_at(end).key
    if end % 4:
        assert chunk == chain.tail(end)
        assert chunk.key not in keys(tokens)


def test_tails_of_other_lengths_or_tokens_differ() -> None:
    chain = chain_of([1, 2, 3, 4, 5, 6, 7])
    other = chain_of([1, 2, 3, 4, 5, 9])
    found = {chain.tail(5).key, chain.tail(6).key, chain.tail(7).key, other.tail(6).key}
    assert len(found) == 4
    assert chain.tail(5) == other.tail(5)


@pytest.mark.parametrize("end", [0, -1, 4, 8, 10, 100])
def test_no_tail_at_a_boundary_or_beyond_the_tokens(end: int) -> None:
    with pytest.raises(ValueError, match=str(end)):
        chain_of(list(range(9))).tail(end)


@pytest.mark.parametrize("end", [0, -4, 12, 10])
def test_no_chunk_ends_beyond_the_tokens(end: int) -> None:
    with pytest.raises(ValueError, match=str(end)):
        chain_of(list(range(9))).ending_at(end)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, None, 1.5])
def test_a_placeholder_is_refused_and_earlier_chunks_stay_valid(bad: int) -> None:
    chain = chain_of([1, 2, 3, 4, 5, bad, 7, 8])
    assert [c.key for c in chain.chunks(limit_tokens=4)] == keys([1, 2, 3, 4])
    with pytest.raises(ValueError, match="token ids"):
        list(chain.chunks())
    with pytest.raises(ValueError, match="token ids"):
        chain.tail(6)


def test_a_hasher_without_identity_or_size_is_refused() -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        ChainHasher(b"", 4)
    with pytest.raises(ValueError, match="chunk_tokens"):
        ChainHasher(FINGERPRINT, 0)
    assert no_extra_keys(0, 4) == b""
