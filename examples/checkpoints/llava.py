"""A small LLaVA: a CLIP of two layers in front of the dense model, 64 tokens an image."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from examples.checkpoints.recipes import RECIPES, Recipe, save_random
from examples.checkpoints.tokenizer import NUM_TOKENS, write_tokenizer

IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = NUM_TOKENS
TOKENS_PER_IMAGE = 64
_PATCH, _PIXELS = 14, 112

_TEXT = RECIPES["dense"]
_GAINS = _TEXT.gains | {r"vision_tower": 1.5, r"multi_modal_projector": 2.5}


def write_llava(directory: Path) -> None:
    """Write config, weights and image processor into `directory`."""
    config = LlavaConfig(
        text_config=LlamaConfig(**_TEXT.config),
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=_PIXELS,
            patch_size=_PATCH,
            projection_dim=64,
        ),
        image_token_index=IMAGE_TOKEN_ID,
    )
    recipe = Recipe("llava", _TEXT.config, gains=_GAINS)
    save_random(LlavaForConditionalGeneration(config), recipe, directory)
    write_tokenizer(directory, [IMAGE_TOKEN])
    size = {"height": _PIXELS, "width": _PIXELS}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(directory),
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
