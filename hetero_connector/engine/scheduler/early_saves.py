"""Saves of finished requests, which the next step copies before its forward.

vLLM may give their pages to other requests in that step. See
`docs/decisions/0006-last-pages-are-copied-not-held.md`. Before its first hook of a step vLLM itself
may write pages: it zeroes some, copies some, and its second model runner copies recurrent state to
the next page. Saves of such pages are abandoned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hetero_connector.engine.messages import Save
from hetero_connector.engine.scheduler.saver import Saver
from hetero_connector.metrics import Recorder
from hetero_connector.spec import ModelSpec, RestoreRule

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


_BY_ATTENTION = (RestoreRule.EVERY_TOKEN, RestoreRule.WINDOW, RestoreRule.CHUNK_START)
"""Rules of state that only the forward writes."""


class EarlySaves:
    """The saves that the next step will order."""

    def __init__(self, saver: Saver, recorder: Recorder, model: ModelSpec) -> None:
        self._saver = saver
        self._copied_groups = {x.group for x in model.layers if x.restore_rule not in _BY_ATTENTION}
        self._recorder = recorder
        self._waiting: list[Save] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, saves: Iterable[Save]) -> None:
        self._waiting += saves

    def take(self, output: SchedulerOutput) -> list[Save]:
        """Take the saves; abandon those whose pages vLLM overwrites before the copy."""
        saves, self._waiting = self._waiting, []
        if not saves:
            return saves
        overwritten = set(self._written_first(output))
        if not overwritten:
            return saves
        kept = []
        for save in saves:
            if any(overwritten.intersection(blocks.ids) for blocks in save.copy.blocks.values()):
                self._saver.abandon(save)
                self._recorder.add("heterocache_saves_abandoned", cause="overwritten")
            else:
                kept.append(save)
        return kept

    def _written_first(self, output: SchedulerOutput) -> Iterator[int]:
        """Yield the blocks that vLLM may write before its first hook of this step."""
        yield from output.new_block_ids_to_zero or ()
        yield from (copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        if self._copied_groups:
            new = [x.block_ids for x in output.scheduled_new_reqs]
            new += [ids for ids in output.scheduled_cached_reqs.new_block_ids if ids]
            for tables in new:
                for group in self._copied_groups:
                    yield from tables[group]
