"""The fingerprint: everything about a model and its engine that can change stored bytes.

State saved under one fingerprint is never found under another: the digest is in the root of every
chunk key and names the model's SSD directory. Inputs of a request (LoRA, cache salt, multi-modal
inputs, prompt embeddings) go into the chain's extra keys instead (`artifacts.chain`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.model_files import DIGEST_BYTES
from hetero_connector.artifacts.tensor_parallel import whole_model
from hetero_connector.spec.model_spec import ModelSpec

FORMAT_VERSION = 2
"""Version of the stored format: artifact layout, chain hash, fingerprint."""

_IGNORED_CONFIG_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def canonical_config(config: Mapping[str, Any]) -> str:
    """Return a Hugging Face config as JSON with sorted keys, without irrelevant entries.

    At every depth it leaves out the path it was loaded from, its commit (the weights are hashed
    themselves) and the version of transformers that wrote it. A value that JSON lacks, such as a
    torch dtype, is converted by `str`.
    """
    return json.dumps(_canonical(config), sort_keys=True, separators=(",", ":"))


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items()}
        return {key: _canonical(items[key]) for key in items if key not in _IGNORED_CONFIG_KEYS}
    if isinstance(value, (set, frozenset)):
        return sorted((_canonical(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model as one engine runs it. `model_name` alone is not in the digest."""

    architecture: str
    """Model class, e.g. `LlamaForCausalLM`."""
    hf_config: str
    """`canonical_config` of the engine's config: overrides applied, RoPE included."""
    weights: bytes
    """`model_files.weights_digest`."""
    tokenizer: bytes
    """`model_files.tokenizer_digest`."""
    quantization: str | None
    """Weight quantisation method; None for none."""
    kv_cache_dtype: str
    model_dtype: str
    model_spec: ModelSpec
    """Every layer's state type, page bytes, window, ... and the tensor-parallel size."""
    layout: str
    """The engine's name for its KV memory layout, e.g. `NHD`."""
    attention_backend: str
    engine_version: str
    chunk_tokens: int
    extras: tuple[tuple[str, str], ...] = ()
    """Other engine settings that change the bytes, e.g. the digest of a draft model."""
    format_version: int = FORMAT_VERSION
    model_name: str = field(default="", compare=False)
    """For people: path or repo id and revision. Not identity, so a moved model keeps its state."""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over every field except `model_name`."""
        fields = {
            f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.compare
        }
        return hashlib.blake2b(encode(fields), digest_size=DIGEST_BYTES).digest()

    @property
    def hex(self) -> str:
        """The digest as 64 hexadecimal digits."""
        return self.digest.hex()

    def describe(self) -> dict[str, Any]:
        """Return the fingerprint's fields as JSON values, for people and the journal."""
        spec = self.model_spec
        shown = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("model_spec", "hf_config", "weights", "tokenizer", "extras")
        }
        return shown | {
            "fingerprint": self.hex,
            "hf_config": json.loads(self.hf_config),
            "weights": self.weights.hex(),
            "tokenizer": self.tokenizer.hex(),
            "extras": dict(self.extras),
            "model_spec": spec.as_plain(),
            "tp_size": spec.tp_size,
            "alignment": spec.alignment,
            "num_layers": len(spec.layers),
            "state_types": [t.value for t in spec.state_types],
            "bytes_per_token": whole_model(spec).bytes_per_token,
        }


def _plain(value: object) -> object:
    return dataclasses.asdict(value) if isinstance(value, ModelSpec) else value
