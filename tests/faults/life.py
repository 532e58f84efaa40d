"""A seeded life on a faulty disk: stops, power cuts, new starts, and at last the end of all faults.

Subclasses say what is done meanwhile, and what is right.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hetero_connector.artifacts.generation import Generation
from hetero_connector.errors import HeteroCacheError
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.ssd.generation_file import GenerationKeeper
from hetero_connector.store.ssd.journal_rows import in_background
from hetero_connector.transfer.base import Direction
from tests.faults.disk import CALM, Cut, Disk, Fate, Weather
from tests.faults.failpoints import MOMENTS, Failpoints
from tests.faults.oracle import Oracle
from tests.faults.slabs import FaultyFiles, faulty_files
from tests.store.under_way import snapshot

DEPTH = 4
SETTLING_STEPS = 400
"""Steps of a second, by the store's clock, in which everything must be in order again."""
TRIES = 5
ACTIONS = 100
_BACKGROUND = "hetero_connector.store.ssd.journal_rows.in_background"
_SPEED = 200.0
"""The clock of a store with a thread of its own runs so much faster than the machine's."""
_NAMES = "abcdef"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A sync takes no time there; the faulty disk decides what is durable."""

WEATHERS: Mapping[str, Weather] = {
    "calm": CALM,
    "errors": Weather(
        {
            "slab.": {Fate.FAILS: 0.15},
            "journal.": {Fate.FAILS: 0.03},
            "state.": {Fate.FAILS: 0.2},
        }
    ),
    "dead": Weather({"slab.": {Fate.FAILS: 0.9}, "": {Fate.FAILS: 0.5}}),
    "full": Weather(
        {
            "slab.write": {Fate.FULL: 0.3},
            "journal.write": {Fate.FULL: 0.5},
            "journal.sync": {Fate.FULL: 0.1},
        }
    ),
    "short": Weather(
        {
            "slab.": {Fate.SHORT: 0.2},
            "journal.write": {Fate.SHORT: 0.1},
            "state.write": {Fate.SHORT: 0.5},
        }
    ),
    "lying": Weather({"slab.": {Fate.LIES: 0.15}}),
    "hanging": Weather(
        {
            "slab.": {Fate.HANGS: 0.15},
            "journal.": {Fate.HANGS: 0.01},
            "state.": {Fate.HANGS: 0.1},
        }
    ),
    "reads that never end": Weather({"slab.read": {Fate.NEVER_ENDS: 0.2}}),
    "writes that never end": Weather({"slab.write": {Fate.NEVER_ENDS: 0.1}}),
    "syncs that never end": Weather({"slab.sync": {Fate.NEVER_ENDS: 0.1}}),
    "a journal that never ends": Weather({"journal.": {Fate.NEVER_ENDS: 0.01}}),
    "a generation that never ends": Weather({"state.": {Fate.NEVER_ENDS: 0.3}}),
}


@dataclass
class Verdict:
    """Collects what a round found."""

    seed: int
    wrong_answers: list[str] = field(default_factory=list)
    engine_deaths: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    """Moments of `failpoints`."""
    story: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Return whether nothing is to be said against the store."""
        return not (self.wrong_answers or self.engine_deaths or self.stuck)


class _Clock:
    """The store's clock: moved by hand, or many times as fast as ours."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began_s = time.monotonic()
        self.passed_s = 1_000.0

    def __call__(self) -> float:
        return self.passed_s + (time.monotonic() - self._began_s) * self._speed


Action = Callable[[], None]


class Life(ABC):
    """One store on a faulty disk; actions are chosen by the seed, under changing faults.

    `threaded`: the store's own I/O thread runs, by a clock two hundred times as fast; else its
    steps are taken by hand between the actions, and the round is the same each time.
    `sizes` and `chunk_bytes`: of a chunk's artifacts, as they are and in whole slots.
    """

    def __init__(
        self, seed: int, threaded: bool, sizes: Mapping[StateType, int], chunk_bytes: int
    ) -> None:
        self.verdict = Verdict(seed)
        self._sizes = sizes
        self._chunk_bytes = chunk_bytes
        self._rng = random.Random(seed)
        self._threaded = threaded
        self._clock = _Clock(_SPEED if threaded else 0.0)
        self._oracle = Oracle()
        self._top = Path(tempfile.mkdtemp(prefix="fault-round-", dir=MEMORY))
        self._root = self._top / "ssd"
        self._boots = 0
        self._points = Failpoints()
        self._disk = Disk(seed)
        self._syncs = ExitStack()
        self._call = in_background(lambda: None)
        self._recorder = Recorder()
        self._counted: Counter[str] = Counter()
        self._known_dead = False
        rng = self._rng
        self._dram_chunks = rng.randint(3, 8)
        self._ssd_chunks = rng.randint(3, 16)
        self._verify: Any = rng.choice(("ssd", "ssd", "all"))
        self._eviction: Any = rng.choice(("leaf_lru", "value"))
        budget = rng.random() < 0.1
        self._budget = 8 * 4 * chunk_bytes if budget else None
        self._weathers = [rng.choice(list(WEATHERS)) for _ in range(2)]
        self._store: ArtifactStore

    @abstractmethod
    def _actions(self) -> list[tuple[Action, int]]:
        """List what may be done, and how often it is."""

    @abstractmethod
    def _open(self, config: StoreConfig) -> ArtifactStore:
        """Open the store, and whatever uses it."""

    @abstractmethod
    def _forget_process(self) -> None:
        """The process ends: forget what it had under way."""

    @abstractmethod
    def _end_work(self) -> None:
        """Without faults: bring to an end what is under way, but for what waits for the store."""

    @abstractmethod
    def _serves_again(self) -> None:
        """Take a new prompt and give it back."""

    @abstractmethod
    def _judge_answers(self) -> None:
        """Compare what was handed out with what is right."""

    def run(self) -> Verdict:
        """Play the round."""
        with ExitStack() as undo:
            undo.callback(partial(shutil.rmtree, self._top, ignore_errors=True))
            if not self._threaded:
                undo.enter_context(patch(_BACKGROUND, self._in_this_step))
                undo.enter_context(
                    patch.object(GenerationKeeper, "start_own_reset", _reset_and_wait)
                )
            undo.enter_context(patch("hetero_connector.store.io_thread._IDLE_S", 0.01))
            undo.enter_context(patch("hetero_connector.store.artifact_store._KEEP_S", 0.05))
            undo.enter_context(patch("secrets.token_bytes", self._rng.randbytes))
            undo.enter_context(self._points.installed())
            undo.enter_context(quiet())
            try:
                self._live()
            except Exception as e:
                logging.getLogger(__name__).debug("round %d", self.verdict.seed, exc_info=True)
                self._died(f"{type(e).__name__}: {e}")
            finally:
                self._heal()
                self._syncs.close()
        self.verdict.injected += self._disk.injected
        self.verdict.reached += self._points.reached
        return self.verdict

    def _live(self) -> None:
        self._boot()
        actions = [
            *self._actions(),
            (self._steps, 12),
            (self._passes, 4),
            (self._leave_dram, 3),
            (self._change_weather, 3),
            (self._kill, 2),
            (self._restart, 1),
        ]
        calls, weights = zip(*actions, strict=True)
        for _ in range(ACTIONS):
            action = self._rng.choices(calls, weights)[0]
            self._say(action.__name__.strip("_"))
            action()
            if self._rng.random() < 0.7:
                self._step()
            if self._disk.is_off:
                self._reboot()
            self._judge()
        self._say("the faults end")
        self._points.clear()
        self._heal()
        if self._disk.is_off:  # its own thread may have come to the moment just now
            self._reboot()
        self._settle()
        self._serves_again()
        self._restart()
        self._judge()
        self._power_off(Cut.KILL)

    # --- opening and stopping -----------------------------------------------------------------

    def _boot(self) -> None:
        """Open the store; under faults it may refuse to, with an error that is made for it."""
        disk = self._disk
        if self._rng.random() < 0.6:
            self._change_weather()
        disk.mount(self._root)
        disk.may_block = partial(_is_not, threading.current_thread())
        self._syncs = ExitStack()
        self._syncs.enter_context(faulty_files(disk))
        self._recorder, self._counted = Recorder(), Counter()
        ssd_bytes = (self._ssd_chunks * (self._chunk_bytes + 1024)) * 16 // 15
        config = StoreConfig(
            self._dram_chunks * self._chunk_bytes,
            self._root,
            ssd_bytes,
            spill_delay_s=0.0,
            verify=self._verify,
            eviction=self._eviction,
            ssd_write_bytes_per_day=self._budget,
        )
        try:
            self._store = self._open(config)
        except HeteroCacheError as e:
            if disk.weather is CALM and not disk.is_off:
                raise
            self._say(f"it does not start: {e}".replace(str(self._top), ""))
            self._heal()
            if disk.is_off:
                self._swap_disk()
                self._boot()
                return
            self._store = self._open(config)
        self._oracle.on_start(self._store.generation.tag)

    def _power_off(self, how: Cut) -> None:
        self._disk.cut(how)
        self._syncs.close()
        self._forget_process()
        if self._threaded:
            self._store.close(0.2)
        else:
            self._close_files()
            self._store.arena.close()

    def _close_files(self) -> None:
        """Do what the kernel does for a process that has ended."""
        assert self._store.io_thread is not None
        ssd = self._store.io_thread.ssd
        assert ssd is not None
        ssd.rows.directory.close()
        assert isinstance(ssd._transfer, FaultyFiles)
        ssd._transfer.end_process()

    def _swap_disk(self) -> None:
        """Go on from the image, on a disk without faults."""
        self._syncs.close()
        self.verdict.injected += self._disk.injected
        self._root.rename(self._root.with_name(f"dead{self._boots}"))
        self._disk.image.rename(self._root)
        self._boots += 1
        self._points.clear()
        self._disk = Disk(self.verdict.seed * 1_000 + self._boots)

    def _reboot(self) -> None:
        self._say(self._disk.faults[-1] if self._disk.faults else "stopped")
        self._power_off(Cut.KILL)
        self._swap_disk()
        self._boot()

    # --- time and faults ------------------------------------------------------------------------

    def _steps(self) -> None:
        for _ in range(self._rng.randint(1, 12)):
            self._step()

    def _step(self) -> None:
        if self._threaded:
            time.sleep(0.0005)
        else:
            self._store.run_io_round()

    def _passes(self) -> None:
        seconds = self._rng.choice((0.01, 0.3, 1.5, 5.0, 11.0, 61.0))
        while seconds > 0:
            self._pass(min(seconds, 1.0))
            seconds -= 1.0

    def _pass(self, seconds: float) -> None:
        """Let time pass, in which the store does what it has to."""
        if self._threaded:
            time.sleep(seconds / _SPEED)
        else:
            self._clock.passed_s += seconds
            self._step()

    def _leave_dram(self) -> None:
        """Have the next restores read from SSD."""
        self._store.leave_to_ssd()

    def _change_weather(self) -> None:
        name = self._rng.choice([*self._weathers, "calm"])
        self._say(name)
        self._heal()
        self._disk.weather = WEATHERS[name]

    def _kill(self) -> None:
        """Stop the machine at a moment of the store's, or at an operation of the disk's."""
        rng, disk = self._rng, self._disk
        how = rng.choice(list(Cut))
        if rng.random() < 0.3:
            disk.cut_at = (disk.operations + rng.choice((0, 1, 2, 3, 5, 8, 13, 21, 34)), how)
            return
        moment, ahead = rng.choice(MOMENTS), rng.randrange(4)
        self._say(f"to be stopped {moment}, {ahead}")
        self._points.choose(moment, ahead, partial(disk.cut, how))

    def _restart(self) -> None:
        """Close the store in good order, and open it again."""
        if self._threaded:
            self._forget_process()
            self._store.close(0.5)
        else:
            for _ in range(20):
                self._step()
            self._close_files()
        self._power_off(Cut.KILL)
        self._swap_disk()
        self._boot()

    # --- judgement --------------------------------------------------------------------------------

    def _judge(self) -> None:
        self._store.check_integrity()
        self._judge_answers()
        if not (self._store.catalog.io_alive or self._disk.is_off or self._known_dead):
            self._known_dead = True
            self._died("the I/O thread ended")
        self._count()

    def _count(self) -> None:
        payload = self._recorder.drain() or {}
        for name, value in payload.get(COUNTERS, {}).items():
            self._counted[name] += value

    def _settle(self) -> None:
        """End the faults, let time pass, and say what does not come to an end."""
        self._heal()
        self._end_work()
        for _ in range(SETTLING_STEPS):
            self._pass(1.0)
            if not self._unsettled():
                return
        self._judge()
        self.verdict.stuck += self._unsettled()

    def _unsettled(self) -> list[str]:
        """Say what waits for something, or was left out without being counted."""
        catalog, tiers = self._store.catalog, self._store.catalog.tiers
        with catalog.locked():
            now = snapshot(catalog)
            queues: dict[str, int] = {
                "loads queued": now.loads_queued,
                "loads under way": now.loads - self._never_ending(Direction.READ),
                "writes queued": now.writes_queued,
                "writes under way": now.writing,
            }
            if catalog.writes.is_writable or not self._gave_up():
                queues["rows to forget"] = now.rows_to_forget
            unwritten = [
                a
                for a in tiers.index.artifacts()
                if a.sealed and a.dram is not None and a.ssd is None and not a.forgotten
            ]
            unsummed = [a for a in tiers.index.artifacts() if a.sealed and a.checksum is None]
            for kind in self._sizes:
                here = sum(
                    a.dram is not None and a.state_type is kind for a in tiers.index.artifacts()
                )
                lost = tiers.dram.num_used(kind) - here - self._never_ending()
                queues[f"DRAM slots of {kind} without an artifact"] = max(0, lost)
        found = [f"{count} {what}" for what, count in queues.items() if count > 0]
        if catalog.writes.is_writable:
            if len(unwritten) > self._refused():
                found.append(f"{len(unwritten)} sealed, neither on SSD nor counted as refused")
            if unsummed and len(unsummed) > self._refused():
                found.append(f"{len(unsummed)} sealed without a checksum")
        elif not self._gave_up():
            found.append("nothing is written although the faults have ended")
        return found

    def _never_ending(self, direction: Direction | None = None) -> int:
        """Artifacts that a transfer which will not end still touches."""
        io_thread = self._store.io_thread
        assert io_thread is not None
        files = io_thread.ssd._transfer  # type: ignore[union-attr]
        assert isinstance(files, FaultyFiles)
        return sum(
            len(t.extents)
            for t in files.active
            if t.fate is Fate.NEVER_ENDS and direction in (None, t.direction)
        )

    def _refused(self) -> float:
        """Artifacts that were counted as not, or no more, on SSD."""
        self._count()
        causes = ("heterocache_failures", "heterocache_evictions", "heterocache_ssd_writes_refused")
        return sum(
            value
            for name, value in self._counted.items()
            if name.startswith(causes) and ("ssd" in name or "refused" in name)
        )

    def _gave_up(self) -> bool:
        """Return whether something did not end in time: writing may have been given up for it."""
        ends = (Fate.NEVER_ENDS, Fate.HANGS)
        return any(fault.endswith(ends) for fault in self._disk.faults)

    def _in_this_step(self, call: Callable[[], Any]) -> Future[Any]:
        """Make a call beside the I/O thread; it ends in the step that began it, unless it hangs."""
        self._call = in_background(call)
        self._wait_for_call()
        return self._call

    def _heal(self) -> None:
        self._disk.heal()
        self._wait_for_call()

    def _wait_for_call(self) -> None:
        while not (self._call.done() or self._disk.hanging):
            wait([self._call], 0.001)

    def _wrong(self, what: str) -> None:
        if what not in self.verdict.wrong_answers:
            self.verdict.wrong_answers.append(what)

    def _died(self, why: str) -> None:
        if why not in self.verdict.engine_deaths:
            self.verdict.engine_deaths.append(why)

    def _say(self, what: str) -> None:
        self.verdict.story.append(what)


_start_own_reset = GenerationKeeper.start_own_reset


def _reset_and_wait(keeper: GenerationKeeper) -> Generation:
    """Let the file be written before anything else happens, unless that hangs."""
    new = _start_own_reset(keeper)
    keeper.wait_kept(0.05)
    return new


def _is_not(thread: threading.Thread) -> bool:
    return threading.current_thread() is not thread


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the log quiet: its errors are what a round is for."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
