"""A byte-level tokenizer without a download: tokens 0 to 255 are bytes, 256 ends the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN_ID = 256
NUM_TOKENS = 257
"""Byte tokens and the end of text. Models have larger, padded vocabularies."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(directory: Path, special: Sequence[str] = ()) -> None:
    """Write the tokenizer, with a plain chat template, into `directory`.

    `special` tokens have the ids after the end of text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary["<eos>"] = EOS_TOKEN_ID
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": list(special)})
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(directory)
