"""Cuts: places of a text at which its tokenisation falls apart into that of the two parts.

For a cut c, tokens(text) = tokens(text[:c]) + tokens(text[c:]), whatever the rest of the text is.
So what was tokenised up to a cut stays right when the text grows. Tokens may merge over any other
place. There are two kinds of cuts, and a tokenizer has one of them or none:

- Before a space that follows a visible character, if a pre-tokenizer splits the text into words of
  which only the first characters can be spaces (`_WORDS`): GPT-2, Llama 3, Qwen, gpt-oss, DeepSeek.
  Each word is then encoded alone, and its pattern, which looks back at nothing, finds the same
  words when it begins at the cut. The normaliser must not join characters over a space.
- Before a special token that no other added token can overlap. Added tokens are found before
  anything else is done, and the texts between them are tokenised one by one (Llama 2, Gemma).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SPACE = re.compile(r"[!-~\w] ")
_HAS_SPACE_INSIDE = re.compile(r"\S\s")
_LOOKAHEAD = 1_024
"""Characters after which the search for a cut is given up."""
MAX_SPECIAL = 32

_CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = frozenset(
    {
        *_CONTRACTIONS,
        _ENDING,
        "(?i:[sdmt]|ll|ve|re)",
        "'(?i:[sdmt]|ll|ve|re)",
        r" ?\p{L}+",
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}?",
        r"\p{N}",
        r"\p{N}{1,3}",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    }
)
"""Alternatives of pre-tokenizers' patterns. None matches a space after a visible character, looks
back, or asks for the beginning or the end of the text. Add one only if that holds for it."""
_COVERS_SPACES = r"\s+"
"""With this alternative every space is matched, so no unmatched text lies over a cut."""


class Cuts:
    """Finds cuts of one tokenizer."""

    def __init__(self, pattern: re.Pattern[str] | None, offset: int) -> None:
        """`pattern`: None if there are no cuts. A cut is `offset` characters after its match."""
        self._pattern = pattern
        self._offset = offset

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any], special: Iterable[str] = ()) -> Cuts:
        """Return the cuts of a tokenizer, given as the object in its `tokenizer.json`.

        `special`: texts of tokens that are likely in a prompt.
        """
        added = [dict(token) for token in tokenizer.get("added_tokens") or ()]
        if _splits_at_spaces(tokenizer) and not any(map(_may_cover_a_space, added)):
            return cls(_SPACE, 1)
        usable = [text for text in special if _is_separate(text, added)][:MAX_SPECIAL]
        if not usable:
            return cls(None, 0)
        return cls(re.compile("|".join(map(re.escape, sorted(usable, key=len, reverse=True)))), 0)

    @property
    def exist(self) -> bool:
        """True if a text may have cuts."""
        return self._pattern is not None

    def first(self, text: str, start: int) -> int | None:
        """Return the first cut at or after `start`; None if none is near."""
        if self._pattern is None or start >= len(text):
            return None
        begin = max(0, start - self._offset)
        found = self._pattern.search(text, begin, start + _LOOKAHEAD)
        return None if found is None else found.start() + self._offset

    def last(self, text: str) -> int:
        """Return the last cut near the end of the text; 0 if there is none."""
        if self._pattern is None:
            return 0
        found = list(self._pattern.finditer(text, max(0, len(text) - _LOOKAHEAD)))
        return found[-1].start() + self._offset if found else 0


def _may_cover_a_space(token: Mapping[str, Any]) -> bool:
    """Return whether an added token may lie over a cut before a space, or depend on it."""
    return bool(
        token.get("rstrip")
        or token.get("single_word")
        or _HAS_SPACE_INSIDE.search(token.get("content", ""))
    )


def _is_separate(text: str, added: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `text` is an added token, and no added token can lie over its beginning.

    Tokens that begin with it may be longer, but must not take the spaces before them.
    """
    own = [token for token in added if token["content"].startswith(text)]
    if not any(token["content"] == text for token in own) or _is_word_or_space(text[0]):
        return False
    flags = ("normalized", "lstrip", "single_word")
    if any(token.get(flag) for token in own for flag in flags):
        return False
    return not any(text[0] in token["content"][1:] for token in added)


def _is_word_or_space(char: str) -> bool:
    return char.isalnum() or char.isspace() or char == "_"


def _splits_at_spaces(tokenizer: Mapping[str, Any]) -> bool:
    if not _keeps_spaces(tokenizer.get("normalizer")):
        return False
    stages = _flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    patterns = [_alternatives(stage) for stage in stages]
    if any(found is None for found in patterns):
        return False
    return any(_COVERS_SPACES in found for found in patterns if found)


def _keeps_spaces(normalizer: Mapping[str, Any] | None) -> bool:
    return all(x.get("type") == "NFC" for x in _flat(normalizer, "normalizers"))


def _alternatives(stage: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the alternatives by which a stage splits; None if it may split in other ways."""
    kind = stage.get("type")
    if kind == "ByteLevel":
        return _GPT2 if stage.get("use_regex", True) else frozenset()
    if kind == "Digits":
        return frozenset({r"\p{N}"})
    if kind != "Split" or (stage.get("behavior"), stage.get("invert")) not in _WHOLE_WORDS:
        return None
    pattern = stage.get("pattern", {}).get("Regex")
    found = None if pattern is None else frozenset(top_level(pattern))
    return found if found and found <= _WORDS else None


_GPT2 = frozenset({*_CONTRACTIONS, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+"})
_WHOLE_WORDS = {("Isolated", False), ("Removed", True)}
"""(behavior, invert) by which a match is a word of its own."""


def _flat(stage: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if stage is None:
        return []
    if stage.get("type") == "Sequence":
        return [x for part in stage[inner] for x in _flat(part, inner)]
    return [stage]


def top_level(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression, as they are written."""
    found, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            found.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*found, pattern[start:]]
