"""Window replays: their requests' steps load, protect and clear pages.

For vLLM the request resumes at `plan.resume_tokens` and computes from there, in any number of
steps. Until it reaches `plan.boundary`, each step loads the stored prefix-proportional state of the
tokens that it computes, and the forward must not write that state. The windows are written as in
any prefill. `docs/decisions/0013-window-replay.md` explains why they end up exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_connector.engine.messages import StepMetadata
from hetero_connector.engine.scheduler.block_tables import BlockTable
from hetero_connector.engine.scheduler.requests import PendingRestore, RequestTracker
from hetero_connector.engine.scheduler.restorer import Restorer
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.spec import Family, LayerSpec, ModelSpec, StateType

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


@dataclass
class Replay:
    """The replay of one admitted request."""

    pending: PendingRestore
    begun: bool = False

    def tokens_to_load(self, model: ModelSpec, computed: int, end: int) -> range:
        """Return the tokens whose stored state a step needs that computes [`computed`, `end`)."""
        # A page that the last step began may be loaded again: it is protected from writes.
        start = computed - computed % model.alignment if self.begun else self.pending.local_tokens
        return range(start, self._within(end))

    def shield(
        self, model: ModelSpec, computed: int, end: int, table: BlockTable, meta: StepMetadata
    ) -> None:
        """Add to `meta` the blocks that the step must not write, and those it must clear first."""
        for layer in _widest(model, model.prefix_types):
            pages = layer.pages_needed(computed, self._within(end))
            meta.protected.setdefault(layer.group, []).extend(table(layer.group, pages))
        if self.begun:
            return
        self.begun = True
        local, resume = self.pending.local_tokens, self.pending.plan.resume_tokens
        for layer in _widest(model, model.boundary_types):
            pages = layer.pages_needed(0, resume)
            # Pages below the local hit belong to the engine's own cache: exact, perhaps shared.
            own = range(max(pages.start, local // layer.block_tokens), pages.stop)
            ids = [block for block in table(layer.group, own) if block]
            meta.cleared.setdefault(layer.group, []).extend(ids)

    def ends_by(self, end: int) -> bool:
        """True if the tokens before `end` include all replayed tokens."""
        return end >= self.pending.plan.boundary

    def _within(self, end: int) -> int:
        return min(end, self.pending.plan.boundary)


class Replays:
    """The running replays of one engine, by request."""

    def __init__(self, model: ModelSpec, rule: WindowReplay | None, restorer: Restorer) -> None:
        """`rule`: None if this engine supports no replay (see `startup.replay_support`)."""
        self._model = model
        self._rule = rule
        self._restorer = restorer
        self._running: dict[str, Replay] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def on_admitted(self, tracker: RequestTracker, manager: KVCacheManager) -> None:
        """Hide the request's inexact windows: vLLM has published them with its blocks."""
        tracker.windows_from = 0
        pending = tracker.restore
        if pending is None or not pending.plan.replay_tokens:
            return
        assert self._rule is not None
        tracker.windows_from = self._rule.first_exact_boundary(pending.plan.resume_tokens)
        request_id = tracker.request.request_id
        hide_inexact_windows(manager, request_id, self._model, self._rule, pending)

    def begin(self, request_id: str, pending: PendingRestore) -> None:
        """Begin a replay, while the request's first step is built."""
        self._running[request_id] = Replay(pending)

    def order_step(
        self, tracker: RequestTracker, num_tokens: int, table: BlockTable, meta: StepMetadata
    ) -> bool:
        """Order the loads of a step that computes `num_tokens`; True if it ends the replay."""
        request_id, computed = tracker.request.request_id, tracker.request.num_computed_tokens
        replay, end = self._running[request_id], computed + num_tokens
        tokens = replay.tokens_to_load(self._model, computed, end)
        meta.loads.append(
            self._restorer.build_partial_load(request_id, replay.pending, table, tokens)
        )
        replay.shield(self._model, computed, end, table, meta)
        return replay.ends_by(end)

    def end(self, request_id: str) -> bool:
        """Stop loading for the request; False if it has no replay."""
        return self._running.pop(request_id, None) is not None


def can_hide(manager: KVCacheManager) -> bool:
    """True if vLLM has the attributes that `hide_inexact_windows` uses; they are not public."""
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    return (
        bool(managers)
        and all(hasattr(x, "req_to_blocks") and hasattr(x, "num_cached_block") for x in managers)
        and hasattr(getattr(manager, "block_pool", None), "evict_blocks")
    )


def hide_inexact_windows(
    manager: KVCacheManager,
    request_id: str,
    model: ModelSpec,
    replay: WindowReplay,
    pending: PendingRestore,
) -> None:
    """Remove inexact blocks of boundary state from vLLM's own prefix cache.

    vLLM publishes a block under its prefix hash when it allocates it, and would serve a later
    request with it. Its count of published blocks is raised as well, so that the next chunks of
    this prefill do not publish the rest.
    """
    exact_from = replay.first_exact_token(pending.plan.resume_tokens)
    boundary_layers = [x for x in model.layers if x.state_type.family is Family.BOUNDARY]
    for layer in {x.group: x for x in boundary_layers}.values():
        blocks_of_type = manager.coordinator.single_type_managers[layer.group]
        first = pending.local_tokens // layer.block_tokens
        first_exact = -(-exact_from // layer.block_tokens)
        blocks = blocks_of_type.req_to_blocks[request_id][first:first_exact]
        manager.block_pool.evict_blocks({x.block_id for x in blocks if not x.is_null})
        published = blocks_of_type.num_cached_block
        published[request_id] = max(published.get(request_id, 0), first_exact)


def _widest(model: ModelSpec, types: Iterable[StateType]) -> Iterator[LayerSpec]:
    """Yield one layer of each KV cache group, the one that needs the most pages."""
    for state_type in types:
        yield from model.page_groups[state_type]
