"""What came of a simulation."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ownership.simulator.machine.request import LiveRequest


@dataclass(frozen=True)
class Figures:
    """The figures of one simulation. The same inputs and seed give the same figures, bit by bit."""

    requests: int
    refused: int
    sessions: int
    span_s: float
    """Virtual time from the first arrival to the last answer."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    task_mean_s: float
    """Of whole sessions: from the first request's arrival to the last answer."""
    task_p50_s: float
    task_p95_s: float
    task_wait_mean_s: float
    """Of that, what the fleet took: the rest would pass if answers came at once."""
    task_wait_p95_s: float
    step_p50_s: float
    """Of requests, the steps of a session: from arrival to the last token."""
    step_p95_s: float
    step_p99_s: float
    token_mean_s: float
    """Between two tokens of an answer."""
    hbm_gib_per_session: float
    """Pages of a request while it holds them, mean over that time, on one rank."""
    resent: int
    """Requests that began again because their worker died."""
    most_live_sessions: int
    """Under way at the same time, those that think or run tools among them."""
    most_running: int
    """Requests with pages at one worker at the same time."""
    sessions_in_hbm: float
    """How many requests' pages, of the mean size, fit the fleet's HBM."""
    prompt_tokens: int
    matched_tokens: int
    """Leading tokens that were in some tier where the request ran, usable or not."""
    saved_tokens: int
    """Prompt tokens that were not computed."""
    hbm_hit_tokens: int
    dram_hit_tokens: int
    ssd_hit_tokens: int
    peer_hit_tokens: int
    duplicate_factor: float
    """Chunks held in all workers' memory over distinct ones; mean over samples."""
    moved_bytes: int
    """Over the network, from SSD and to it."""
    moved_bytes_times_copies: float
    """`moved_bytes` x `duplicate_factor`: what keeping state where it is wanted takes."""
    network_bytes: int
    ssd_read_bytes: int
    ssd_written_bytes: int
    dram_loaded_bytes: int
    sealed_bytes: int
    write_amplification: float
    """Bytes written to SSDs over those of distinct state."""
    owner_hit_rate: float
    """Of turns of sessions that had an owner: those prefilled there."""
    moved_sessions: int
    """Turns that changed their session's owner."""
    decode_late_share: float
    """Interference: part of the decodes' time that prefills beside them added."""
    busy_share: float
    """Of the workers' time in which their engines computed."""
    tool_idle_busy_share: float
    """The same, of the time in which a session of theirs waited for a tool."""
    queue_mean_s: float
    restore_network_mean_s: float
    restore_ssd_mean_s: float
    restore_exposed_mean_s: float
    """The parts of a restore that were waited for, over all requests: from peers, from SSD, and
    from DRAM to pages as far as no compute hid it."""
    preemptions: int
    prefetched_bytes: int
    """Of those read from SSD: brought to DRAM before their session was back."""
    replicas: int
    """Copies of hot prefixes that were made."""

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that some tier had."""
        return self.matched_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def saved_rate(self) -> float:
        """Part of the prompt tokens that were not computed."""
        return self.saved_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class Overhead:
    """What deciding took on the machine that simulated: a measurement, different every time."""

    decisions: int
    decision_p50_us: float
    decision_mean_us: float
    decision_p99_us: float
    wall_s: float


@dataclass(frozen=True)
class SimulationResult:
    """A simulation's figures, with everything it depends on."""

    policy: str
    workers: int
    model: str
    trace: str
    caveats: tuple[str, ...]
    seed: int
    parameters: Mapping[str, float]
    figures: Figures
    state_bytes: Mapping[str, Mapping[str, int]]
    """By flow (`written`, `staged`, `fetched`, `loaded`, `sealed`), then by state type."""
    overhead: Overhead

    def as_json(self) -> dict[str, Any]:
        """As plain values; `overhead` apart from what can be repeated."""
        return asdict(self)


@dataclass
class Tally:
    """Gathers what is said of requests; 8 bytes for each figure of a request."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    step_s: array[float] = field(default_factory=lambda: array("d"))
    task_s: array[float] = field(default_factory=lambda: array("d"))
    task_wait_s: array[float] = field(default_factory=lambda: array("d"))
    decision_s: array[float] = field(default_factory=lambda: array("d"))
    duplicates: array[float] = field(default_factory=lambda: array("d"))
    refused: int = 0
    resent: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    hits: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    waits_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    owned_turns: int = 0
    owner_hits: int = 0
    moved_sessions: int = 0
    distinct_bytes: int = 0

    def served(self, request: LiveRequest, now_s: float) -> None:
        """A request has its answer."""
        self.ttft_s.append(request.first_token_s - request.arrived_s)
        self.step_s.append(now_s - request.arrived_s)
        self.prompt_tokens += request.prompt_tokens
        self.matched_tokens += request.matched_tokens
        hits = request.hits
        for at, tokens in enumerate((hits.hbm, hits.dram, hits.ssd, hits.peer)):
            self.hits[at] += tokens
        for at, wait_s in enumerate((request.waited_s, request.network_s, request.staged_s)):
            self.waits_s[at] += wait_s


def percentile(values: array[float], q: float) -> float:
    """The least value that `q` percent do not exceed; 0 of none."""
    return float(np.percentile(values, q, method="inverted_cdf")) if values else 0.0


def mean(values: array[float]) -> float:
    """0 of none."""
    return float(np.mean(values)) if values else 0.0
