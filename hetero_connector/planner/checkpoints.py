"""Policies that decide which chunk boundaries get a checkpoint.

A checkpoint costs bytes written to SSD. A boundary without one costs a request that leaves the
chain there: it computes the tokens since the last boundary that has one. Every policy keeps a
turn's end, where the next turn of the session resumes; they differ in the boundaries before it.
Prefix-proportional state is stored in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ChunkKey, Tier
from hetero_connector.containers import BoundedDict
from hetero_connector.planner.compute_model import attention_work
from hetero_connector.planner.cost_model import CostModel

NEVER = 1 << 30
"""A period in chunks that no prompt reaches: only turns' ends are kept."""
PERIODS = (1, 2, 4, 8, 16, 32, 64, NEVER)
"""Periods `Adaptive` chooses from, in chunks. Powers of two nest, so the checkpoints of a longer
period stay useful under a shorter one. The best of them costs at most 6% more than the best of
all periods (a/p + bp at a factor of sqrt(2) from its minimum)."""
_LONGEST = PERIODS[-2]
_MAX_STEPS = 1024
"""Chunks among which the nearest kept boundary is looked for, at every admission."""
_PRIOR_NEW_CHUNKS = 32
_STEP_TOKENS = 2048
"""Assumed step size of an engine without a limit."""
_WRITES_PER_READ = 3.0
"""Seconds to write a byte per second to read it: consumer NVMe that reads 3 GB/s sustains 1 GB/s
of writes once its cache is full."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A chunk boundary that a request passes, while the engine has its state."""

    chunks: int
    """The number of full chunks before it, at least 1."""
    turn_end: bool = False
    """True for the last chunk boundary of a prompt, and the end of a request."""
    missed_chunks: int = 0
    """At the boundary where the request left the stored chain: the stored chunks that it had to
    compute again because this boundary had no checkpoint or, 64 at most, would have had to without
    the engine's own cache. 0 at any other boundary."""

    @classmethod
    def of_prompt(
        cls, chunks: int, prompt_tokens: int, chunk_tokens: int, missed_chunks: int
    ) -> Boundary:
        """Make the boundary after the first `chunks` full chunks of a prompt.

        The same prompt sent again resumes before its last token: one boundary earlier if the
        prompt ends on a boundary. So that is a turn's end, too.
        """
        turn_ends = (prompt_tokens // chunk_tokens, (prompt_tokens - 1) // chunk_tokens)
        return cls(chunks, chunks in turn_ends, missed_chunks)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The part of one request's chain that was stored, in full chunks."""

    matched: int
    """Leading chunks that were stored: the request left the chain there, or the chain ends."""
    kept: int = 0
    """The deepest boundary at or before `matched` where it could resume under any policy: a
    turn's end, a boundary where others had left, or the engine's own hit. 0: none."""
    local: int = 0
    """Chunks in the engine's own prefix cache; at most `kept`, or beyond `matched`."""
    new: int = 0
    """Chunks it added to the store, decoded ones included."""


class CheckpointPolicy(Protocol):
    """Decides which boundaries to keep, and learns from reuse. One per model; not thread-safe."""

    def should_keep(self, boundary: Boundary) -> bool:
        """True if the boundary gets a checkpoint; always true at a turn's end. Changes nothing."""
        ...

    def observe(self, reuse: Reuse) -> None:
        """Learn from one request; called once for each. O(1) in time and memory."""
        ...


class Periodic:
    """A checkpoint every `period` chunks from the start of the prompt."""

    def __init__(self, period: int) -> None:
        if period < 1:
            raise ValueError(f"a period is at least 1 chunk, got {period}")
        self.period = period

    def should_keep(self, boundary: Boundary) -> bool:
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
class CheckpointSizes:
    """Sizes of one model's chunks and checkpoints, summed over all ranks."""

    chunk_tokens: int
    chunk_bytes: int
    """Prefix-proportional state of one chunk."""
    checkpoint_bytes: int
    """Boundary state at one boundary, at most."""

    @classmethod
    def of(cls, layout: ArtifactLayout) -> CheckpointSizes:
        """Take them from a model's layout."""
        sizes, model = layout.max_bytes, layout.model
        return cls(
            layout.chunk_tokens,
            sum(sizes[t] for t in model.prefix_types),
            sum(sizes[t] for t in model.boundary_types),
        )


@dataclass(frozen=True)
class CheckpointRates:
    """The machine's seconds for each part; the defaults stand for one GPU and one NVMe drive."""

    write_s_per_byte: float = 1e-9
    """Seconds per byte written to SSD."""
    load_s_per_byte: float = 0.5e-9
    """Seconds per byte restored: 2 GB/s."""
    recompute_s_per_token: float = 100e-6
    """Seconds per token of prefill without attention over its context: 10,000 tokens/s."""
    attention_s: float = 0.0
    """Seconds per token squared of `attention_work`."""

    @classmethod
    def learned(cls, costs: CostModel, *, has_ssd: bool = True) -> CheckpointRates:
        """Take them from a cost model.

        Writes are not timed, so they are estimated from reads. Without an SSD a checkpoint costs
        no more than a copy.
        """
        load_s = costs.load.rates(Tier.SSD if has_ssd else Tier.DRAM).ahead_s_per_byte
        step_s, token_s, attention_s = costs.compute.coefficients
        return cls(
            write_s_per_byte=_WRITES_PER_READ * load_s if has_ssd else load_s,
            load_s_per_byte=load_s,
            recompute_s_per_token=step_s / (costs.step_tokens or _STEP_TOKENS) + token_s,
            attention_s=attention_s,
        )


_Chunks = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
_ByPeriod = Annotated[
    tuple[_Chunks, ...], msgspec.Meta(min_length=len(PERIODS), max_length=len(PERIODS))
]


@dataclass(frozen=True)
class PastReuse:
    """The reuse that `Adaptive` has seen, with fading weight; a profile keeps it."""

    new_chunks: _Chunks
    recomputed: _ByPeriod
    """Chunks that requests would have recomputed."""
    attended: _ByPeriod
    """`attention_work` of those, in chunks squared."""
    loads: _ByPeriod
    """Requests that would have loaded a checkpoint."""


class Adaptive:
    """A checkpoint every `period` chunks, with the period that costs least for past reuse.

    For each p of `PERIODS` it tracks the cost that the observed requests would have had:

        J(p) = w B N / p                            seconds of SSD writing
             + l sum_i (B [r_i > local_i] - C d_i(p))         seconds of loading, + constant
             + sum_i T(d_i(p), r_i)                 seconds of recomputing
        d_i(p) = min(m_i mod p, m_i - kept_i)       chunks that request i recomputes
        r_i    = m_i - d_i(p)                       boundary where it resumes
        T(d,r) = t c d + a c^2 d (r + d / 2)        including attention over what it resumes with

    N is the number of new chunks, m_i the chunks that request i matched, kept_i the turn's end
    (or other boundary kept anyway) before that, B and C the bytes of a checkpoint and of a chunk,
    c the tokens of a chunk; w, l, t and a are `CheckpointRates`. A second of writing counts like a
    second that a request waits, because writes delay the reads of restores. Each new request
    reduces the weight of earlier ones by a factor of 1 - 1/`memory_requests`.

    If requests leave long chains at random places, this is the law of checkpoint intervals (Young,
    CACM 17(9), 1974): the best period grows with the square root of the cost of a write. Requests
    that resume at turns' ends, or a common prefix of one length, make other curves, some of them
    falling without end. Hence the search over `PERIODS`; of equals the longest is taken. If
    loading is slower than computing, the answer is `NEVER`.

    A boundary where a request left the store and missed a checkpoint is kept in addition to the
    period if one more request that leaves there would pay for the write: t c d - l C d > w B. The
    context is left out: it would favour boundaries deep in a prompt, where a second request is
    least likely. So a common prefix is recomputed only once (as in Marconi, Pan
    et al., 2024).
    """

    def __init__(
        self,
        sizes: CheckpointSizes,
        *,
        rates: Callable[[], CheckpointRates] = CheckpointRates,
        memory_requests: int = 256,
        prior_requests: float = 1.0,
        past: PastReuse | None = None,
    ) -> None:
        """`rates` is called at every observation, so it may return what an engine has measured.

        `prior_requests` imagined requests are the prior: each leaves a chain of 64 chunks at a
        random place and adds 32 chunks. `past`: what was seen earlier, in place of the prior.
        """
        self._sizes = sizes
        self._rates = rates
        self._decay = 1.0 - 1.0 / memory_requests
        self._new_chunks = prior_requests * _PRIOR_NEW_CHUNKS
        self._recomputed = [prior_requests * (min(p, _LONGEST) - 1) / 2 for p in PERIODS]
        """Chunks that requests would have recomputed, by period."""
        self._attended = [n * _LONGEST / 2 for n in self._recomputed]
        """`attention_work` of those, in chunks squared."""
        self._loads = [prior_requests * (p < _LONGEST) for p in PERIODS]
        """Requests that would have loaded a checkpoint, by period."""
        if past is not None:
            self._new_chunks = past.new_chunks
            self._recomputed, self._attended = list(past.recomputed), list(past.attended)
            self._loads = list(past.loads)
        self.period = self._cheapest()

    @property
    def past(self) -> PastReuse:
        """The reuse seen so far. Any thread may ask."""
        by_period = (tuple(x) for x in (self._recomputed, self._attended, self._loads))
        return PastReuse(self._new_chunks, *by_period)

    def should_keep(self, boundary: Boundary) -> bool:
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
        """J by period, in seconds."""
        checkpoint_s = self._checkpoint_s()
        load_s = self._rates().load_s_per_byte * self._sizes.checkpoint_bytes
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
        """Seconds to write one checkpoint."""
        return self._rates().write_s_per_byte * self._sizes.checkpoint_bytes

    def _lost_s(self, chunks: float, attended: float) -> float:
        """Seconds lost by recomputing `chunks` instead of loading them.

        `attended`: their `attention_work`, in chunks squared.
        """
        rates, tokens = self._rates(), self._sizes.chunk_tokens
        compute_s = rates.recompute_s_per_token * tokens * chunks
        compute_s += rates.attention_s * tokens * tokens * attended
        return compute_s - rates.load_s_per_byte * self._sizes.chunk_bytes * chunks


class KeptBoundaries:
    """The newest boundaries that are kept for any period: `Reuse.kept` is looked up here."""

    def __init__(self, capacity: int = 4096) -> None:
        self._keys = BoundedDict[ChunkKey, None](capacity)

    def add(self, key: ChunkKey) -> None:
        """Add the boundary at a chunk's end. Beyond the capacity the oldest is dropped."""
        self._keys[key] = None

    def reuse(self, matched: int, local: int, keys: Iterable[ChunkKey]) -> Reuse:
        """Make the reuse of a request. `keys`: its matched chunks, the last one first."""
        steps = self.steps_to(keys)
        kept = max(min(local, matched), 0 if steps is None else matched - steps)
        return Reuse(matched, kept, local)

    def steps_to(self, keys: Iterable[ChunkKey]) -> int | None:
        """Count the `keys`, a chain from its end backwards, up to the first kept boundary.

        None if there is none among the first 1,024: then the request counts as having found none.
        """
        for steps, key in zip(range(_MAX_STEPS), keys, strict=False):
            if key in self._keys:
                return steps
        return None


def policy_named(
    name: str,
    sizes: CheckpointSizes,
    rates: Callable[[], CheckpointRates] = CheckpointRates,
    past: PastReuse | None = None,
) -> CheckpointPolicy:
    """Make the policy that a configuration names: `adaptive`, `full`, `zero` or `periodic:N`."""
    kind, _, period = name.partition(":")
    if kind == "periodic":
        return Periodic(int(period))
    if kind == "adaptive":
        return Adaptive(sizes, rates=rates, past=past)
    return {"full": Full, "zero": Zero}[kind]()
