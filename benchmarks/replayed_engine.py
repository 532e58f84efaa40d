"""Everything of an engine with HeteroConnector but vLLM and the bytes: a request in microseconds.

The package's own restorer, planner, saver, checkpoint policy and store serve requests that are
given with their tokens; steps of the forward pass are only counted. The store's artifacts are
small: what is written and moved is told by the layout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.agent_sessions import TokenTurn
from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, StoredChunk, Tier
from hetero_connector.artifacts.tails import AnsweredPrompts
from hetero_connector.engine.messages import Save as SaveOrder
from hetero_connector.engine.scheduler.block_tables import BlockTable
from hetero_connector.engine.scheduler.peer_matcher import PeerMatcher
from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.engine.scheduler.restore_counter import RestoreCounter
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.engine.scheduler.saver import Saver
from hetero_connector.engine.scheduler.shared_boundaries import SharedBoundaries
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import CheckpointPolicy
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Save, Wanted
from hetero_connector.store.catalog.restore import Restore

STEP_TOKENS = 8192
"""Tokens of a step of prefill."""


class SmallStore(ArtifactStore):
    """A store of 1/`scale` of every artifact, which counts whole ones."""

    scale = 1.0
    """Set it right after `open`, before anything is saved."""
    priced_as: Tier | None = None
    """The planner is given this tier for everything, wherever it is; None: the true tier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sealed_bytes: defaultdict[StateType, int] = defaultdict(int)
        """Bytes of whole artifacts, since the start."""
        self._sizes: dict[int, Mapping[StateType, int]] = {}
        self._answers: dict[ChunkKey, tuple[StoredChunk, StoredChunk]] = {}
        """The store's answer for each chunk, and the same with the tier changed."""
        self._tiers: dict[int, dict[StateType, Tier]] = {}

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        found = super().match(chain)
        if self.priced_as is None:
            return found
        return [self._moved(x) for x in found]

    def holdings(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        return self.match(chain)  # no chunk is ever missing here

    def begin_restore(
        self,
        wanted: Sequence[Wanted],
        copies: Mapping[ArtifactId, PeerCopy] | None = None,
        within_s: float | None = None,
    ) -> Restore:
        found = [Wanted(state_type, self._found(chunks)) for state_type, chunks in wanted]
        return super().begin_restore(found, copies, within_s)

    def begin_save(
        self, chunk: ChunkRange, sizes: Mapping[StateType, int], *, is_again: bool = False
    ) -> Save | None:
        small = {t: math.ceil(n / self.scale) for t, n in sizes.items()}
        save = super().begin_save(chunk, small, is_again=is_again)
        if save is not None:
            self._sizes[id(save)] = sizes
        return save

    def complete_save(self, save: Save) -> None:
        for state_type, size_bytes in self._sizes.pop(id(save)).items():
            self.sealed_bytes[state_type] += size_bytes
        super().complete_save(save)

    def abandon_save(self, save: Save) -> None:
        del self._sizes[id(save)]
        super().abandon_save(save)

    def decline(self, chunks: Sequence[StoredChunk]) -> None:
        super().decline(self._found(chunks))

    def _found(self, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """Return the store's own answers for chunks that `match` returned."""
        if self.priced_as is None:
            return chunks
        return [self._answers[x.chunk.key][0] for x in chunks]

    def _moved(self, stored: StoredChunk) -> StoredChunk:
        """Return the answer for the other tier; equal ones share one mapping, as in the index."""
        original, answer = self._answers.get(stored.chunk.key, (None, stored))
        if original is not stored:
            assert self.priced_as is not None
            if id(stored.tiers) not in self._tiers:
                self._tiers[id(stored.tiers)] = dict.fromkeys(stored.tiers, self.priced_as)
            answer = StoredChunk(stored.chunk, self._tiers[id(stored.tiers)], stored.offsets)
            self._answers[stored.chunk.key] = (stored, answer)
        return answer


@dataclass
class ReplayedRequest:
    """The fields of vLLM's request that the scheduler side reads."""

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
        tracker: RequestTracker,
        decision: RestoreDecision,
        num_tokens: int,
    ) -> None:
        super().on_decision(tracker, decision, num_tokens)
        self.latest, self.deepest = decision, tracker.stored_tokens


@dataclass(frozen=True)
class Served:
    """The result of one request."""

    stored_tokens: int
    """Leading tokens whose state was stored, at least in part."""
    resumed_tokens: int
    """Tokens before the first one that the engine computed."""
    new_tokens: int
    """Tokens without any stored state, decoded ones included."""
    load_s: float
    """Predicted seconds of loading: staging, and what the forward pass does not hide."""
    recompute_s: float
    """Predicted seconds of computing stored tokens again: no checkpoint, or cheaper."""

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
        """`step_io` runs one round of the store's I/O while a request is staged.

        `count_hits`: count restores in the metrics, which takes time.
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
        answered = AnsweredPrompts()
        self._restorer = Restorer(
            layout,
            store,
            recorder,
            planner,
            lambda *_: EngineLoad(),
            self._decisions,
            PeerMatcher(layout, store, None, recorder, clock, math.inf),
            SharedBoundaries(layout.model),
            answered,
            deadline_s=math.inf,
            clock=clock,
        )
        self._counter = RestoreCounter(layout, recorder, clock)
        self._saver = Saver(layout, store, layout.model.tp_size, checkpoints, answered)
        self._groups = 1 + max(x.group for x in layout.model.layers)
        self._served = 0

    def serve(self, turn: TokenTurn, chain: RequestChain) -> Served:
        """Restore, compute and save one request. `chain`: all tokens of the turn."""
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
        """Prefill by steps, decode by chunks: nothing is saved between the ends of chunks."""
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
        """Yield the number of computed tokens after each step that may complete a chunk."""
        while start < prompt_tokens:
            start = min(start + STEP_TOKENS, prompt_tokens)
            yield start
        size = self._layout.chunk_tokens
        yield from range((prompt_tokens // size + 1) * size, total_tokens, size)

    def _pages(self, computed: int) -> list[_Pages]:
        """Return the pages of each group that the engine holds after `computed` tokens.

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
