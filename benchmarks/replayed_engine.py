"""Everything of an engine with HeteroConnector but vLLM and the bytes: a request in microseconds.

The package's own restorer, planner, saver, checkpoint policy and store serve requests that are
given with their tokens; steps of the forward pass are only counted. The store's artifacts are
small: what is written and moved is told by the layout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.agent_sessions import TokenTurn
from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.engine.messages import Save as SaveOrder
from hetero_connector.engine.scheduler.block_tables import BlockTable
from hetero_connector.engine.scheduler.peer_matcher import PeerMatcher
from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.restore_counter import RestoreCounter
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.engine.scheduler.saver import Saver
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import CheckpointPolicy
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import ReadTiming, Restore, Save, Wanted
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn

STEP_TOKENS = 8192
"""Tokens of a step of prefill."""


class SmallStore:
    """An `ArtifactStore` that holds 1/`scale` of every artifact, and counts whole ones.

    With `priced_as` the planner is told that everything lies in that tier, wherever it does.
    """

    def __init__(self, inner: ArtifactStore, scale: float, priced_as: Tier | None = None) -> None:
        self.inner = inner
        self.sealed_bytes: defaultdict[StateType, int] = defaultdict(int)
        """Of whole artifacts, since the start."""
        self._scale = scale
        self._priced_as = priced_as
        self._sizes: dict[int, Mapping[StateType, int]] = {}
        self._answers: dict[ChunkKey, tuple[StoredChunk, StoredChunk]] = {}
        """What the store said of a chunk and what was answered, the tier changed."""
        self._tiers: dict[int, dict[StateType, Tier]] = {}

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        found = self.inner.match(chain)
        if self._priced_as is None:
            return found
        return [self._moved(x) for x in found]

    def holdings(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        return self.match(chain)  # nothing leaves a gap here

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        return self.inner.tails(parent)

    def missing(self, chunk: ChunkRange, state_types: Sequence[StateType]) -> list[StateType]:
        return self.inner.missing(chunk, state_types)

    def begin_restore(
        self, wanted: Sequence[Wanted], copies: Mapping[ArtifactId, PeerCopy] | None = None
    ) -> Restore:
        found = [Wanted(state_type, self._found(chunks)) for state_type, chunks in wanted]
        return self.inner.begin_restore(found, copies)

    def begin_save(self, chunk: ChunkRange, sizes: Mapping[StateType, int]) -> Save | None:
        small = {t: math.ceil(n / self._scale) for t, n in sizes.items()}
        save = self.inner.begin_save(chunk, small)
        if save is not None:
            self._sizes[id(save)] = sizes
        return save

    def complete_save(self, save: Save) -> None:
        for state_type, size_bytes in self._sizes.pop(id(save)).items():
            self.sealed_bytes[state_type] += size_bytes
        self.inner.complete_save(save)

    def abandon_save(self, save: Save) -> None:
        del self._sizes[id(save)]
        self.inner.abandon_save(save)

    @property
    def generation(self) -> Generation:
        return self.inner.generation

    def reset(self) -> bool:
        return self.inner.reset()

    def catch_up(self) -> Generation:
        return self.inner.catch_up()

    def expect(self, expected: ExpectedReturn) -> None:
        self.inner.expect(expected)

    def session_returned(self, session: Hashable) -> None:
        self.inner.session_returned(session)

    def protect_chain(
        self, session: Hashable, leaves: Sequence[ChunkKey], until_s: float, tenant: bytes = b""
    ) -> None:
        self.inner.protect_chain(session, leaves, until_s, tenant)

    def decline(self, chunks: Sequence[StoredChunk]) -> None:
        self.inner.decline(self._found(chunks))

    @property
    def reading_bytes(self) -> Mapping[Tier, int]:
        return self.inner.reading_bytes

    def take_timings(self) -> list[ReadTiming]:
        return self.inner.take_timings()

    def flush(self, deadline_s: float) -> bool:
        return self.inner.flush(deadline_s)

    def close(self, deadline_s: float = 30.0) -> None:
        self.inner.close(deadline_s)

    def _found(self, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """What the store itself said of chunks that `match` answered with."""
        if self._priced_as is None:
            return chunks
        return [self._answers[x.chunk.key][0] for x in chunks]

    def _moved(self, stored: StoredChunk) -> StoredChunk:
        """As if in the other tier; chunks that hold the same share one mapping, as in the index."""
        said, answer = self._answers.get(stored.chunk.key, (None, stored))
        if said is not stored:
            assert self._priced_as is not None
            if id(stored.tiers) not in self._tiers:
                self._tiers[id(stored.tiers)] = dict.fromkeys(stored.tiers, self._priced_as)
            answer = StoredChunk(stored.chunk, self._tiers[id(stored.tiers)], stored.offsets)
            self._answers[stored.chunk.key] = (stored, answer)
        return answer


@dataclass
class ReplayedRequest:
    """What the scheduler side reads of vLLM's request."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_tokens: int
    mm_features: Sequence[Any] = ()
    prompt_embeds: None = None
    lora_request: None = None
    cache_salt: None = None
    kv_transfer_params: None = None


class _Pages:
    """Block ids of one KV cache group: 0 for pages before the first that is held."""

    def __init__(self, first_held: int) -> None:
        self._first_held = first_held

    def __getitem__(self, pages: slice) -> list[int]:
        return [int(page >= self._first_held) for page in range(pages.start, pages.stop)]


def _table(pages: Sequence[_Pages]) -> BlockTable:
    return lambda group, span: pages[group][span.start : span.stop]


class _Decisions(Predictions):
    """Keeps the latest decision."""

    latest: RestoreDecision | None = None
    deepest: int = 0

    def on_decision(
        self,
        request_id: str,
        decision: RestoreDecision,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        num_tokens: int,
    ) -> None:
        super().on_decision(request_id, decision, stored, local_tokens, num_tokens)
        self.latest, self.deepest = decision, stored[-1].chunk.end


@dataclass(frozen=True)
class Served:
    """What came of one request."""

    stored_tokens: int
    """Leading tokens whose state was stored, in part at least."""
    resumed_tokens: int
    """Where the engine computed from."""
    new_tokens: int
    """Tokens, decoded ones included, of which nothing was stored."""
    load_s: float
    """Predicted, of loading: staging, and what the forward pass does not hide."""
    recompute_s: float
    """Predicted, of computing stored tokens again, for want of a checkpoint or by choice."""

    @property
    def restore_s(self) -> float:
        return self.load_s + self.recompute_s


class ReplayedEngine:
    """One engine: a store, a planner, and a checkpoint policy."""

    def __init__(
        self,
        layout: ArtifactLayout,
        store: SmallStore,
        planner: RestorePlanner,
        checkpoints: CheckpointPolicy,
        recorder: Recorder,
        *,
        clock: Callable[[], float],
        step_io: Callable[[], object] = lambda: None,
        count_hits: bool = True,
    ) -> None:
        """`step_io`: lets the store's I/O thread do something while a request is staged.

        `count_hits`: whether restores are counted in the metrics, which takes a while.
        """
        self.store = store
        self._layout, self._planner, self._step_io = layout, planner, step_io
        self._count_hits = count_hits
        self._decisions = _Decisions(
            recorder,
            planner.costs.load,
            store,
            clock,
        )
        self._restorer = Restorer(
            layout,
            store,
            recorder,
            planner,
            lambda _: EngineLoad(),
            self._decisions,
            PeerMatcher(layout, store, None, recorder, clock, math.inf),
            deadline_s=math.inf,
            clock=clock,
        )
        self._counter = RestoreCounter(layout, recorder)
        self._saver = Saver(layout, store, layout.model.tp_size, checkpoints)
        self._groups = 1 + max(x.group for x in layout.model.layers)
        self._served = 0

    def serve(self, turn: TokenTurn, chain: RequestChain) -> Served:
        """Restore, compute and save one request. `chain`: of all of the turn's tokens."""
        self._served += 1
        request = ReplayedRequest(
            str(self._served), turn.tokens, turn.prompt_tokens, turn.prompt_tokens
        )
        tracker = RequestTracker(request, chain)
        self._decisions.latest, self._decisions.deepest = None, 0
        while (restored := self._restorer.stage(tracker, 0)) is None:
            self._step_io()
        self._loaded(tracker)
        self._saver.on_admitted(tracker, restored)
        self._compute(tracker, restored, len(turn.tokens))
        decision, stored = self._decisions.latest, self._decisions.deepest
        self._decisions.forget(request.request_id)
        return Served(
            stored,
            restored,
            len(turn.tokens) - stored,
            decision.predicted.load_s if decision else 0.0,
            self._recompute_s(decision, stored, turn.prompt_tokens),
        )

    def _loaded(self, tracker: RequestTracker) -> None:
        """End the restore as the workers' reports would."""
        if tracker.restore is not None:
            if self._count_hits:
                self._counter.count(tracker.restore)
            tracker.restore.handle.release()
            tracker.restore = None

    def _compute(self, tracker: RequestTracker, restored: int, total_tokens: int) -> None:
        """Prefill by steps, decode by chunks: between chunk ends there is nothing to save."""
        request: Any = tracker.request
        done = restored
        for computed in self._steps(restored, request.num_prompt_tokens, total_tokens):
            request.num_tokens = max(request.num_tokens, min(computed + 1, total_tokens))
            held_from = done if computed <= request.num_prompt_tokens else computed - 1
            table = _table(self._pages(held_from))
            for order in self._saver.save_step(tracker, computed, table, ()):
                self._copied(order)
            self._step_io()
            done = computed
        request.num_tokens = total_tokens
        last: Any = self._pages(max(0, total_tokens - 2))
        # The last token sampled is never computed.
        for order in self._saver.save_end(tracker, total_tokens - 1, last):
            self._copied(order)
        self._saver.forget(tracker)

    def _steps(self, start: int, prompt_tokens: int, total_tokens: int) -> Iterator[int]:
        """How many tokens are computed after each step that may complete a chunk."""
        while start < prompt_tokens:
            start = min(start + STEP_TOKENS, prompt_tokens)
            yield start
        size = self._layout.chunk_tokens
        yield from range((prompt_tokens // size + 1) * size, total_tokens, size)

    def _pages(self, computed: int) -> list[_Pages]:
        """By group, what the engine holds when a step begins after `computed` tokens.

        vLLM frees the pages of a window group that no later token reads.
        """
        first = [0] * self._groups
        for layer in self._layout.model.layers:
            if layer.boundary_tokens:
                read_from = max(0, computed - layer.boundary_tokens)
                first[layer.group] = read_from // layer.block_tokens
        return [_Pages(page) for page in first]

    def _copied(self, order: SaveOrder) -> None:
        for save_id in order.save_ids:
            self._saver.on_report(save_id, self._layout.model.tp_size)

    def _recompute_s(
        self, decision: RestoreDecision | None, stored: int, prompt_tokens: int
    ) -> float:
        if decision is None:
            return 0.0
        rest = self._planner.plan((), stored, stored, prompt_tokens, EngineLoad())
        return max(0.0, decision.predicted.compute_s - rest.nothing.compute_s)
