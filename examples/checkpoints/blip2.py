"""A small BLIP-2: vision layers and a Q-Former before the dense model, 32 tokens per image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    BlipImageProcessorPil,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from examples.checkpoints.recipes import RECIPES, Recipe, save_random
from examples.checkpoints.tokenizer import NUM_TOKENS, write_tokenizer

IMAGE_TOKEN = "<image>"
TOKENS_PER_IMAGE = 32
_PIXELS = 112
_LAYERS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}

_TEXT = RECIPES["dense"]
_GAINS = _TEXT.gains | {r"vision_model|qformer": 1.5, r"language_projection": 2.0}


def write_blip2(directory: Path) -> None:
    """Write config, weights and image processor into `directory`."""
    config = Blip2Config(
        text_config=LlamaConfig(**_TEXT.config, architectures=["LlamaForCausalLM"]).to_dict(),
        vision_config=Blip2VisionConfig(
            **_LAYERS, num_attention_heads=2, image_size=_PIXELS, patch_size=14
        ).to_dict(),
        qformer_config=Blip2QFormerConfig(
            **_LAYERS, num_attention_heads=2, encoder_hidden_size=64, vocab_size=NUM_TOKENS
        ).to_dict(),
        num_query_tokens=TOKENS_PER_IMAGE,
        image_token_index=NUM_TOKENS,
    )
    recipe = Recipe("blip-2", _TEXT.config, gains=_GAINS)
    save_random(Blip2ForConditionalGeneration(config), recipe, directory)
    write_tokenizer(directory, [IMAGE_TOKEN])
    Blip2Processor(
        image_processor=BlipImageProcessorPil(size={"height": _PIXELS, "width": _PIXELS}),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(directory),
        num_query_tokens=TOKENS_PER_IMAGE,
    ).save_pretrained(directory)
