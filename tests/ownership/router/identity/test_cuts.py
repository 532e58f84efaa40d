"""At a cut a tokenisation falls apart, with every kind of tokenizer and whatever the text is."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from ownership.router.identity.cuts import Cuts, top_level
from tests.ownership.router.identity.tokenizers_of_kinds import (
    AT_SPACES,
    GPT_OSS,
    PIPELINES,
    SPECIAL,
    cuts_of,
    trained,
)

STRINGS = [*SPECIAL, "<|im_", "start|>", " ", "  ", "\n", "\r\n", "\t", "\u3000", "\xa0", "\u0308"]
STRINGS += [
    "if",
    "the",
    "'s",
    "'Ve",
    "x",
    "X",
    "1",
    "23",
    "456",
    "²",
    ".",
    "//",
    "_",
    "-",
    "é",
    "文",
]
STRINGS += ["ま", "\U0001f600", "\u200d", "\x1c", "\x85", "\u2028", "क्ष"]
PIECES = st.one_of(st.sampled_from(STRINGS), st.text(max_size=4))
TEXTS = st.lists(PIECES, max_size=40).map("".join)


def all_cuts(cuts: Cuts, text: str) -> list[int]:
    found, at = [], 0
    while (cut := cuts.first(text, at)) is not None:
        found.append(cut)
        at = cut + 1
    return found


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", PIPELINES)
@given(text=TEXTS)
def test_tokens_of_a_text_are_those_of_its_parts(kind: str, text: str) -> None:
    tokenizer = trained(kind)
    cuts = all_cuts(cuts_of(tokenizer), text)
    whole = encode(tokenizer, text)
    for cut in cuts:
        assert encode(tokenizer, text[:cut]) + encode(tokenizer, text[cut:]) == whole
    edges = [0, *cuts, len(text)]
    parts = [encode(tokenizer, text[a:b]) for a, b in pairwise(edges)]
    assert [token for part in parts for token in part] == whole


@pytest.mark.parametrize("kind", PIPELINES)
def test_each_kind_has_the_cuts_that_are_expected(kind: str) -> None:
    text = "one two<|im_end|>\n<|im_start|>user"
    found = [text[cut:][:2] for cut in all_cuts(cuts_of(trained(kind)), text)]
    assert found == ([" t"] if kind in AT_SPACES else ["<|", "<|"])


def test_tokens_do_merge_elsewhere() -> None:
    tokenizer = trained("llama3")
    text = "the store"
    merged = [
        at
        for at in range(len(text))
        if encode(tokenizer, text[:at]) + encode(tokenizer, text[at:]) != encode(tokenizer, text)
    ]
    assert merged
    assert text.index(" ") not in merged


def test_a_special_token_that_takes_spaces_after_it_leaves_no_cuts_at_spaces() -> None:
    tokenizer = trained("qwen", rstrip=True)
    text = "a <|im_start|> b"
    found = [text[cut:] for cut in all_cuts(cuts_of(tokenizer), text)]
    assert found == ["<|im_start|> b"]
    cut = text.index("<")
    assert encode(tokenizer, text[:cut]) + encode(tokenizer, text[cut:]) == encode(tokenizer, text)


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("ab c", normalized=False),
        AddedToken("x<|im", normalized=False),
        AddedToken("<|im_start|>user", normalized=False, lstrip=True),
        AddedToken("<|im_start|>", normalized=False, single_word=True, special=True),
    ],
)
def test_added_tokens_that_could_lie_over_a_cut_forbid_it(token: AddedToken) -> None:
    for kind in ("qwen", "gemma"):
        tokenizer = Tokenizer.from_str(trained(kind).to_str())
        tokenizer.add_tokens([token])
        cuts = Cuts.of(json.loads(tokenizer.to_str()), ["<|im_start|>"])
        for text in ("ab c", "y x<|im_start|>", "y  <|im_start|>user", "a<|im_start|>b"):
            whole = encode(tokenizer, text)
            for cut in all_cuts(cuts, text):
                assert encode(tokenizer, text[:cut]) + encode(tokenizer, text[cut:]) == whole


def test_a_pattern_falls_into_its_alternatives() -> None:
    assert top_level(r"a|(b|c)|[|]\||d") == ["a", "(b|c)", r"[|]\|", "d"]
    assert len(top_level(GPT_OSS)) == 7
