"""A life in which an engine uses the store: both sides of the connector, called as vLLM does.

What lands in a page is looked at token by token: it must be the state of that very prefix, tenant
and weights.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.scheduler import scheduler_side
from hetero_connector.errors import LoadLostError
from hetero_connector.spec import ModelSpec
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.transfer.base import Direction
from tests.engine.small_pages import CHUNK, MAX_TOKENS, MODEL, SWA
from tests.faults.disk import Cut
from tests.faults.journals import connector
from tests.faults.life import Action, Life, Verdict
from tests.faults.slabs import FaultyFiles
from tests.faults.small_engine import SmallEngine
from tests.store.filling import FINGERPRINT

STEP_S = 0.02
MOST_STEPS = 600
"""In which everything that runs or waits has ended, when no more comes."""
MOST_LATE = 5
"""So often may a request still be told to ask again when it should have been answered."""
_DENSE = ModelSpec(tuple(x for x in MODEL.layers if x.state_type is not SWA), alignment=16)
_SLOT_BYTES = 4_096
_CHUNKS = 3
"""Prompts have several."""


class EngineRound(Life):
    """Requests that come, run, are preempted and leave, resets and new weights. See `Life`."""

    def __init__(self, seed: int) -> None:
        model = MODEL if random.Random(seed).random() < 0.7 else _DENSE
        self._layout = ArtifactLayout(model, CHUNK)
        slots = _SLOT_BYTES * len(self._layout.max_bytes)
        super().__init__(seed, False, self._layout.max_bytes, _CHUNKS * slots)
        self._engine: SmallEngine
        self._version = "default"

    def run(self) -> Verdict:
        """Play the round, the engine by the clock of its store."""
        with ExitStack() as undo:
            time = SimpleNamespace(monotonic=self._clock, sleep=lambda seconds: None)
            undo.enter_context(patch.object(scheduler_side, "time", time))
            return super().run()

    def _actions(self) -> list[tuple[Action, int]]:
        return [
            (self._come, 20),
            (self._engine_step, 30),
            (self._preempt, 2),
            (self._abort, 2),
            (self._forget_prefixes, 3),
            (self._reset, 2),
            (self._change_weights, 1),
            (self._device_fails, 1),
        ]

    def _open(self, config: StoreConfig) -> ArtifactStore:
        store = ArtifactStore.open(
            self._layout.max_bytes,
            config,
            self._recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            clock=self._clock,
            open_transfer=partial(FaultyFiles, self._disk),
            connect=connector(self._disk),
            run_io=self._threaded,
            size_of=self._layout.artifact_bytes,
        )
        self._engine = SmallEngine(self._rng, self._layout, store, self._recorder, self._weights)
        self._version = "default"
        return store

    def _forget_process(self) -> None:
        self._engine.end_process()

    # --- actions --------------------------------------------------------------------------------

    def _come(self) -> None:
        """A prompt that begins like others, or goes on where one has ended."""
        rng, engine = self._rng, self._engine
        if engine.ended and rng.random() < 0.4:
            known = rng.choice(engine.ended)
            tokens = [*known, *_text(rng.randrange(9), rng.choice((1, 8, 30)))]
        else:
            trunk, own = rng.randrange(3), rng.choice((0, 32, 40, 100))
            tokens = _text(trunk, rng.choice((10, 33, 64, 90, 120, 150)))
            if own:
                tokens[own:] = _text(trunk + rng.randrange(3, 9), len(tokens[own:]))
        del tokens[MAX_TOKENS - 10 :]
        tenant = rng.choice((None, None, "a tenant"))
        engine.come(tokens, tenant, rng.choice((1, 1, 4, 10)))
        self._engine_step()

    def _engine_step(self) -> None:
        for _ in range(self._rng.choice((1, 1, 2, 5))):
            self._one_step()

    def _one_step(self, preempts: bool = False) -> None:
        self._pass(STEP_S)
        if self._disk.is_off:
            return
        try:
            self._engine.step(self._clock(), preempts)
        except LoadLostError:  # the one error of ours that may end an engine
            if not self._engine.device.has_failed:
                raise
            self._say("the engine ends: a load was lost")
            self._disk.cut(Cut.KILL)

    def _preempt(self) -> None:
        self._one_step(preempts=True)

    def _device_fails(self) -> None:
        """A copy fails: a save is lost, or the engine, which cannot tell vLLM of a lost load."""
        if self._layout.model is MODEL:
            self._engine.device.fails_next = True

    def _abort(self) -> None:
        requests = [*self._engine.running, *self._engine.waiting]
        if requests:
            self._engine.finish(self._rng.choice(requests))

    def _forget_prefixes(self) -> None:
        self._engine.forget_prefixes(self._rng.choice((1, 1_000)))

    def _reset(self) -> None:
        before = self._store.generation.tag
        is_kept = self._engine.reset()
        if self._disk.is_off:
            return  # nobody has heard the answer
        self._oracle.on_reset(before, is_kept=is_kept)

    def _change_weights(self) -> None:
        self._version = self._rng.choice(("default", "one", "two"))
        self._engine.change_weights(self._version)

    def _weights(self) -> tuple[int, str]:
        """Return what the state of a prefix depends on, besides its tokens and its tenant."""
        return self._oracle.weights, self._version

    # --- judgement ------------------------------------------------------------------------------

    def _end_work(self) -> None:
        self._engine.device.fails_next = False
        for _ in range(MOST_STEPS):
            if not self._engine.is_busy:
                return
            self._one_step()
            self._judge_answers()
        left = [*self._engine.running, *self._engine.waiting]
        self.verdict.stuck.append(f"{len(left)} requests do not end")

    def _serves_again(self) -> None:
        tokens = _text(10, CHUNK + 2)
        for _ in range(2):
            before = self._engine.restored
            self._engine.forget_prefixes()
            self._engine.come(tokens, f"fresh {self._boots}", 2)
            self._end_work()
        if self._engine.restored - before < CHUNK:
            self.verdict.stuck.append("a new prompt is not restored")

    def _judge_answers(self) -> None:
        engine = self._engine
        for wrong in engine.wrong:
            self._wrong(wrong)
        self._count()
        self._counted.update(engine.counters())
        if self._disk.is_off:
            return
        for name in [name for name in self._counted if "hook_errors" in name]:
            del self._counted[name]
            if not (engine.device.has_failed and name.endswith("{hook=save}")):
                self._died(name)
        for request in engine.waiting:
            if request.asked_late > MOST_LATE:
                self.verdict.stuck.append(f"{request.request_id} is told to ask again for ever")
                request.asked_late = 0

    def _unsettled(self) -> list[str]:
        side = self._engine.side
        with self._store.catalog.locked():
            held = len(self._store.catalog.tiers.pinned()) - self._never_ending(Direction.READ)
        queues = {
            "requests": len(side._trackers),
            "loads of requests": len(side._admissions.loading) + len(side._admissions.admitted),
            "reservations": len(side._saver._reservations._reserved),
            "artifacts in use": held,
            "workers' reports": int(side.has_work),
        }
        return [*(f"{n} {what}" for what, n in queues.items() if n > 0), *super()._unsettled()]


def _text(name: int, length: int) -> list[int]:
    return [(name * 7 + i * 5) % 251 for i in range(length)]
