"""Channels that transfers queue for (a drive, a network adapter), and counts of what is moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ownership.simulator.state.chunks import ShortChunk


@dataclass
class Flow:
    """Numbers of chunks and checkpoints that were moved one way."""

    chunks: int = 0
    """Full chunks."""
    checkpoints: Counter[int] = field(default_factory=Counter)
    """Checkpoints by boundary, in chunks: near the start of a prompt windows are not full."""
    short_chunks: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Short chunks by their first token and the token after their last."""
    short_checkpoints: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Checkpoints at the ends of short chunks."""

    def add(
        self, chunks: int, boundaries: Iterable[int] = (), short: ShortChunk | None = None
    ) -> None:
        """Count chunks, and a checkpoint at each boundary. `short`: the last chunk, if short."""
        if short is not None and chunks:
            self.short_chunks[short.start, short.end] += 1
            chunks -= 1
        self.chunks += chunks
        for boundary in boundaries:
            if short is not None and boundary > short.before:
                self.short_checkpoints[short.start, short.end] += 1
            else:
                self.checkpoints[boundary] += 1

    def since(self, before: Flow) -> Flow:
        """Return what was moved after a copy was made."""
        return Flow(
            self.chunks - before.chunks,
            self.checkpoints - before.checkpoints,
            self.short_chunks - before.short_chunks,
            self.short_checkpoints - before.short_checkpoints,
        )


class Channel:
    """Moves one transfer after the other, in the order in which they start."""

    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self.on_transfer: Callable[[float, float], None] | None = None
        """Called with the begin and the end of every transfer."""

    def start(self, now_s: float, seconds: float) -> float:
        """Start a transfer that takes `seconds` by itself; return when it ends."""
        begin_s = max(now_s, self.busy_until_s)
        self.busy_until_s = begin_s + seconds
        if self.on_transfer is not None:
            self.on_transfer(begin_s, self.busy_until_s)
        return self.busy_until_s

    def pending_s(self, now_s: float) -> float:
        """Return the seconds until all transfers have ended."""
        return max(0.0, self.busy_until_s - now_s)


def transfer_between(source: Channel, target: Channel, now_s: float, seconds: float) -> float:
    """Start a transfer that occupies both channels at once; return when it ends."""
    begin_s = max(now_s, source.busy_until_s, target.busy_until_s)
    source.start(begin_s, seconds)
    return target.start(begin_s, seconds)
