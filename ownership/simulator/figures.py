"""The figures of a simulation, and the sums they are computed from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.pairing import BlockSums
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(frozen=True)
class Figures:
    """The figures of one simulation. The same inputs and seed give the same figures, bit by bit."""

    requests: int
    refused: int
    sessions: int
    """Sessions whose requests were all answered. Figures of tasks are of these alone."""
    span_s: float
    """Virtual time from the first arrival to the last answer, or that of the window."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    task_mean_s: float
    """A task is a whole session, from its first arrival to its last answer."""
    task_p50_s: float
    task_p95_s: float
    task_wait_mean_s: float
    """The part of a task's time that the fleet took: what is more than if answers came at once."""
    task_wait_p95_s: float
    task_slowdown_mean: float
    """A task's waiting over that on an idle engine which has what the session computed before."""
    task_slowdown_p99: float
    step_p50_s: float
    """A step is one request of a session, from its arrival to its last token."""
    step_p95_s: float
    step_p99_s: float
    token_mean_s: float
    """Between two tokens of an answer; percentiles to 1 %."""
    token_p50_s: float
    token_p99_s: float
    attained_share: float
    """Share of requests that met both `Objectives`; those that were refused did not."""
    goodput_per_s: float
    """Requests that met both, per second."""
    length_unfairness: float
    """The slowdown of steps, in the quarter of prompts by length where it is greatest, over that
    where it is least; means of each quarter."""
    hbm_gib_per_session: float
    """Pages of a request on one rank, mean over the time it holds them."""
    most_live_sessions: int
    """Sessions in progress at once, including those that think or run tools."""
    prompt_tokens: int
    matched_tokens: int
    """Leading tokens that some tier had where the request ran, usable or not."""
    saved_tokens: int
    """Prompt tokens that were not computed."""
    hbm_hit_tokens: int
    dram_hit_tokens: int
    ssd_hit_tokens: int
    peer_hit_tokens: int
    duplicate_factor: float
    """Chunks in the memory of all workers over distinct ones; mean over samples."""
    network_bytes: int
    ssd_read_bytes: int
    ssd_written_bytes: int
    sealed_bytes: int
    owner_hit_rate: float
    """Share of turns that were prefilled at the session's owner, among turns that had one."""
    moved_sessions: int
    """Turns that changed the owner of their session."""
    decode_late_share: float
    """Share of the decodes' time that prefills in the same steps added."""
    busy_share: float
    """Share of the workers' time in which their engines computed."""
    queue_mean_s: float
    restore_network_mean_s: float
    """Exposed seconds of a restore from peers, mean over all requests. Then from SSD, and from DRAM
    to pages."""
    restore_ssd_mean_s: float
    restore_exposed_mean_s: float
    preemptions: int


@dataclass(frozen=True)
class Objectives:
    """The most seconds to a request's first token, and on average to each of the others."""

    ttft_s: float = 2.0
    token_s: float = 0.05


@dataclass(frozen=True)
class Overhead:
    """The time that decisions took on the machine that simulates; different each time."""

    decisions: int
    decision_p50_us: float


@dataclass(frozen=True)
class SimulationResult:
    """The figures of a simulation, with everything they depend on."""

    policy: str
    workers: int
    model: str
    trace: str
    caveats: tuple[str, ...]
    seed: int
    parameters: Mapping[str, float | str]
    figures: Figures
    state_bytes: Mapping[str, Mapping[str, int]]
    """Bytes by flow (`written`, `staged`, `fetched`, `loaded`, `sealed`), then by state type."""
    blocks: BlockSums
    """Sums over blocks of sessions, to compare policies on the same ones."""
    overhead: Overhead

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def _column() -> array[float]:
    return array("d")


@dataclass
class Tally:
    """Sums over requests, and 8 bytes for each figure of a request."""

    objectives: Objectives = field(default_factory=Objectives)
    ttft_s: array[float] = field(default_factory=_column)
    step_s: array[float] = field(default_factory=_column)
    task_s: array[float] = field(default_factory=_column)
    task_wait_s: array[float] = field(default_factory=_column)
    task_slowdown: array[float] = field(default_factory=_column)
    step_slowdown: array[float] = field(default_factory=_column)
    step_tokens: array[float] = field(default_factory=_column)
    """Prompt tokens of each step."""
    attained: array[float] = field(default_factory=_column)
    """1 for each step that met the objectives, else 0."""
    step_sessions: array[float] = field(default_factory=_column)
    """The number of each step's session; then of each task's."""
    task_sessions: array[float] = field(default_factory=_column)
    decision_s: array[float] = field(default_factory=_column)
    duplicates: array[float] = field(default_factory=_column)
    refused: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    hits: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    """Tokens by tier, in the order of the fields of `Hits`."""
    waits_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Seconds in queues, for peers, for SSDs."""
    owned_turns: int = 0
    owner_hits: int = 0
    moved_sessions: int = 0

    def on_answered(self, request: LiveRequest, now_s: float) -> None:
        """Add a request that has its answer."""
        ttft_s, step_s = request.first_token_s - request.arrived_s, now_s - request.arrived_s
        self.ttft_s.append(ttft_s)
        self.step_s.append(step_s)
        self.step_sessions.append(request.session)
        self.step_tokens.append(request.prompt_tokens)
        self.step_slowdown.append(_slowdown(step_s, request.alone_s))
        allowed_s = self.objectives.token_s * (request.output_tokens - 1)
        is_late = ttft_s > self.objectives.ttft_s or step_s - ttft_s > allowed_s
        self.attained.append(not is_late)
        self.prompt_tokens += request.prompt_tokens
        self.matched_tokens += request.matched_tokens
        hits = request.hits
        for at, tokens in enumerate((hits.hbm, hits.dram, hits.ssd, hits.peer)):
            self.hits[at] += tokens
        for at, wait_s in enumerate((request.waited_s, request.network_s, request.staged_s)):
            self.waits_s[at] += wait_s

    def on_task_ended(self, session: int, task_s: float, instant_s: float, alone_s: float) -> None:
        """Add a session. `instant_s`: its seconds if answers came at once; `alone_s`: the seconds
        that they take on an idle engine."""
        wait_s = max(0.0, task_s - instant_s)
        self.task_s.append(task_s)
        self.task_wait_s.append(wait_s)
        self.task_slowdown.append(_slowdown(wait_s, alone_s))
        self.task_sessions.append(session)

    def blocks(self) -> BlockSums:
        """Return the sums over blocks of sessions."""
        of_tasks, of_steps = (self.task_wait_s, self.task_slowdown), (self.ttft_s, self.attained)
        return BlockSums.of(self.task_sessions, of_tasks, self.step_sessions, of_steps)

    def length_unfairness(self) -> float:
        """Return the greatest over the least slowdown of the quarters of steps by prompt length."""
        if len(self.step_slowdown) < 4:
            return 1.0
        order = np.argsort(np.frombuffer(self.step_tokens), kind="stable")
        quarters = np.array_split(np.frombuffer(self.step_slowdown)[order], 4)
        means = [float(quarter.mean()) for quarter in quarters]
        return _slowdown(max(means), min(means))


def _slowdown(seconds: float, alone_s: float) -> float:
    return seconds / alone_s if alone_s > 0.0 else 1.0


class ChunkSet:
    """A set of chunks as runs of ids, 16 bytes each; counted when asked."""

    def __init__(self) -> None:
        self._firsts, self._counts = array("q"), array("q")

    def add(self, chain: BlockRuns) -> None:
        """Add the chunks of a prompt."""
        for first, count in chain.runs:
            self._firsts.append(first)
            self._counts.append(count)

    @classmethod
    def of(cls, tiers: Iterable[ResidentChunks]) -> ChunkSet:
        """Return the chunks in tiers."""
        chunks = cls()
        for tier in tiers:
            for run in tier.runs():
                chunks._firsts.append(run.first)
                chunks._counts.append(run.count)
        return chunks

    def total(self) -> int:
        """Count each chunk as often as it was added."""
        return sum(self._counts)

    def distinct(self) -> int:
        """Count each chunk once. O(n log n) in the number of runs."""
        if not self._firsts:
            return 0
        firsts = np.frombuffer(self._firsts, np.int64)
        ends = firsts + np.frombuffer(self._counts, np.int64)
        order = np.argsort(firsts, kind="stable")
        firsts, ends = firsts[order], ends[order]
        reached = np.maximum.accumulate(np.concatenate([firsts[:1], ends[:-1]]))
        return int(np.maximum(ends - np.maximum(firsts, reached), 0).sum())

    def duplicate_factor(self) -> float:
        """Return how often a distinct chunk was added on average; 1 if none was."""
        return self.total() / self.distinct() if self._firsts else 1.0


def percentile(values: array[float], q: float) -> float:
    """Return the least value that `q` percent do not exceed; 0 if there is none."""
    return float(np.percentile(values, q, method="inverted_cdf")) if values else 0.0


def mean(values: array[float]) -> float:
    """Return the mean; 0 if there is no value."""
    return float(np.mean(values)) if values else 0.0
