"""A day of agent sessions against an SSD's capacity and its daily write budget.

The package's own store on real files, its write budget, admission and eviction, on a virtual
clock. Artifacts have 1/`scale` of their size, so a day of a large model takes minutes and fits a
small disk; budget, capacity and written bytes have that scale too. The engine is restarted at noon:
DRAM is lost, and the budget continues.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.agent_sessions import TokenTurn
from benchmarks.policy_replay import CHUNK_TOKENS, FINGERPRINT, costs_of
from benchmarks.replayed_engine import ReplayedEngine, SmallStore
from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.metrics import COUNTERS, Recorder, split_key
from hetero_connector.planner.checkpoints import CheckpointRates, CheckpointSizes, policy_named
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.spec.presets import PRESETS
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from hetero_connector.store.catalog.write_budget import DAY_S
from hetero_connector.store.io_thread import IoThread
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.tier import OpenTransfer, best_transfer
from hetero_connector.transfer.base import Direction, Extent, FileTransfer, Transfer

SCALES = {"gemma-3-27b": 5120.0, "deepseek-v4-flash": 192.0}
"""The divisor of artifact sizes by model: the smallest artifact of a chunk fits a block."""
_BLOCK = 4096
_TOUCH_S = 30.0


@dataclass(frozen=True)
class Limits:
    """The limits of a day, in bytes on the disk (already scaled)."""

    ssd_bytes: int
    write_bytes_per_day: int | None = None
    dram_chunks: int = 2048
    """Chunks and checkpoints the DRAM tier holds; a restore needs all of its chunks there."""


@dataclass
class DayResult:
    """The result of a day."""

    model: str
    limits: Limits
    written: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the day began, bytes written to disk) of each request."""
    disk_bytes: int = 0
    """The largest size of all files together."""
    ssd_chunks: int = 0
    """Slots in use at the end, of the state type with most."""
    slots_bytes: int = 0
    """Bytes of all slots in use at the end."""
    prompt_tokens: int = 0
    counters: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Counters of store and restorer as `name` or `name{tier}`, summed over other labels."""
    budget_left: tuple[float, float] = (0.0, 0.0)
    """Bytes before the restart, and after it."""

    @property
    def written_bytes(self) -> int:
        """Bytes written in the whole day."""
        return sum(size for _, size in self.written)

    @property
    def worst_day_bytes(self) -> int:
        """The most bytes written in any 24 hours."""
        sums, begin, total = 0, 0, 0
        for at_s, size in self.written:
            total += size
            while self.written[begin][0] <= at_s - DAY_S:
                total -= self.written[begin][1]
                begin += 1
            sums = max(sums, total)
        return sums

    def bytes_for(self, share: float) -> int:
        """Return the `ssd_bytes` that hold a share of what was on SSD at the end of this day."""
        # 512 bytes of journal are set aside for a slot of 4 KiB, and a sixteenth in all.
        return round(share * self.slots_bytes * 9 / 8 * 16 / 15) + (1 << 20)

    def hit_share(self, tier: str) -> float:
        """Return the share of prompt tokens that were restored from a tier."""
        return self.counters[f"heterocache_hit_tokens{{{tier}}}"] / max(1, self.prompt_tokens)


class SessionDay:
    """One engine over one SSD directory. Steps the store's I/O itself, by the virtual clock."""

    def __init__(
        self,
        root: Path,
        model: str,
        limits: Limits,
        checkpoints: str = "adaptive",
        open_transfer: OpenTransfer = best_transfer,
    ) -> None:
        """`model`: a preset of `SCALES`."""
        layout = ArtifactLayout(PRESETS[model](), CHUNK_TOKENS)
        self.result = DayResult(model, limits)
        self._root, self._layout, self._scale = root, layout, SCALES[model]
        self._open_transfer = open_transfer
        self._costs = costs_of(layout, None)
        self._checkpoints = policy_named(
            checkpoints, CheckpointSizes.of(layout), lambda: CheckpointRates.learned(self._costs)
        )
        self._hasher = ChainHasher(FINGERPRINT, layout.chunk_tokens)
        self._now_s = 0.0
        self._touched_s = 0.0
        self._written_bytes = 0
        self._open()

    def run(self, turns: Iterable[TokenTurn], restart_at_s: float | None = None) -> DayResult:
        """Serve the turns, which come in the order of time."""
        for turn in turns:
            if restart_at_s is not None and turn.at_s >= restart_at_s:
                self.restart()
                restart_at_s = None
            self.serve(turn)
        return self.result

    def serve(self, turn: TokenTurn) -> None:
        """Serve one request at its time, with all the writing that is due after it."""
        self._now_s = turn.at_s
        chain = RequestChain(self._hasher)
        chain.extend(turn.tokens)
        self._engine.serve(turn, chain)
        self._settle()
        self.result.prompt_tokens += turn.prompt_tokens
        self.result.written.append((turn.at_s, self._written_bytes))
        self._written_bytes = 0

    def restart(self) -> None:
        """End the engine and start it again."""
        before = self._budget_left()
        self.close()
        self._open()
        self.result.budget_left = (before, self._budget_left())

    def close(self) -> None:
        """End the engine."""
        self._count()
        self._store.check_integrity()
        tiers = self._store.catalog.tiers
        assert tiers.ssd is not None
        self.result.ssd_chunks = max(map(tiers.ssd.num_used, self._layout.model.state_types))
        strides = tiers.ssd.geometry.stride_bytes
        self.result.slots_bytes = sum(tiers.ssd.num_used(t) * n for t, n in strides.items())
        self._io_thread.start()
        self._store.close()
        files = [f for f in self._root.rglob("*") if f.is_file()]
        taken = sum(f.stat().st_blocks * 512 for f in files)
        self.result.disk_bytes = max(self.result.disk_bytes, taken)

    def _open(self) -> None:
        self._recorder = Recorder()
        limits, layout = self.result.limits, self._layout
        slots = {t: math.ceil(n / self._scale) for t, n in layout.max_bytes.items()}
        dram_bytes = limits.dram_chunks * sum(-(-n // _BLOCK) * _BLOCK for n in slots.values())
        config = StoreConfig(
            dram_bytes, self._root, limits.ssd_bytes, spill_delay_s=0.0, shared=False,
            ssd_write_bytes_per_day=limits.write_bytes_per_day,
        )  # fmt: skip
        self._store = SmallStore.open(
            slots, config, self._recorder,
            chunk_tokens=layout.chunk_tokens, fingerprint=FINGERPRINT, description={},
            clock=lambda: self._now_s, open_transfer=self._open_counted,
            seconds_saved=SecondsSaved(self._costs.compute.predict), run_io=False,
        )  # fmt: skip
        self._store.scale = self._scale
        assert self._store.io_thread is not None
        self._io_thread: IoThread = self._store.io_thread
        planner = RestorePlanner(layout, self._costs)
        self._engine = ReplayedEngine(
            layout, self._store, planner, self._checkpoints, self._recorder,
            clock=lambda: self._now_s, step_io=self._io_thread.step,
        )  # fmt: skip

    def _open_counted(self, memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> FileTransfer:
        return CountedWrites(self._open_transfer(memory, directory), self)

    def wrote(self, size_bytes: int) -> None:
        """Count a write that was submitted."""
        self._written_bytes += size_bytes

    def _settle(self) -> None:
        """Run the store's I/O until nothing is left to do."""
        if self._now_s - self._touched_s >= _TOUCH_S:
            self._io_thread.housekeep()
            self._touched_s = self._now_s
        writes = self._store.catalog.writes
        while self._io_thread.step() or len(writes) or writes.num_writing:
            pass
        self._count()

    def _count(self) -> None:
        payload = self._recorder.drain() or {}
        for key, value in payload.get(COUNTERS, {}).items():
            name, labels = split_key(key)
            tier = labels.get("tier")
            self.result.counters[f"{name}{{{tier}}}" if tier else name] += value

    def _budget_left(self) -> float:
        budget = self._store.catalog.writes.admission.budget
        return math.inf if budget is None else budget.left_bytes


class CountedWrites:
    """A `FileTransfer` that counts the bytes written."""

    def __init__(self, inner: FileTransfer, day: SessionDay) -> None:
        self._inner = inner
        self._day = day

    @property
    def name(self) -> str:
        return self._inner.name

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> Transfer:
        if direction is Direction.WRITE:
            self._day.wrote(sum(extent.size for extent in extents))
        return self._inner.submit(direction, extents)

    def close(self, timeout_s: float = 10.0) -> bool:
        return self._inner.close(timeout_s)


def starts_over_a_day(num_sessions: int, seed: int) -> list[float]:
    """Draw the times at which sessions begin, uniform over the day."""
    starts_s: list[float] = np.random.default_rng(seed).uniform(0.0, DAY_S, num_sessions).tolist()
    return starts_s
