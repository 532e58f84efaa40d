"""vLLM's part of an engine, as far as a connector sees it: blocks, steps, and a known forward.

The connector is the real one, both roles of it. Each hook is called when and as often as vLLM
does; which requests run, are preempted or find no room is chosen by the seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from hetero_connector import connector as connector_module
from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.connector import HeteroConnector
from hetero_connector.engine.messages import StepMetadata
from hetero_connector.engine.scheduler.scheduler_side import Policies, SchedulerSide
from hetero_connector.engine.worker import worker_side
from hetero_connector.engine.worker.worker_side import WorkerSide
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.planner.checkpoints import Full
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import Parking
from hetero_connector.spec import LayerSpec
from hetero_connector.store.artifact_store import ArtifactStore
from tests.engine.adversarial_device import AdversarialDevice, Stream
from tests.engine.fakes import FakeBlockTables, FakeRequest, scheduled
from tests.engine.small_pages import (
    CHUNK,
    MAX_TOKENS,
    NEVER_ASKS,
    NUM_BLOCKS,
    TOKEN_BYTES,
    page_caches,
)

MOST_RUNNING = 4
LOAD_DEADLINE_S = 10.0
PATIENCE_S = 3 * LOAD_DEADLINE_S
"""By then a request is answered: each of its reads has a deadline."""
_NULL_BLOCK = 0
_PARKING: Sequence[Sequence[Parking]] = (("never",), ("always",), ("never", "always"))
"""The ways to park the loads of one engine: each load draws one of them."""
States = npt.NDArray[np.uint8]
"""`[tokens, layers, TOKEN_BYTES]`."""


class PrefixStates:
    """The state of every layer after each token: of all tokens before it, the tenant and the
    weights."""

    def __init__(self, num_layers: int, tenant: Hashable, weights: Hashable) -> None:
        self._shape = (-1, num_layers, TOKEN_BYTES)
        self._digests = [hashlib.blake2b(repr((tenant, weights)).encode()).digest()]
        self._rows = bytearray()

    def of(self, tokens: Sequence[int]) -> States:
        """Return the states of a prompt, which only ever grows."""
        size = self._shape[1] * TOKEN_BYTES
        for token in tokens[len(self._digests) - 1 :]:
            digest = hashlib.blake2b(self._digests[-1] + token.to_bytes(2)).digest()
            self._digests.append(digest)
            self._rows += digest[:size]
        return np.frombuffer(bytes(self._rows), np.uint8).reshape(self._shape)[: len(tokens)]


@dataclass(eq=False)
class Request(FakeRequest):
    """One request, and the state that its pages must hold."""

    ends_at: int = 0
    """It has decoded enough when it has so many tokens."""
    truth: States = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    lives: int = 0
    """The number of times that it was admitted or preempted."""
    asked_again_s: float | None = None
    """Since when it is told to ask again."""
    asked_late: int = 0
    """The number of times that it was told so although everything's deadline had passed."""

    @property
    def is_parked(self) -> bool:
        """Return whether it waits for the end of its load, or for a step after it."""
        return self.status is RequestStatus.WAITING_FOR_REMOTE_KVS


class FailingDevice(AdversarialDevice):
    """A device of which copies fail on demand, but for parked loads: those end no engine."""

    def __init__(self, early: Callable[[], bool]) -> None:
        super().__init__(early)
        self.fails_next = False
        self.has_failed = False

    def copy(self, stream: Stream, run: Callable[[], None]) -> None:
        """Issue a copy, or fail."""
        if self.fails_next and stream is not Stream.PARKED_LOADS:
            self.fails_next, self.has_failed = False, True
            raise RuntimeError("the device fails")
        super().copy(stream, run)


class Share(NamedTuple):
    """The tokens of a request that a step computes."""

    request: Request
    first: int
    stop: int
    life: int


@dataclass(frozen=True)
class Cached:
    """An ended request's pages in vLLM's own prefix cache."""

    tokens: list[int]
    tenant: Hashable
    truth: States
    tables: tuple[list[int], ...]


class SmallEngine:
    """An engine over a store, stepped by hand, from its start to its end."""

    def __init__(
        self,
        rng: Random,
        layout: ArtifactLayout,
        store: ArtifactStore,
        recorder: Recorder,
        weights: Callable[[], Hashable],
    ) -> None:
        """`weights`: those of now."""
        self.rng = rng
        self.wrong: list[str] = []
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.ended: list[list[int]] = []
        """The tokens of requests that have ended."""
        self.restored = 0
        """Tokens, since the start."""
        self._layout = layout
        self._weights = weights
        self._layers = layout.model.layers
        self._is_async = rng.random() < 0.5
        self._full_graphs = rng.random() < 0.2
        self._parking: Sequence[Parking] = rng.choice(_PARKING)
        self._received = set[str]()
        """Parked requests whose load has ended."""
        self._aborted: dict[str, tuple[list[int], ...]] = {}
        """Blocks of requests that ended while parked: vLLM frees them when the load has ended."""
        self._frees_first = rng.random() < 0.5
        self._caches = page_caches(layout.model)
        self.device = FailingDevice(lambda: rng.random() < 0.5)
        self._tables = FakeBlockTables()
        self._free = list(range(1, NUM_BLOCKS))
        self._zeroes = rng.random() < 0.3
        self._to_zero: list[int] = []
        """Blocks that are new in this step, if vLLM clears such before its first call."""
        self._users = Counter[int]()
        """Requests and entries of the prefix cache that use a block."""
        self._cached: list[Cached] = []
        self._reports: list[tuple[KVConnectorOutput, list[Share]]] = []
        """Steps that ran, and of which the scheduler has not heard."""
        self._known: dict[tuple[str, Hashable], PrefixStates] = {}
        self._num_requests = 0
        self.side = self._scheduler_side(store, recorder)
        worker = WorkerSide(
            layout,
            0,
            NUM_BLOCKS,
            rng.choice(("on", "auto", "off")),
            recorder,
            recovers=len({x.group for x in self._layers}) == 1,
        )
        transfer = SimpleNamespace(kv_connector_extra_config={"dram_gib": 0.01}, engine_id="small")
        config: Any = SimpleNamespace(kv_transfer_config=transfer, instance_id="1")
        none: Any = None
        with (
            patch.object(connector_module, "open_scheduler_side", lambda *_: self.side),
            patch.object(connector_module, "open_worker_side", lambda *_: worker),
            patch.object(worker_side, "device_of", lambda *_: self.device),
        ):
            self.scheduler = HeteroConnector(config, KVConnectorRole.SCHEDULER, none)
            self.worker = HeteroConnector(config, KVConnectorRole.WORKER, none)
            tables: Any = self._tables
            self.scheduler.bind_kv_cache_manager(tables)
            self.worker.register_kv_caches(self._caches)
        self.worker.get_handshake_metadata()
        self._worker_side = worker

    def _scheduler_side(self, store: ArtifactStore, recorder: Recorder) -> SchedulerSide:
        model = self._layout.model
        costs = CostModel(ComputeRegression(), LoadModel(model.state_types))
        return SchedulerSide(
            self._layout,
            ChainHasher(b"e" * 32, CHUNK),
            store,
            recorder,
            Policies(RestorePlanner(self._layout, costs, "always_load"), Full()),
            layerwise=True,
            load_deadline_s=LOAD_DEADLINE_S,
        )

    def end_process(self) -> None:
        """The process ends: only the worker's mapping of the arena is given back."""
        self._worker_side.close()

    @property
    def is_busy(self) -> bool:
        """Return whether vLLM would go on stepping."""
        live = self.running or self.waiting or self._reports
        return bool(live) or self.scheduler.has_pending_push_work()

    def counters(self) -> Counter[str]:
        """Counters of both connectors since the last call."""
        found = Counter[str]()
        for connector in (self.scheduler, self.worker):
            found.update((connector._recorder.drain() or {}).get(COUNTERS, {}))
        return found

    # --- what users do ---------------------------------------------------------------------------

    def come(self, tokens: list[int], tenant: str | None, decodes: int) -> Request:
        """A request arrives."""
        self._num_requests += 1
        request = Request(
            f"r{self._num_requests}", list(tokens), cache_salt=tenant, status=RequestStatus.WAITING
        )
        request.ends_at = len(tokens) + decodes
        if decodes == 1 and self.rng.random() < 0.3:
            request.kv_transfer_params = {"do_remote_decode": True}
        request.truth = np.zeros((MAX_TOKENS, len(self._layers), TOKEN_BYTES), np.uint8)
        self.scheduler.on_new_request(request)
        self.waiting.append(request)
        return request

    def finish(self, request: Request) -> None:
        """It has all its tokens, or its client has gone."""
        for requests in (self.running, self.waiting):
            with suppress(ValueError):
                requests.remove(request)
        request.lives += 1
        self.ended.append(list(request.all_token_ids))
        tables = self._tables.ids.pop(request.request_id, tuple([] for _ in self._groups))
        self.scheduler.request_finished_all_groups(request, tables)
        if request.is_parked and request.request_id not in self._received:
            self._aborted[request.request_id] = tables
            self._tell_of_prefixes()
            return
        self._received.discard(request.request_id)
        whole = request.num_computed_tokens // self._grid * self._grid
        if whole and not request.is_parked and self.rng.random() < 0.7:
            kept = [t[: whole // g.block_tokens] for t, g in zip(tables, self._groups, strict=True)]
            self._use(kept)
            known = request.all_token_ids[:whole]
            self._cached.append(
                Cached(known, request.cache_salt, request.truth.copy(), tuple(kept))
            )
        self._disuse(tables)
        self._tell_of_prefixes()

    def reset(self) -> bool:
        """New weights, of which only a reset tells; vLLM drops its own pages if nothing runs."""
        self._tell_of_prefixes()
        is_kept = bool(self.scheduler.reset_cache())
        if not self.running and not any(request.is_parked for request in self.waiting):
            self.forget_prefixes()
        for request in self.waiting:
            request.asked_again_s, request.asked_late = None, 0
        return is_kept

    def change_weights(self, version: str) -> None:
        """New weights under a name."""
        self._tell_of_prefixes()
        self.scheduler.on_weights_changed(version)

    def forget_prefixes(self, count: int = 1_000) -> None:
        """Evict entries of vLLM's own prefix cache."""
        for cached in self._cached[:count]:
            self._disuse(cached.tables)
        del self._cached[:count]
        self._tell_of_prefixes()

    # --- a step, in vLLM's order of calls --------------------------------------------------------

    def step(self, now_s: float, preempts: bool = False) -> None:
        """Schedule, run the forward, and hear of the step before this one or of this one."""
        self._tell_of_prefixes()
        shares, output = self._schedule(now_s, preempts)
        meta: Any = self.scheduler.build_connector_meta(output)
        for share in shares:
            share.request.num_computed_tokens = share.stop
        self._reports.append((self._execute(meta, shares, output), shares))
        while len(self._reports) > self._is_async or (self._reports and not shares):
            self._hear(*self._reports.pop(0))

    def _schedule(self, now_s: float, preempts: bool) -> tuple[list[Share], Any]:
        self._to_zero = []
        rng, shares, preempted = self.rng, list[Share](), set[str]()
        if preempts and self.running:
            preempted.add(self._preempt())
        for request in list(self.running):
            if request.request_id in preempted:
                continue
            first = request.num_computed_tokens
            stop = min(request.num_tokens, first + rng.choice((1, 7, 40, MAX_TOKENS)))
            if first == stop:  # its next token is not known yet
                continue
            self._recycle(request)
            while not self._grow(request, stop):
                preempted.add(self._preempt())
                if request.request_id in preempted:
                    break
            else:
                shares.append(Share(request, first, stop, request.lives))
        new: list[Any] = []
        for request in list(self.waiting) if not preempted else ():
            if len(self.running) >= MOST_RUNNING:
                break
            share = self._admit(request, now_s)
            if share is not None:
                shares.append(share)
                if request.lives == 1:
                    ids = self._tables.ids[request.request_id]
                    new.append(SimpleNamespace(req_id=request.request_id, block_ids=ids))
        counts = {share.request.request_id: share.stop - share.first for share in shares}
        output: Any = scheduled(**counts)
        output.preempted_req_ids = preempted or None
        output.scheduled_new_reqs = new
        output.new_block_ids_to_zero = self._to_zero or None
        return shares, output

    def _admit(self, request: Request, now_s: float) -> Share | None:
        """Ask what can be restored, and begin if there is room."""
        if request.is_parked:
            return self._admit_parked(request)
        local, tables, truth = self._local_hit(request)
        self.side._parking = self.rng.choice(self._parking)
        restored, parked = self.scheduler.get_num_new_matched_tokens(request, local)
        if restored is None:
            request.asked_again_s = request.asked_again_s or now_s
            request.asked_late += now_s > request.asked_again_s + PATIENCE_S
            return None
        request.asked_again_s, request.asked_late = None, 0
        first = local + restored
        # Parked requests have room for their whole prompt, so that none waits for another's pages.
        size = MAX_TOKENS if parked else self.rng.choice((1, 7, 40, MAX_TOKENS))
        stop = min(request.num_tokens, first + size)
        self._use(tables)
        self._tables.ids[request.request_id] = tables
        if not self._grow(request, stop, computed=first):
            self._disuse(self._tables.ids.pop(request.request_id))
            return None
        self.scheduler.update_state_after_alloc(request, None, restored)
        self.scheduler.get_external_cache_hit_sources(request, restored)
        request.truth[:local] = truth[:local]
        request.truth[local:first] = self._states(request)[local:first]
        request.num_computed_tokens = first
        self.restored += restored
        if parked:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            return None
        return self._run(request, stop)

    def _admit_parked(self, request: Request) -> Share | None:
        """Run a parked request if its load has ended."""
        if request.request_id not in self._received:
            return None
        first = request.num_computed_tokens
        stop = min(request.num_tokens, first + self.rng.choice((1, 7, 40, MAX_TOKENS)))
        if not self._grow(request, stop):
            return None
        self._received.remove(request.request_id)
        self.scheduler.update_state_after_alloc(request, None, 0)
        return self._run(request, stop)

    def _run(self, request: Request, stop: int) -> Share:
        request.status = RequestStatus.RUNNING
        request.lives += 1
        self.waiting.remove(request)
        self.running.append(request)
        return Share(request, request.num_computed_tokens, stop, request.lives)

    def _preempt(self) -> str:
        request = self.running.pop()
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.lives += 1
        self._disuse(self._tables.ids.pop(request.request_id))
        self.waiting.insert(0, request)
        return request.request_id

    def _execute(self, meta: Any, shares: list[Share], output: Any) -> KVConnectorOutput:
        worker, calls_hooks = self.worker, not self._full_graphs
        graphs = SimpleNamespace(name="PIECEWISE" if calls_hooks else "FULL")
        context: Any = SimpleNamespace(
            attn_metadata={"layer": object()}, slot_mapping={}, cudagraph_runtime_mode=graphs
        )
        self.device.forward(partial(self._zero, output.new_block_ids_to_zero or ()))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        assert isinstance(meta, StepMetadata)
        loads_first = bool(meta.loads) or output.has_sync_kv_loads
        if loads_first or not shares:
            worker.start_load_kv(context)
        if shares:
            self._forward(shares, calls_hooks)
            if not loads_first:
                worker.start_load_kv(context)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        told = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        if self.rng.random() < 0.5:  # the scheduler has the step's tokens before it goes on
            self.device.synchronize()
        return told

    def _hear(self, told: KVConnectorOutput, shares: list[Share]) -> None:
        assert not told.invalid_block_ids, "a lost load ends this engine"
        assert not told.failed_recving
        self.scheduler.update_connector_output(told)
        for request_id in told.finished_recving or ():
            self._on_received(request_id)
        for request, _, stop, life in shares:
            if request.lives != life or stop < request.num_tokens:
                continue
            request.all_token_ids.append(self.rng.randrange(3))
            if request.num_tokens >= request.ends_at:
                self.finish(request)

    def _on_received(self, request_id: str) -> None:
        """A parked load has ended, of a request that waits for it or has ended meanwhile."""
        if request_id in self._aborted:
            self._disuse(self._aborted.pop(request_id))
            return
        assert request_id not in self._received, "reported twice"
        assert any(x.is_parked and x.request_id == request_id for x in self.waiting)
        self._received.add(request_id)

    # --- the forward -----------------------------------------------------------------------------

    def _forward(self, shares: list[Share], calls_hooks: bool) -> None:
        for share in shares:
            span = slice(share.first, share.stop)
            share.request.truth[span] = self._states(share.request)[span]
        for number, layer in enumerate(self._layers):
            asks = calls_hooks and layer.layer != NEVER_ASKS
            for share in shares:
                self.device.forward(self._write(number, layer, share))
            if asks:
                self.worker.wait_for_layer_load(layer.layer)
            for share in shares:
                self.device.forward(self._read(number, layer, share))
            if asks:
                cache: Any = self._caches[layer.layer]
                none: Any = None
                self.worker.save_kv_layer(layer.layer, cache, none)

    def _zero(self, blocks: Sequence[int]) -> None:
        for cache in self._caches.values():
            cache[list(blocks)] = 0

    def _write(self, number: int, layer: LayerSpec, share: Share) -> Callable[[], None]:
        rows = self._rows(layer, share.request, range(share.first, share.stop))
        values = torch.from_numpy(share.request.truth[share.first : share.stop, number].copy())

        def write() -> None:
            self._caches[layer.layer][rows] = values

        return write

    def _read(self, number: int, layer: LayerSpec, share: Share) -> Callable[[], None]:
        """Attention reads what is before each token."""
        window = layer.window
        start = max(0, share.first - window + 1) if window else 0
        rows = self._rows(layer, share.request, range(start, share.stop))
        right = share.request.truth[start : share.stop, number].copy()
        name = share.request.request_id

        def read() -> None:
            found = self._caches[layer.layer][rows].numpy()
            bad = np.flatnonzero((found != right).any(axis=1))
            if bad.size:
                self.wrong.append(
                    f"{name}: {layer.layer} reads other state of token {start + bad[0]}"
                )

        return read

    def _rows(
        self, layer: LayerSpec, request: Request, positions: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = np.arange(positions.start, positions.stop)
        table = np.array(self._tables.ids[request.request_id][layer.group])
        blocks = table[at // layer.block_tokens]
        assert blocks.all(), "a null block is used"
        return torch.from_numpy(blocks), torch.from_numpy(at % layer.block_tokens)

    def _states(self, request: Request) -> States:
        """Return the states that the present weights make of the request's tokens."""
        weights = self._weights()
        key = request.request_id, weights
        if key not in self._known:
            self._known[key] = PrefixStates(len(self._layers), request.cache_salt, weights)
        return self._known[key].of(request.all_token_ids)

    # --- blocks ----------------------------------------------------------------------------------

    @property
    def _groups(self) -> list[LayerSpec]:
        """A layer of each KV cache group."""
        by_group = {layer.group: layer for layer in self._layers}
        return [by_group[group] for group in sorted(by_group)]

    @property
    def _grid(self) -> int:
        return self._layout.model.alignment

    def _local_hit(self, request: Request) -> tuple[int, tuple[list[int], ...], States]:
        """The longest prefix in vLLM's own pages, and these pages."""
        best: tuple[int, Cached | None] = (0, None)
        for cached in self._prefixes():
            if cached.tenant != request.cache_salt:
                continue
            same = _common(cached.tokens, request.all_token_ids[:-1])
            hit = same // self._grid * self._grid
            while hit and not self._holds_window(cached, hit):
                hit -= self._grid
            if hit > best[0]:
                best = hit, cached
        hit, found = best
        if found is None:
            return 0, tuple([] for _ in self._groups), request.truth
        tables = tuple(
            [
                _NULL_BLOCK if page < self._first_page(layer, hit) else table[page]
                for page in range(hit // layer.block_tokens)
            ]
            for table, layer in zip(found.tables, self._groups, strict=True)
        )
        return hit, tables, found.truth

    def _prefixes(self) -> Iterator[Cached]:
        yield from self._cached
        for request in self.running:
            known = request.all_token_ids[: request.num_computed_tokens]
            if len(known) < self._grid:
                continue
            tables = self._tables.ids[request.request_id]
            yield Cached(known, request.cache_salt, request.truth, tables)

    def _holds_window(self, cached: Cached, hit: int) -> bool:
        return all(
            all(table[self._first_page(layer, hit) : hit // layer.block_tokens])
            for table, layer in zip(cached.tables, self._groups, strict=True)
        )

    def _first_page(self, layer: LayerSpec, computed: int) -> int:
        """The first page that a token after the first `computed` reads."""
        return max(0, computed - layer.window + 1) // layer.block_tokens if layer.window else 0

    def _grow(self, request: Request, tokens: int, computed: int | None = None) -> bool:
        """Allocate what is missing; False, and nothing of it, if there are too few blocks.

        `computed`: tokens before which no window is needed, of a request that is admitted.
        """
        tables = self._tables.ids[request.request_id]
        added: list[list[int]] = []
        for table, layer in zip(tables, self._groups, strict=True):
            first = self._first_page(layer, computed or 0)
            pages = range(len(table), -(-tokens // layer.block_tokens))
            blocks = [_NULL_BLOCK if page < first else self._take() for page in pages]
            added.append([x for x in blocks if x is not None])
            if len(added[-1]) < len(blocks):
                self._disuse(added)
                return False
        for table, blocks_ in zip(tables, added, strict=True):
            table += blocks_
        return True

    def _recycle(self, request: Request) -> None:
        """Give back pages that no window reaches any more."""
        for table, layer in zip(self._tables.ids[request.request_id], self._groups, strict=True):
            for page in range(self._first_page(layer, request.num_computed_tokens)):
                if table[page]:
                    self._disuse([[table[page]]])
                    table[page] = _NULL_BLOCK

    def _take(self) -> int | None:
        while not self._free and self._cached:
            self.forget_prefixes(1)
        if not self._free:
            return None
        block = self._free.pop(0)
        self._users[block] = 1
        if self._zeroes:
            self._to_zero.append(block)
        return block

    def _use(self, tables: Sequence[list[int]]) -> None:
        self._users.update(block for table in tables for block in table if block)

    def _disuse(self, tables: Sequence[list[int]]) -> None:
        for block in (block for table in tables for block in table if block):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._free.insert(0 if self._frees_first else len(self._free), block)

    def _tell_of_prefixes(self) -> None:
        """Show the connector the entries of the prefix cache: it counts them."""
        entries = enumerate(self._prefixes())
        self._tables.prefixes = {number.to_bytes(2): 1 for number, _ in entries}


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count
