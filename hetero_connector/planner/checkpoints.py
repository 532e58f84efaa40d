"""Which chunk boundaries get a checkpoint: `Full`, `Periodic`, `Zero`, `Adaptive`.

A checkpoint costs bytes written to SSD; a boundary without one costs a request that
leaves the chain there the tokens back to the last boundary that has one. Every policy
keeps a turn's end, where the next turn of the session resumes; they differ in what they
keep on the way. Prefix-proportional state is stored in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, Tier
from hetero_connector.planner.compute_model import attention_work
from hetero_connector.planner.cost_model import CostModel

NEVER = 1 << 30
"""A period in chunks that no prompt reaches: only turns' ends."""
PERIODS = (1, 2, 4, 8, 16, 32, 64, NEVER)
"""Periods `Adaptive` chooses from, in chunks. Powers of two nest, so the checkpoints of a longer
period stay useful under a shorter one; the best of them costs at most 6% more than the best
period of all (a/p + bp at a factor of sqrt(2) from its minimum)."""
_LONGEST = PERIODS[-2]
_PRIOR_NEW_CHUNKS = 32
_STEP_TOKENS = 2048
"""Of an engine that computes everything in one step."""
_WRITES_PER_READ = 3.0
"""Seconds of writing a byte for one of reading it: consumer NVMe that reads 3 GB/s sustains 1 GB/s
of writes once its cache is full."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A chunk boundary that a request passes, whose state the engine holds at that moment."""

    chunks: int
    """Full chunks before it, at least 1."""
    turn_end: bool = False
    """The last chunk boundary of a prompt, or the end of a request."""
    missed_chunks: int = 0
    """Where the request left what is stored: the chunks it had to compute anew, though they
    were stored, because this boundary had no checkpoint. 0 at any other boundary."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What one request found of its chain in the store, in full chunks."""

    matched: int
    """Leading chunks that were stored: it left the stored chain, or its end, there."""
    kept: int = 0
    """The deepest boundary at or before `matched` where it could resume under any policy: a
    turn's end, a boundary others had left at, or the engine's own hit. 0: none."""
    local: int = 0
    """Chunks the engine's own prefix cache held; at most `kept`, or beyond `matched`."""
    new: int = 0
    """Chunks it added to the store, decoded ones included."""


class CheckpointPolicy(Protocol):
    """Decides, and learns from what requests reuse. One per model; not thread-safe."""

    def keeps(self, boundary: Boundary) -> bool:
        """Whether the boundary gets a checkpoint. True at every turn's end. A pure query."""
        ...

    def observe(self, reuse: Reuse) -> None:
        """Told once for every request. O(1), in time and memory."""
        ...


class Periodic:
    """A checkpoint every `period` chunks from the start of the prompt."""

    def __init__(self, period: int) -> None:
        if period < 1:
            raise ValueError(f"a period is at least 1 chunk, got {period}")
        self.period = period

    def keeps(self, boundary: Boundary) -> bool:
        return boundary.turn_end or boundary.chunks % self.period == 0

    def observe(self, reuse: Reuse) -> None:
        """Learns nothing."""


class Full(Periodic):
    """A checkpoint at every chunk boundary."""

    def __init__(self) -> None:
        super().__init__(1)


class Zero(Periodic):
    """Only turns' ends."""

    def __init__(self) -> None:
        super().__init__(NEVER)


@dataclass(frozen=True)
class Sizes:
    """What a chunk and a checkpoint of one model take, all ranks together."""

    chunk_tokens: int
    chunk_bytes: int
    """Prefix-proportional state of one chunk."""
    checkpoint_bytes: int
    """Boundary state at one boundary, at most."""

    @classmethod
    def of(cls, layout: ArtifactLayout) -> Sizes:
        """Of a model at its chunk size."""
        sizes, model = layout.max_bytes, layout.model
        return cls(
            layout.chunk_tokens,
            sum(sizes[t] for t in model.prefix_types),
            sum(sizes[t] for t in model.boundary_types),
        )


@dataclass(frozen=True)
class Rates:
    """What the machine takes for each part; the defaults stand for one GPU and one NVMe."""

    write_s_per_byte: float = 1e-9
    """Seconds per byte written to SSD."""
    load_s_per_byte: float = 0.5e-9
    """Seconds per byte restored: 2 GB/s."""
    recompute_s_per_token: float = 100e-6
    """Seconds per token of prefill without attention over its context: 10,000 tokens/s."""
    attention_s: float = 0.0
    """Seconds per token squared of `attention_work`."""

    @classmethod
    def learned(cls, costs: CostModel, *, has_ssd: bool = True) -> Rates:
        """What a cost model has learned, or was told by a profile.

        Writes are not timed: they count by the reads. Without an SSD a checkpoint costs no more
        than a copy.
        """
        load_s = costs.load.rates(Tier.SSD if has_ssd else Tier.DRAM).ahead_s_per_byte
        step_s, token_s, attention_s = costs.compute.coefficients
        return cls(
            write_s_per_byte=_WRITES_PER_READ * load_s if has_ssd else load_s,
            load_s_per_byte=load_s,
            recompute_s_per_token=step_s / (costs.step_tokens or _STEP_TOKENS) + token_s,
            attention_s=attention_s,
        )


@dataclass(frozen=True)
class Weights:
    """What a second of each part counts (no unit); alpha, beta and gamma of `Adaptive`.

    With 1 everywhere a second of SSD writing counts like a second a request waits, because
    writes hold up the reads of restores.
    """

    write: float = 1.0
    restore: float = 1.0
    recompute: float = 1.0


class Adaptive:
    """Every `period` chunks, with the period that costs least for the reuse seen.

    For each p of `PERIODS` it keeps the cost the observed requests would have had:

        J(p) = alpha w B N / p                      seconds of SSD writing
             + beta  l sum_i (B [r_i > local_i] - C d_i(p))   seconds of loading, + constant
             + gamma sum_i T(d_i(p), r_i)           seconds of recomputing
        d_i(p) = min(m_i mod p, m_i - kept_i)       chunks request i recomputes
        r_i    = m_i - d_i(p)                       boundary it resumes at
        T(d,r) = t c d + a c^2 d (r + d / 2)        attention over what it resumes with, too

    with N new chunks, m_i the chunks request i matched, kept_i the turn's end (or other
    boundary kept anyway) behind that, B and C the bytes of a checkpoint and of a chunk, c its
    tokens; w, l, t and a are `Rates`. Old requests count less and less, by 1 - 1/`memory_requests`
    with each new one.

    Where requests leave long chains anywhere, d_i(p) is (p - 1)/2 on average. With nu new
    chunks a request and k = gamma T(1, r) - beta l C seconds lost a chunk, J'(p) = 0 at

        p* = sqrt(2 alpha w B nu / k)

    the law of checkpoint intervals (Young, CACM 17(9), 1974). It holds for that one histogram:
    requests that resume at turns' ends (d_i = 0 whatever p), or a common prefix of one length,
    make other curves, some falling without end. Hence the search over `PERIODS`; among equals
    the longest. With k <= 0, loading slower than computing, the answer is `NEVER`.

    A boundary where a request left the store, missing a checkpoint, is kept beside the period
    if one more request leaving there would pay for the write: gamma t c d - beta l C d >
    alpha w B. The context is left out: it makes boundaries deep in a prompt dear, where a second
    request is the least likely. So a common prefix costs a recompute once (as in Marconi, Pan et
    al., 2024).
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        weights: Weights = Weights(),
        rates: Callable[[], Rates] = Rates,
        memory_requests: int = 256,
        prior_requests: float = 1.0,
    ) -> None:
        """`rates` is asked at every observation, so it may be what an engine has measured.

        `prior_requests` imagined requests stand for what has not been seen yet: each leaves a
        chain of 64 chunks anywhere and adds 32 chunks.
        """
        self._sizes = sizes
        self._weights = weights
        self._rates = rates
        self._decay = 1.0 - 1.0 / memory_requests
        self._new_chunks = prior_requests * _PRIOR_NEW_CHUNKS
        self._recomputed = [prior_requests * (min(p, _LONGEST) - 1) / 2 for p in PERIODS]
        """Chunks that requests would have recomputed, by period."""
        self._attended = [n * _LONGEST / 2 for n in self._recomputed]
        """Chunks squared that these would have attended to."""
        self._loads = [prior_requests * (p < _LONGEST) for p in PERIODS]
        """Requests that would have loaded a checkpoint, by period."""
        self.period = self._cheapest()

    def keeps(self, boundary: Boundary) -> bool:
        if boundary.turn_end or boundary.chunks % self.period == 0:
            return True
        missed = boundary.missed_chunks
        return bool(missed) and self._lost_s(missed, attended=0.0) > self._checkpoint_s()

    def observe(self, reuse: Reuse) -> None:
        self._new_chunks = self._new_chunks * self._decay + reuse.new
        furthest = max(0, reuse.matched - reuse.kept)
        for i, period in enumerate(PERIODS):
            recomputed = min(reuse.matched % period, furthest)
            resumed = reuse.matched - recomputed
            loads = resumed > reuse.local
            self._recomputed[i] = self._recomputed[i] * self._decay + recomputed
            self._attended[i] *= self._decay
            self._attended[i] += attention_work(recomputed, resumed)
            self._loads[i] = self._loads[i] * self._decay + loads
        self.period = self._cheapest()

    def costs_s(self) -> dict[int, float]:
        """J by period, in weighted seconds over the requests remembered; see the class."""
        checkpoint_s = self._checkpoint_s()
        load_s = self._weights.restore * self._rates().load_s_per_byte
        load_s *= self._sizes.checkpoint_bytes
        return {
            p: checkpoint_s * self._new_chunks / p + load_s * loads + self._lost_s(*recomputed)
            for p, loads, *recomputed in zip(
                PERIODS, self._loads, self._recomputed, self._attended, strict=True
            )
        }

    def _cheapest(self) -> int:
        costs = self.costs_s()
        return min(PERIODS, key=lambda p: (costs[p], -p))

    def _checkpoint_s(self) -> float:
        """Weighted seconds to write one checkpoint."""
        return self._weights.write * self._rates().write_s_per_byte * self._sizes.checkpoint_bytes

    def _lost_s(self, chunks: float, attended: float) -> float:
        """Weighted seconds lost where so many chunks are recomputed instead of loaded.

        `attended`: their `attention_work`, in chunks squared.
        """
        rates, tokens = self._rates(), self._sizes.chunk_tokens
        compute_s = rates.recompute_s_per_token * tokens * chunks
        compute_s += rates.attention_s * tokens * tokens * attended
        load_s = rates.load_s_per_byte * self._sizes.chunk_bytes * chunks
        return self._weights.recompute * compute_s - self._weights.restore * load_s


class KeptBoundaries:
    """The newest boundaries kept whatever the period: what `Reuse.kept` is found with."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._keys: dict[ChunkKey, None] = {}

    def add(self, key: ChunkKey) -> None:
        """The chunk that ends at the boundary; the oldest is forgotten beyond the capacity."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._capacity:
            del self._keys[next(iter(self._keys))]

    def steps_to(self, keys: Iterable[ChunkKey]) -> int | None:
        """How many of `keys`, a chain from its end backwards, come before a kept boundary.

        Looks no further than the longest period, beyond which it makes no difference.
        """
        for steps, key in zip(range(_LONGEST), keys, strict=False):
            if key in self._keys:
                return steps
        return None


def policy_named(name: str, sizes: Sizes, rates: Callable[[], Rates] = Rates) -> CheckpointPolicy:
    """The policy a configuration names: `adaptive`, `full`, `zero` or `periodic:N`."""
    kind, _, period = name.partition(":")
    if kind == "periodic":
        return Periodic(int(period))
    if kind == "adaptive":
        return Adaptive(sizes, rates=rates)
    return {"full": Full, "zero": Zero}[kind]()
