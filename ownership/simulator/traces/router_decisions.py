"""The log of a router's decisions as a trace: `decisions: FILE` in the router's configuration.

A line comes when its request has ended, so the log is read as a whole, and sorted. Its prompts are
runs of chunks that each process of the router has numbered for itself.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from ownership.decisions.records import DecisionRecord
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.decision_file import DecisionFile
from ownership.simulator.traces.prefix_tree import PrefixTree
from ownership.simulator.traces.session import Request, Session, Trace

FORMAT = "router-decisions"
_CAVEATS = (
    "Answers have as many tokens as events were recorded; those that were no stream have as many "
    "as the router expected.",
    "Requests without a session are sessions of their own. A request that was sent again after a "
    "worker was lost counts once.",
    "Prefixes that requests of different router processes share are not recorded.",
    "Prompts whose chunks the router did not know share only what their session had computed.",
)
_BLOCK_TOKENS = 16
"""The size of blocks if no prompt's chunks are known."""


def read(path: Path) -> Trace:
    """Read a log. Raises TraceError if it cannot be read, or has no decision."""
    block_tokens = 0
    for decided in DecisionFile(path):
        block_tokens = decided.record.chunk_tokens
        if block_tokens:
            break
    size = block_tokens or _BLOCK_TOKENS
    return Trace(str(path), FORMAT, size, partial(_sessions, path, size), caveats=_CAVEATS)


@dataclass(slots=True)
class _Sent:
    """The part of a decision that a replay needs."""

    time_s: float
    total_s: float
    prompt_tokens: int
    boundary_tokens: int
    output_tokens: int
    blocks: BlockRuns | None
    """None if the prompt's chunks are not known."""


@dataclass(slots=True)
class _Numbers:
    """Numbers that no other process, and no other prompt, has."""

    size: int
    _processes: dict[str, int] = field(default_factory=dict)
    _unknown: Iterator[int] = field(default_factory=lambda: count(1 << 61, 1 << 24))

    def blocks(self, record: DecisionRecord) -> BlockRuns | None:
        """Return the recorded chunks of a prompt, if there are as many as it must have."""
        runs = record.chunks
        if record.chunk_tokens != self.size:
            return None
        if sum(length for _, length in runs) != record.prompt_tokens // self.size:
            return None
        first = self._processes.setdefault(record.process, len(self._processes)) << 40
        return BlockRuns.of_runs((first + at, length) for at, length in runs)

    def continued(self, before: BlockRuns, shared_tokens: int, prompt_tokens: int) -> BlockRuns:
        """Return a prompt that begins with so much of another one."""
        head = before.head(shared_tokens // self.size)
        rest = prompt_tokens // self.size - head.num_blocks
        return BlockRuns.of_runs([*head.runs, (next(self._unknown), rest)])


def _sessions(path: Path, size: int) -> Iterator[Session]:
    """Yield the sessions by their starts."""
    numbers, sessions, unnamed = _Numbers(size), dict[str, list[_Sent]](), set[str]()
    for number, decided in enumerate(DecisionFile(path)):
        record = decided.record
        if record.failed:
            continue
        tokens = record.expected_output_tokens if record.events is None else record.events
        sent = _Sent(
            record.time,
            record.total_s,
            record.prompt_tokens,
            record.boundary_tokens,
            max(1, round(tokens)),
            numbers.blocks(record),
        )
        name = record.session or f"request {number}"
        if not record.session:
            unnamed.add(name)
        sessions.setdefault(name, []).append(sent)
    for listed in sessions.values():
        listed.sort(key=lambda sent: sent.time_s)
    starts = sorted(sessions, key=lambda name: sessions[name][0].time_s)
    tree = PrefixTree(0)
    begin_s = sessions[starts[0]][0].time_s if starts else 0.0
    for name in starts:
        first_s = sessions[name][0].time_s
        requests = tuple(_requests(sessions.pop(name), numbers, tree))
        yield Session(name, requests, first_s - begin_s, is_named=name not in unnamed)


def _requests(sent: list[_Sent], numbers: _Numbers, tree: PrefixTree) -> Iterator[Request]:
    """Yield a session's requests. Each waits for the last answer that it can have read."""
    before, ends = BlockRuns(), list[tuple[float, int]]()
    for index, one in enumerate(sent):
        blocks = one.blocks
        if blocks is None:
            blocks = numbers.continued(before, one.boundary_tokens, one.prompt_tokens)
        before = blocks
        at = bisect_right(ends, one.time_s, key=lambda end: end[0])
        end_s, parent = ends[at - 1] if at else (None, None)
        insort(ends, (one.time_s + one.total_s, index))
        yield Request(
            one.time_s - sent[0].time_s,
            one.prompt_tokens,
            one.output_tokens,
            tree.add(blocks).names,
            parent,
            None if end_s is None else one.time_s - end_s,
        )
