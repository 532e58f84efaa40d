"""The row of one contestant with one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

_RIGHT_SHARE = 0.1
"""An answer is right if it differs by less than this share of what one other early token does."""
_MOST_SPREAD = 2.0
"""A reference whose slowest sample took longer than so many times the fastest was disturbed."""


class Outcome(StrEnum):
    """The answer to a request after a fault."""

    RESTORED = "right, restored"
    COMPUTED = "right, computed"
    ERROR = "error"
    HANG = "hang"
    WRONG = "wrong"
    NOT_RUN = "not run"
    NOTHING_KEPT = "nothing kept"
    """Without the fault the prompt was not restored either, so the fault shows nothing."""
    NO_SUCH = "-"
    """The contestant has nothing that could fail so."""


@dataclass(frozen=True)
class Row:
    """The measurements of one contestant. Times are medians in seconds."""

    contestant: str
    version: str
    model: str
    error: str | None = None
    """The stage that did not run, and why. What is before it was measured."""
    rounds: int = 0
    stages: list[str] = field(default_factory=list)
    """The stages that were asked for, after the rounds."""
    prompt_tokens: int = 0
    useful_bytes: int = 0
    """The fewest bytes from which the prompt can be resumed."""
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    """Largest over smallest sample, by name."""
    prefill_ratio: float | None = None
    """A cold prompt over the same in an engine without a connector."""
    decode_ratio: float | None = None
    agents_ratio: float | None = None
    """Time to first token of sessions whose state has left HBM, over computing it again."""
    stream_ratio: float | None = None
    """Seconds of a stream of prompts that never hit, over the same without a connector."""
    added_s: float | None = None
    """The time that a restore from memory adds to the engine's own prefix hit."""
    added_error_s: float | None = None
    """Half of the 95 % confidence interval of `added_s`."""
    added_over_memcpy: float | None = None
    """The same over a plain copy of the useful bytes, each of the same turn."""
    after_s: dict[str, float | None] = field(default_factory=dict)
    """The same after the engine ended, by how it ended."""
    restored_tokens: dict[str, int] = field(default_factory=dict)
    """Fewest tokens of a prompt that were not computed, as the answer reports them."""
    power: float = 0.0
    """The distance of logprobs that one other early token makes: what the comparison can see."""
    distances: dict[str, float] = field(default_factory=dict)
    """The largest distance of logprobs from the hit of an engine without a connector."""
    stored_bytes: int | None = None
    """For one prompt."""
    start_s: dict[str, float] = field(default_factory=dict)
    extra_processes: int | None = None
    """Beyond those of a server without a connector."""
    extra_memory_bytes: int | None = None
    faults: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def from_plain(cls, document: dict[str, Any]) -> Row:
        """Return the row of which this is `dataclasses.asdict`, read from JSON."""
        faults = {name: Outcome(value) for name, value in document["faults"].items()}
        return cls(**document | {"faults": faults})

    @property
    def tolerance(self) -> float:
        """The distance of logprobs from which an answer is wrong."""
        return _RIGHT_SHARE * self.power

    @property
    def wrong(self) -> tuple[str, ...]:
        """The cases and faults that had a wrong answer."""
        cases = [name for name, far in self.distances.items() if far > self.tolerance]
        return (*cases, *(n for n, outcome in self.faults.items() if outcome is Outcome.WRONG))

    @property
    def has_restored(self) -> bool:
        """True if restores from memory ran, brought state back, and answered right."""
        if self.added_s is None or "memory" in self.wrong:
            return False
        return self.restored_tokens.get("memory", 0) > 0

    @property
    def unanswered(self) -> int:
        """The number of faults that ended in an error or a hang, and one for a row's own error."""
        failed = (Outcome.ERROR, Outcome.HANG)
        return sum(outcome in failed for outcome in self.faults.values()) + (self.error is not None)

    @property
    def has_disturbed_memcpy(self) -> bool:
        return self.spread.get("memcpy", 1.0) > _MOST_SPREAD

    @property
    def memcpy_ratio(self) -> float | None:
        """The added time over a plain copy of the useful bytes; None if the copy was disturbed."""
        return None if self.has_disturbed_memcpy else self.added_over_memcpy

    def over_disk_limit(self, limit: str = "limit") -> float | None:
        """The bandwidth of the restore after a restart, over a limit of `DirectDisk`.

        `limit`: or "verified limit". None if it was not measured, or if nothing was restored.
        """
        if not self.restored_tokens.get("restart"):
            return None
        after, limit_s = self.after_s.get("restart"), self.seconds.get(f"restart {limit}")
        if limit_s is None or after is None or self.added_s is None or after <= self.added_s:
            return None
        return limit_s / (after - self.added_s)
