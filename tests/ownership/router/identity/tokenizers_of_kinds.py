"""Small trained tokenizers with the pipelines of real ones: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from ownership.router.identity.cuts import Cuts
from ownership.router.identity.tokenizer import ModelTokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{%- endfor %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def _split(*patterns: str) -> Any:
    stages: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*stages, byte_level])


PIPELINES: Mapping[str, tuple[Any, Any]] = {
    "gpt2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2_prefix": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": (None, _split(LLAMA_3)),
    "qwen": (normalizers.NFC(), _split(QWEN)),
    "gpt_oss": (None, _split(GPT_OSS)),
    "deepseek": (None, _split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK)),
    "llama2": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
    ),
    "metaspace_first": (None, pre_tokenizers.Metaspace("▁", "first")),
    "gemma": (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "nfkc": (normalizers.NFKC(), _split(LLAMA_3)),
    "unknown_pattern": (None, _split(r"\w+ \w+|\s+|\S")),
}
"""A normaliser and a pre-tokenizer of each kind."""
AT_SPACES = {"gpt2", "gpt2_prefix", "llama3", "qwen", "gpt_oss", "deepseek"}
"""Kinds that may be cut at spaces; the others before special tokens."""


@cache
def trained(kind: str, *, rstrip: bool = False) -> Tokenizer:
    """Return a tokenizer of this kind, trained on this repository's own texts.

    `rstrip`: its special tokens take the spaces after them.
    """
    normalizer, pre_tokenizer = PIPELINES[kind]
    tokenizer = Tokenizer(BPE(byte_fallback=kind in ("llama2", "gemma"), unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=1_200, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    root = Path(__file__).parents[4]
    texts = [(root / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    tokenizer.train_from_iterator(
        [*texts, "a b  c\n\n\n  x, y\t\t  z  1 234 5678  if  (x) : "], trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True, rstrip=rstrip) for text in SPECIAL]
    )
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    return Cuts.of(json.loads(tokenizer.to_str()), SPECIAL)


@cache
def model_tokenizer(kind: str) -> ModelTokenizer:
    tokenizer = trained(kind)
    return ModelTokenizer(tokenizer, cuts_of(tokenizer), templates={"default": TEMPLATE})
