"""What bytes queue for: a drive, a network adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ownership.simulator.state.short_chunks import ShortChunk


@dataclass
class Flow:
    """Chunks and checkpoints that went one way."""

    chunks: int = 0
    checkpoints: Counter[int] = field(default_factory=Counter)
    """By boundary, in chunks: near the start of a prompt windows are not full."""

    short: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Short chunks, by where they begin and end, in tokens; `chunks` are full ones."""
    short_checkpoints: Counter[tuple[int, int]] = field(default_factory=Counter)
    """At their ends."""

    @property
    def slots(self) -> int:
        """Chunks, short ones among them."""
        return self.chunks + self.short.total()

    @property
    def boundaries(self) -> int:
        """Checkpoints at any of them."""
        return self.checkpoints.total() + self.short_checkpoints.total()

    def add(
        self, chunks: int, boundaries: Iterable[int] = (), short: ShortChunk | None = None
    ) -> None:
        """So many more chunks, and a checkpoint at each of the boundaries. `short`: the last."""
        if short is not None and chunks:
            self.short[short.start, short.end] += 1
            chunks -= 1
        self.chunks += chunks
        for boundary in boundaries:
            if short is not None and boundary > short.before:
                self.short_checkpoints[short.start, short.end] += 1
            else:
                self.checkpoints[boundary] += 1


class Channel:
    """Moves one transfer after the other, in the order they were started."""

    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self.busy_s = 0.0
        """Of all that was started, as is `moved_bytes`."""
        self.moved_bytes = 0

    def start(self, now_s: float, seconds: float, size_bytes: int) -> float:
        """When a transfer ends that would take `seconds` by itself."""
        self.busy_until_s = max(now_s, self.busy_until_s) + seconds
        self.busy_s += seconds
        self.moved_bytes += size_bytes
        return self.busy_until_s

    def cut(self, until_s: float) -> None:
        """What would go on for longer does not."""
        self.busy_until_s = min(self.busy_until_s, until_s)

    def pending_s(self, now_s: float) -> float:
        """Until what was started so far has ended."""
        return max(0.0, self.busy_until_s - now_s)


def start_between(
    source: Channel, target: Channel, now_s: float, seconds: float, size_bytes: int
) -> float:
    """A transfer that occupies both its ends; when it ends."""
    begin_s = max(now_s, source.busy_until_s, target.busy_until_s)
    source.start(begin_s, seconds, size_bytes)
    return target.start(begin_s, seconds, size_bytes)
