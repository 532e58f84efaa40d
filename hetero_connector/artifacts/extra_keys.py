"""The extra keys of a text prompt: its adapter, its cache salt, and what was cleared.

`engine.scheduler.request_identifier` adds those of media items and prompt embeddings.
"""

from __future__ import annotations

from typing import Protocol

from hetero_connector.artifacts.canonical import encode
from hetero_connector.artifacts.chain import ExtraKeys


class ClearCounts(Protocol):
    """The numbers of clearings."""

    def of_salt(self, salt: str) -> int:
        """Return how often everything under a salt was cleared."""
        ...

    def of_model(self, model: str) -> int:
        """Return how often an adapter's state was cleared; "": that of the model without one."""
        ...


def text_keys(
    salt: str | None, clearings: ClearCounts, model: str = "", adapter: bytes = b""
) -> ExtraKeys:
    """Return the extra keys of a request of token ids alone.

    `model`: the adapter's name, as vLLM serves it; "" for none. `adapter`: its digest.
    """

    def keys(start: int, end: int) -> bytes:
        own = [] if start else first_keys(salt, clearings, model)
        return encode([adapter, own]) if own or salt or adapter else b""

    return keys


def first_keys(salt: str | None, clearings: ClearCounts, model: str) -> list[object]:
    """Return what the first chunk's key has of the salt, and of what was cleared."""
    own = list[object]()
    if salt:
        count = clearings.of_salt(salt)
        own.append(["salt", salt, count] if count else ["salt", salt])
    if count := clearings.of_model(model):
        own.append(["cleared", model, count])
    return own
