"""A step: one request as the scheduler sees it, and its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


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


class StepClass(StrEnum):
    """The kinds of work that are best placed differently."""

    NEW_LONG_PREFIX = "new_long_prefix"
    """Many new tokens that no worker has in memory."""
    INCREMENTAL_TURN = "incremental_turn"
    """Few new tokens, after a known prefix or none."""
    LONG_TOOL_OUTPUT = "long_tool_output"
    """A session continues with the long output of a tool."""
    DECODE_CONTINUATION = "decode_continuation"
    """Nearly all tokens are computed: the session continues to decode."""
    FORKED_ROLLOUT = "forked_rollout"
    """One of several continuations of the same prefix."""
    COLD_RESUME = "cold_resume"
    """A session returns, and most of its state is in no worker's HBM or DRAM."""


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
    from_tool: bool = False
    """True if a tool wrote the new tokens."""
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
    def resident_tokens(self) -> int:
        """The longest prefix in any one worker's HBM or DRAM."""
        longest = 0
        for prefix in self.prefixes.values():
            longest = max(longest, prefix.hbm_tokens, prefix.dram_tokens)
        return longest


@dataclass(frozen=True)
class ClassThresholds:
    """The limits between classes."""

    continuation_tokens: int = 16
    """With at most so many new tokens a session just continues to decode."""
    long_tool_tokens: int = 2_048
    """At least so many new tokens from a tool are a long output. In recorded coding-agent
    sessions half of the turns add fewer than 700 and nine in ten fewer than 4,000."""
    long_prefix_tokens: int = 8_192
    """At least so many new tokens are a long prefix: they fill vLLM's usual step."""
    cold_share: float = 0.5
    """A session is cold when less than this share of what it had computed is in memory."""

    def __post_init__(self) -> None:
        ordered = 0 <= self.continuation_tokens < self.long_tool_tokens <= self.long_prefix_tokens
        if not ordered or not 0.0 <= self.cold_share <= 1.0:
            raise ValueError(
                "needs 0 <= continuation_tokens < long_tool_tokens <= long_prefix_tokens and "
                f"cold_share in [0, 1], got {self}"
            )


def classify(step: Step, thresholds: ClassThresholds) -> StepClass:
    """Return the class of the first rule that holds.

    1. `forked`: `FORKED_ROLLOUT`.
    2. A known session of which too little is in memory: `COLD_RESUME`.
    3. A known session with at most `continuation_tokens` new: `DECODE_CONTINUATION`.
    4. A tool's `long_tool_tokens` or more: `LONG_TOOL_OUTPUT`.
    5. `long_prefix_tokens` or more that no worker has in memory: `NEW_LONG_PREFIX`.
    6. `INCREMENTAL_TURN`.
    """
    if step.forked:
        return StepClass.FORKED_ROLLOUT
    resident, known = step.resident_tokens, step.boundary_tokens
    if known and resident < thresholds.cold_share * known:
        return StepClass.COLD_RESUME
    new_tokens = step.prompt_tokens - max(known, resident)
    if known and new_tokens <= thresholds.continuation_tokens:
        return StepClass.DECODE_CONTINUATION
    if step.from_tool and new_tokens >= thresholds.long_tool_tokens:
        return StepClass.LONG_TOOL_OUTPUT
    if new_tokens >= thresholds.long_prefix_tokens:
        return StepClass.NEW_LONG_PREFIX
    return StepClass.INCREMENTAL_TURN
