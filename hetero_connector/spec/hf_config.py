"""Typed access to a Hugging Face `config.json`. Errors name the key that is missing or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_connector.errors import UnsupportedModelError

_FLOAT_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_TORCH_NAMES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True)
class Precision:
    """Element type of a page: torch's name for it, and its bytes."""

    dtype: str
    item_bytes: int


def precision(kv_dtype: str, model_dtype: str) -> Precision:
    """Return the element type that vLLM's `--kv-cache-dtype` stores; `auto` is the model's own.

    Raises UnsupportedModelError for formats with scales inside the page.
    """
    name = model_dtype if kv_dtype == "auto" else kv_dtype
    if name in _FLOAT_BYTES:
        return Precision(_TORCH_NAMES.get(name, name), _FLOAT_BYTES[name])
    if name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return Precision("uint8", 1)  # vllm/utils/torch_utils.py: fp8 pages are uint8
    known = ", ".join(["auto", *_FLOAT_BYTES, "fp8"])
    raise UnsupportedModelError(f"no page arithmetic for KV dtype {name!r}; known are {known}")


class HfConfig:
    """The text model's part of a `config.json`, completed by the defaults of its class."""

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.model_type = str(config.get("model_type"))
        self.multimodal = "text_config" in config
        text = config.get("text_config") or config
        self._values = {**(defaults or {}), **{k: v for k, v in text.items() if v is not None}}
        dtype = text.get("dtype") or text.get("torch_dtype")
        dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        self.model_dtype = str(dtype).removeprefix("torch.")

    def has(self, key: str) -> bool:
        """True if the key is present and not null."""
        return key in self._values

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number. Raises UnsupportedModelError."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(f"{key!r} should be a whole number above 0, got {value!r}")
        return value

    def sequence(self, key: str) -> Sequence[Any]:
        """Return a list with an entry for every layer. Raises UnsupportedModelError."""
        value = self._values.get(key)
        layers = self.number("num_hidden_layers")
        if not isinstance(value, (list, tuple)) or len(value) < layers:
            raise self.error(f"{key!r} should be a list of {layers} entries, got {value!r}")
        return value[:layers]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the raw value."""
        return self._values.get(key, default)

    @property
    def head_dim(self) -> int:
        """The configured value, or hidden size divided by heads."""
        if self.has("head_dim"):
            return self.number("head_dim")
        return self.number("hidden_size") // self.number("num_attention_heads")

    def divided(self, key: str, tp_size: int) -> int:
        """Return a number divided evenly over the ranks. Raises UnsupportedModelError."""
        value = self.number(key)
        if value % tp_size:
            raise self.error(f"{key!r} = {value} cannot be divided over {tp_size} ranks")
        return value // tp_size

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """Return the KV heads of one rank. If ranks outnumber them, each rank has one, copied."""
        heads = self.number("num_key_value_heads", self.number("num_attention_heads"))
        if max(heads, tp_size) % min(heads, tp_size):
            raise self.error(f"{heads} KV heads cannot be divided over {tp_size} ranks")
        return max(1, heads // tp_size)

    def kv_parts(self, tp_size: int) -> int:
        """Return the number of different sets of KV heads among the ranks."""
        heads = self.number("num_key_value_heads", self.number("num_attention_heads"))
        return min(heads, tp_size)

    def error(self, problem: str) -> UnsupportedModelError:
        """Make an error that names the model type."""
        return UnsupportedModelError(f"config.json of model_type {self.model_type!r}: {problem}")
