"""A step: one request as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_CONTINUATION_TOKENS = 16
"""With at most so many new tokens a session just continues to decode."""
_COLD_SHARE = 0.5
"""It does not where less than this share of what it had computed is in memory."""


class WorkerPrefix(NamedTuple):
    """The part of a prompt that one worker could resume from, in tokens from its start.

    Each is a boundary for which the worker has all state: prefix-proportional state up to it, and
    boundary state at it.
    """

    hbm_tokens: int = 0
    """In the engine's own pages. Resuming there costs nothing."""
    dram_tokens: int = 0
    """Sealed in its DRAM. Other workers can read as much."""
    ssd_tokens: int = 0
    """In its DRAM or on its SSD."""

    @property
    def local_tokens(self) -> int:
        """The longest of the three."""
        return max(self)


@dataclass(frozen=True, slots=True)
class Step:
    """One request and the facts known about it."""

    prompt_tokens: int
    prefixes: Mapping[str, WorkerPrefix] = field(default_factory=dict)
    """The part of the prompt each worker could resume from, by name. Workers with nothing may be
    left out."""
    session_id: str = ""
    """"" if it belongs to no session."""
    owner: str | None = None
    """The worker at which the session decodes; None if it has not begun or its worker has ended."""
    boundary_tokens: int = 0
    """Tokens of the prompt that were computed at the end of the session's last turn; 0 in the
    first turn."""
    output_tokens: float = 0.0
    """Expected number of decoded tokens. 0 leaves decoding out of the price."""
    forked: bool = False
    """True if other requests continue the same prefix."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"a step has at least one token, got {self.prompt_tokens}")
        if not 0 <= self.boundary_tokens <= self.prompt_tokens:
            raise ValueError(
                f"boundary_tokens lies within the prompt's {self.prompt_tokens} tokens, got "
                f"{self.boundary_tokens}"
            )
        if not self.output_tokens >= 0.0:
            raise ValueError(f"output_tokens is at least 0, got {self.output_tokens}")

    @property
    def is_continuation(self) -> bool:
        """Return True if nearly all tokens are computed, by the owner, which has most of them in
        memory: the session decodes on.

        What is known of a prefix ends with a full chunk, so the owner may have more.
        """
        known = self.boundary_tokens
        if self.forked or not known or self.owner is None:
            return False
        held = self.prefixes.get(self.owner, WorkerPrefix())
        resident = max(held.hbm_tokens, held.dram_tokens)
        is_cold = resident < _COLD_SHARE * known
        return not is_cold and self.prompt_tokens - max(known, resident) <= _CONTINUATION_TOKENS
