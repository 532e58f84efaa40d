"""The naming of chains that an engine publishes (`GET /v1/heterocache/chain`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from hetero_connector.session_ids import model_digest, tenant_of
from hetero_connector.spec.model_spec import ModelSpec
from ownership.router.identity import ChainNaming, Prompt

FORMAT = 1


@dataclass(frozen=True)
class PublishedChain:
    """The naming of one engine's chains. A value."""

    worker: str
    """Its name in the fleet's directory; "" if it is in none."""
    root: bytes
    chunk_tokens: int
    is_shared: bool
    """False while it shares no state with other engines."""
    model: ModelSpec
    tokenizer: bytes
    """The digest of its tokenizer's files."""
    clearings: Mapping[str, int]
    """By the digest of a salt or a model, in hexadecimal."""
    adapters: Mapping[str, bytes]
    """Digests of the adapters that requests have used, by name."""
    base_models: frozenset[str]
    """The names of the model without an adapter."""
    instance: str = ""
    """Another one after a restart."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> PublishedChain:
        """Return what an engine's answer says. Raises ValueError for any other document."""
        try:
            if answer["format"] != FORMAT:
                raise ValueError(f"format {answer['format']!r} instead of {FORMAT}")
            engine = answer["engine"]
            return cls(
                str(engine.get("worker", "")),
                bytes.fromhex(answer["root"]),
                int(answer["chunk_tokens"]),
                bool(answer["is_shared"]),
                _model(msgspec.json.encode(answer["model_spec"])),
                bytes.fromhex(engine["tokenizer"]),
                dict(answer["clearings"]),
                {name: bytes.fromhex(digest) for name, digest in answer["adapters"].items()},
                frozenset({str(engine["model"]), str(engine.get("served_as", engine["model"]))}),
                f"{engine.get('engine')} {engine.get('pid')}",
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an engine's answer about its chains: {error!r}") from error

    def naming(self, prompt: Prompt) -> ChainNaming | None:
        """Return how this engine names the prompt's chain; None if its adapter is unknown."""
        name, adapter = "", b""
        if prompt.model is not None and prompt.model not in self.base_models:
            name, adapter = prompt.model, self.adapters.get(prompt.model, b"")
            if not adapter:
                return None
        salt = prompt.salt
        return ChainNaming(
            self.root,
            self.chunk_tokens,
            salt,
            name,
            adapter,
            self.clearings.get(tenant_of(salt).hex(), 0) if salt else 0,
            self.clearings.get(model_digest(name).hex(), 0),
        )


@lru_cache(maxsize=32)
def _model(told: bytes) -> ModelSpec:
    """Return the model. All its workers tell the same, again and again."""
    return ModelSpec.from_plain(msgspec.json.decode(told))
