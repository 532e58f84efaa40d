"""What a cost profile was measured on: its figures hold for no other model or machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProfileSubject:
    """What decides how long steps and loads take, a model's weights apart.

    A tuned model costs what its base model costs; where its files lie does not matter.
    """

    architecture: str
    """Model class, e.g. `LlamaForCausalLM`."""
    config: str
    """Digest of the model's config as the engine runs it."""
    model_dtype: str
    quantization: str
    """"" for none."""
    kv_cache_dtype: str
    tp_size: int
    machine: str
    """The device and how many there are; "" where nothing is said of it."""

    @classmethod
    def of(cls, description: Mapping[str, Any], machine: str = "") -> ProfileSubject:
        """From `Fingerprint.describe`, or what a journal keeps of it. KeyError if it lacks any."""
        config = json.dumps(description["hf_config"], sort_keys=True).encode()
        return cls(
            str(description["architecture"]),
            hashlib.blake2b(config, digest_size=8).hexdigest(),
            str(description["model_dtype"]),
            str(description["quantization"] or ""),
            str(description["kv_cache_dtype"]),
            int(description["tp_size"]),
            machine,
        )

    def differences(self, other: ProfileSubject) -> list[str]:
        """What is not the same here, in `other`, in words; machines only if both are known."""
        mine, theirs = asdict(self), asdict(other)
        if not (self.machine and other.machine):
            del mine["machine"]
        return [
            f"{name} {value!r} there, {theirs[name]!r} here"
            for name, value in mine.items()
            if value != theirs[name]
        ]
