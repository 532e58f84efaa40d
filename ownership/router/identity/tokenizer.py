"""A model's tokenizer in the router's process: the tokens that vLLM makes of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from hetero_connector.artifacts.model_files import locate_model, tokenizer_digest
from hetero_connector.errors import IdentityError
from ownership.router.identity.cuts import Cuts

_OWN_FORMATS = ("gpt_oss",)
"""Types of models whose conversations vLLM renders in code (harmony)."""
_PROBE = "Cut the text, then 12 tokens\n\nmerge: naïve 文本 <x>"


class Encoder(Protocol):
    """A `tokenizers.Tokenizer`."""

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool) -> list[Any]:
        """Return encodings with `ids`. Without the offsets of `encode` it takes a fifth less."""
        ...


class ModelTokenizer:
    """Makes tokens of texts. Thread-safe."""

    def __init__(
        self,
        encoder: Encoder,
        cuts: Cuts,
        digest: bytes = b"",
        templates: Mapping[str, str] | None = None,
        special_texts: Mapping[str, str] | None = None,
    ) -> None:
        """`digest`: `tokenizer_digest` of its files. `templates`: chat templates by name.
        `special_texts`: what templates know as `bos_token` and so on.

        Raises IdentityError if special tokens are not just put before and after a text.
        """
        self.cuts = cuts
        self.digest = digest
        self.templates = dict(templates or {})
        self.special_texts = dict(special_texts or {})
        self._encoder = encoder
        self.before, self.after = self._wrapping()
        """The special tokens around a text that is not a conversation."""

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it.

        Raises ValueError for a text that is not Unicode, such as half of a surrogate pair.
        """
        try:
            return self._encoded(text, add_special_tokens=False)
        except TypeError as error:  # how tokenizers says that it is not UTF-8
            raise ValueError(f"the text is not valid Unicode: {error}") from error

    def template(self, has_tools: bool) -> str | None:
        """Return the chat template for a conversation with or without tools."""
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")

    def _wrapping(self) -> tuple[list[int], list[int]]:
        plain, whole = self.tokens(_PROBE), self._encoded(_PROBE, add_special_tokens=True)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise IdentityError("this tokenizer changes a text's tokens when it adds special ones")

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        [encoding] = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


@lru_cache(maxsize=8)
def open_tokenizer(model: str) -> ModelTokenizer:
    """Return the tokenizer of a model: a directory, or a repository in the local cache.

    Imports transformers. Never goes online. Raises IdentityError if it is not here, or is not one
    of the fast tokenizers.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = locate_model(model).path
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise IdentityError(f"the tokenizer of {model} cannot be opened: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise IdentityError(f"the tokenizer of {model} is a {kind}: the router needs a fast one")
    encoder = tokenizer.backend_tokenizer
    encoder.no_truncation()
    encoder.no_padding()
    templates = {} if _has_own_format(folder) else _templates(tokenizer.chat_template)
    likely = _special_in(templates.values(), tokenizer.all_special_tokens, encoder)
    opened = ModelTokenizer(
        encoder,
        Cuts.of(json.loads(encoder.to_str()), likely),
        tokenizer_digest(Path(folder)),
        templates,
        {name: str(text) for name, text in tokenizer.special_tokens_map.items()},
    )
    if tokenizer.encode(_PROBE, add_special_tokens=False) != opened.tokens(_PROBE):
        raise IdentityError(
            f"the tokenizer of {model} changes texts before it tokenises them: the router's "
            "tokens would differ"
        )
    return opened


def _has_own_format(folder: Path) -> bool:
    """Return whether vLLM renders conversations of this model without its chat template.

    A comparison with `/tokenize` would not show it: that uses the template.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") in _OWN_FORMATS


def _templates(given: object) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): str(text) for name, text in given.items()}
    return {"default": given} if isinstance(given, str) else {}


def _special_in(templates: Sequence[str] | Any, special: Sequence[str], encoder: Any) -> list[str]:
    """Return the added tokens that the templates write, then the other special ones."""
    added = [token.content for token in encoder.get_added_tokens_decoder().values()]
    written = [text for text in added if any(text in template for template in templates)]
    return [*written, *(text for text in special if text not in written)]
