"""Random steps of a worker on the adversarial device keep the pages of a plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import (
    ArtifactCopy,
    ArtifactSpan,
    Blocks,
    Load,
    PageCopy,
    Save,
    StepMetadata,
)
from hetero_connector.engine.worker import worker_side
from hetero_connector.engine.worker.copy_plan import Copies, CopyPlanner
from hetero_connector.engine.worker.layer_hooks import LayerHooks
from hetero_connector.engine.worker.worker_side import WorkerSide
from hetero_connector.metrics import Recorder
from hetero_connector.store.arena import Arena
from tests.engine.adversarial_device import AdversarialDevice
from tests.engine.small_pages import (
    CHUNK,
    KV,
    LEFT_OUT,
    MAX_TOKENS,
    MODEL,
    NEVER_ASKS,
    NUM_BLOCKS,
    SWA,
    TOKEN_BYTES,
    page_caches,
)

pytestmark = pytest.mark.long

SLOT_BYTES, SLOTS = 2048, 32
STALE = 0xDD
LAYOUT = ArtifactLayout(MODEL, CHUNK)
SPECS = {x.layer: x for x in MODEL.layers}
_VALUES = np.random.default_rng(5).integers(
    1, 200, (len(SPECS), 64, MAX_TOKENS, TOKEN_BYTES), dtype=np.uint8
)


def state(layer: str, seed: int) -> np.ndarray:
    """`[MAX_TOKENS, TOKEN_BYTES]`: the layer's state of a request's tokens."""
    values: np.ndarray = _VALUES[list(SPECS).index(layer), seed % 64]
    return values


@dataclass
class Request:
    """A running request, and the right content of its pages."""

    seed: int
    tables: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    computed: int = 0
    parked: bool = False
    """It waits until its load is reported."""
    known: dict[str, np.ndarray] = field(
        default_factory=lambda: {x: np.zeros(MAX_TOKENS, bool) for x in SPECS}
    )


class Share(NamedTuple):
    """The tokens of a request that a step computes."""

    request: Request
    first: int
    stop: int


class World:
    """An engine as its worker side sees it: pages, requests, and a store's slots."""

    def __init__(
        self, rng: Random, *, layerwise: str = "on", told_of_microbatches: bool = False
    ) -> None:
        self.rng = rng
        self.device = AdversarialDevice(lambda: rng.random() < 0.5)
        self.arena = Arena.create(SLOTS * SLOT_BYTES, shared=False)
        self.side = WorkerSide(
            LAYOUT, 0, NUM_BLOCKS, layerwise, Recorder(), microbatches=told_of_microbatches
        )
        self.caches = page_caches()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_side, "device_of", lambda *_: self.device)
            self.side.register(self.caches)
        self.side.attach(self.arena.handle, LAYOUT)
        self.free = list(range(1, NUM_BLOCKS))
        self.slots = list(range(SLOTS))
        self.requests: list[Request] = []
        self.early: list[Save] = []
        self.wrong: list[str] = []
        self._seeds = iter(range(10**6))
        self._saves: dict[int, list[tuple[ArtifactCopy, Request]]] = {}
        self._loads: dict[int, list[int]] = {}
        self._step = 0

    def close(self) -> None:
        self.side.close()
        self.arena.close()

    def run(self, steps: int) -> None:
        for self._step in range(steps):
            self._one_step()
        self.device.synchronize()
        for request in self.requests:
            self._check(list(SPECS), Share(request, request.computed, request.computed))

    # One step, in vLLM's order of calls

    def _one_step(self) -> None:
        rng = self.rng
        for request in list(self.requests):
            if rng.random() < 0.2 and not request.parked:  # vLLM holds the blocks of parked ones
                self._end(request)
        meta = StepMetadata(early_saves=self._take_early())
        if rng.random() < 0.5:
            self._admit(meta)
        shares = self._shares() if rng.random() < 0.9 else []
        self._order_saves(meta, shares)
        calls_hooks = rng.random() < 0.8
        sync = any(not x.parked for x in meta.loads) or rng.random() < 0.5
        self.side.begin_step(meta)
        if sync:
            self.side.start_loads(meta, hooks_called=calls_hooks)
        if shares or sync:
            self._forward(meta, shares, calls_hooks)
        if not sync:
            self.side.start_loads(meta, hooks_called=calls_hooks)
        self.side.end_step(meta)
        self._settle()
        if rng.random() < 0.5:  # the scheduler has the step's tokens before it goes on
            self.device.synchronize()

    def _forward(self, meta: StepMetadata, shares: list[Share], calls_hooks: bool) -> None:
        cut = self.rng.randrange(1, len(shares)) if len(shares) > 1 else 0
        batches = [shares[:cut], shares[cut:]] if cut and self.rng.random() < 0.4 else [shares]
        for layer in SPECS:
            if layer == LEFT_OUT and self.rng.random() < 0.3:
                continue
            asks = calls_hooks and layer != NEVER_ASKS
            for batch in batches:
                for share in batch:
                    self._write(layer, share)
                for _ in range(asks * self.rng.randint(1, 2)):
                    self.side.ensure_loaded(layer)
                for share in batch:
                    self.device.forward(partial(self._check, [layer], share))
                if asks:
                    self.side.on_layer_written(meta, layer)
        if calls_hooks and self.rng.random() < 0.1:
            self.side.ensure_loaded("of another model")
            self.side.on_layer_written(meta, "of another model")

    def _write(self, layer: str, share: Share) -> None:
        request, first, stop = share
        rows = [self._row(layer, request, position) for position in range(first, stop)]
        values = torch.from_numpy(state(layer, request.seed)[first:stop])

        def write() -> None:
            for (block, offset), value in zip(rows, values, strict=True):
                self.caches[layer][block, offset] = value

        self.device.forward(write)
        request.known[layer][first:stop] = True

    def _check(self, layers: list[str], share: Share) -> None:
        """Check the state before each token, which attention reads."""
        request, first, stop = share
        for layer in layers:
            window = SPECS[layer].window
            start = max(0, first - window + 1) if window else 0
            for position in range(start, stop):
                if request.known[layer][position]:
                    block, offset = self._row(layer, request, position)
                    found = self.caches[layer][block, offset].numpy()
                    if (found != state(layer, request.seed)[position]).any():
                        self.wrong.append(f"step {self._step}: {layer} reads token {position}")

    # The scheduler's part

    def _admit(self, meta: StepMetadata) -> None:
        request = Request(next(self._seeds))
        boundary = self.rng.randrange(MAX_TOKENS // 2) if self.rng.random() < 0.8 else 0
        if not self._grow(request, boundary):
            return
        self.requests.append(request)
        if not boundary or len(self.slots) < 4:
            return
        # vLLM may admit fewer tokens than are stored, where nothing is needed at the boundary.
        stored = min(-(-boundary // CHUNK) * CHUNK, MAX_TOKENS)
        end = boundary if self.rng.random() < 0.7 else stored
        spans, used = [], []
        for kind in (KV, SWA):
            starts = range(0, end, CHUNK) if kind is KV else [(boundary - 1) // CHUNK * CHUNK]
            last = end if kind is KV else boundary
            offsets = []
            for start in starts:
                used.append(slot := self.slots.pop())
                offsets.append(slot * SLOT_BYTES)
                copy = ArtifactCopy(kind, start, min(start + CHUNK, last), offsets[-1])
                self._store(copy, request)
            spans.append(ArtifactSpan(kind, starts[0], last, CHUNK, offsets))
        name = f"r{request.seed}"
        request.parked = self.rng.random() < 0.2
        blocks = {}
        for x in MODEL.page_groups[KV] + MODEL.page_groups[SWA]:
            pages = x.pages_needed(0, boundary)
            ids = request.tables[x.group][pages.start : pages.stop]
            blocks[x.state_type, x.group] = Blocks(pages.start, ids)
        load = Load(name, spans, blocks, request.parked, boundary, request.seed)
        meta.loads.append(load)
        self._loads[request.seed] = used
        request.computed = boundary
        for layer, known in request.known.items():
            tokens = SPECS[layer].tokens_needed(0, boundary)
            known[tokens.start : tokens.stop] = True

    def _shares(self) -> list[Share]:
        shares = []
        for request in self.requests:
            stop = request.computed + self.rng.choice([1, 1, 7, 40])
            if request.parked or stop > MAX_TOKENS or not self._grow(request, stop):
                continue
            shares.append(Share(request, request.computed, stop))
            request.computed = stop
        return shares

    def _order_saves(self, meta: StepMetadata, shares: list[Share]) -> None:
        for request, first, stop in shares:
            for end in range((first // CHUNK + 1) * CHUNK, stop + 1, CHUNK):
                if self.rng.random() < 0.8 and (save := self._save(request, end)):
                    meta.saves.append(save)

    def _end(self, request: Request) -> None:
        """Finish a request: its blocks are free at once, although its end is saved in the next
        step."""
        self.requests.remove(request)
        if self.rng.random() < 0.6 and (save := self._save(request, request.computed)):
            self.early.append(save)
        blocks = [x for table in request.tables.values() for x in table]
        self.free[:0] = reversed(blocks)

    def _take_early(self) -> list[Save]:
        saves, self.early = self.early, []
        return saves

    def _save(self, request: Request, end: int) -> Save | None:
        start = (end - 1) // CHUNK * CHUNK
        if not end or len(self.slots) < 4:
            return None
        copies, blocks = [], {}
        for kind in (KV, SWA):
            copies.append(ArtifactCopy(kind, start, end, self.slots.pop() * SLOT_BYTES))
            for x in MODEL.page_groups[kind]:
                pages = x.pages_needed(start, end)
                ids = request.tables[x.group][pages.start : pages.stop]
                blocks[kind, x.group] = Blocks(pages.start, ids)
        save_id = next(self._seeds)
        self._saves[save_id] = [(copy, request) for copy in copies]
        return Save([save_id], PageCopy(copies, blocks))

    def _settle(self) -> None:
        """Check the state that is reported as saved, and reuse reported slots."""
        report = self.side.take_report()
        loaded, failed = self.side.take_transfers()
        assert not failed
        assert not (report and (report.unsaved or report.broken))
        for request in self.requests:
            request.parked = request.parked and f"r{request.seed}" not in loaded
        for save_id in report.saved if report else ():
            for copy, request in self._saves.pop(save_id):
                self._compare(copy, request)
                self._give_back(copy.offset // SLOT_BYTES)
        for load_id in report.loaded if report else ():
            for slot in self._loads.pop(load_id):
                self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self.arena.view[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = STALE
        self.slots.append(slot)

    # Stored state

    def _store(self, copy: ArtifactCopy, request: Request) -> None:
        for _, value, row in self._rows(copy, request):
            row[:] = value

    def _compare(self, copy: ArtifactCopy, request: Request) -> None:
        for layer, value, row in self._rows(copy, request):
            if (row != value).any():
                self.wrong.append(f"step {self._step}: {layer} is saved wrongly")

    def _rows(
        self, copy: ArtifactCopy, request: Request
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield layer, state and place in the arena of each known token of an artifact."""
        for segment in LAYOUT.segments(copy.state_type, copy.start, copy.end):
            x, start = segment.layer, copy.offset + segment.offset
            for position in x.tokens_needed(copy.start, copy.end):
                at = start + (position - segment.first_page * x.block_tokens) * TOKEN_BYTES
                restored = position >= request.computed or request.known[x.layer][position]
                if restored:
                    value = state(x.layer, request.seed)[position]
                    yield x.layer, value, self.arena.view[at : at + TOKEN_BYTES]

    def _row(self, layer: str, request: Request, position: int) -> tuple[int, int]:
        x = SPECS[layer]
        return request.tables[x.group][position // x.block_tokens], position % x.block_tokens

    def _grow(self, request: Request, tokens: int) -> bool:
        missing = {
            x.group: -(-tokens // x.block_tokens) - len(request.tables[x.group])
            for x in MODEL.layers
        }
        if sum(max(0, n) for n in missing.values()) > len(self.free):
            return False
        for group, number in missing.items():
            request.tables[group] += [self.free.pop(0) for _ in range(number)]
        return True


@pytest.mark.parametrize("known", [False, True], ids=["hooks count", "microbatches known"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_every_page_that_is_read_and_every_artifact_that_is_sealed_is_right(
    known: bool, seed: int
) -> None:
    world = World(Random(seed), told_of_microbatches=known)
    try:
        world.run(steps=10)
        assert world.wrong == []
    finally:
        world.close()


def _first_hook_only(patch: pytest.MonkeyPatch) -> None:
    written = WorkerSide.on_layer_written

    def once(side: WorkerSide, meta: StepMetadata, layer: str) -> None:
        if side._step is None or layer not in side._step.saved:
            written(side, meta, layer)

    patch.setattr(WorkerSide, "on_layer_written", once)
    patch.setattr(AdversarialDevice, "layers_per_copy", 1)


def _pages_split_nowhere(patch: pytest.MonkeyPatch) -> None:
    def all_overlapped(self: CopyPlanner, loads: list[Load]) -> tuple[list[Copies], list[Copies]]:
        return [], self.plan_loads(loads)

    patch.setattr(CopyPlanner, "plan_layerwise", all_overlapped)


def _hooks_always_called(patch: pytest.MonkeyPatch) -> None:
    loads = WorkerSide.start_loads
    patch.setattr(WorkerSide, "start_loads", lambda side, meta, hooks_called: loads(side, meta))


def _without(call: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(AdversarialDevice, call, lambda *_: None)


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdversarialDevice, "fence", lambda _: lambda: True)


def _no_fence_of_parked_loads(patch: pytest.MonkeyPatch) -> None:
    load = AdversarialDevice.load_parked

    def unfenced(device: AdversarialDevice, *arguments: Any) -> Callable[[], bool]:
        load(device, *arguments)
        return lambda: True

    patch.setattr(AdversarialDevice, "load_parked", unfenced)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(_pages_split_nowhere, id="half a page is loaded late"),
        pytest.param(_first_hook_only, id="a microbatch is taken for the batch"),
        pytest.param(_hooks_always_called, id="a full graph calls no hooks"),
        pytest.param(
            lambda patch: patch.setattr(LayerHooks, "__contains__", lambda *_: True),
            id="a layer that never asks is waited for",
        ),
        pytest.param(_without("make_copies_wait"), id="copies overtake the forward"),
        pytest.param(_without("make_forward_wait"), id="the forward overtakes copies"),
        pytest.param(_without("make_forward_wait_for_saves"), id="the forward overtakes saves"),
        pytest.param(_no_fence, id="reports overtake copies"),
        pytest.param(_no_fence_of_parked_loads, id="a request goes on before its parked load"),
    ],
)
def test_the_adversary_finds(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(100):
        world = World(Random(seed))
        try:
            world.run(steps=10)
            found = bool(world.wrong)
        finally:
            world.close()
        if found:
            return
    pytest.fail("every page was right all the same")
