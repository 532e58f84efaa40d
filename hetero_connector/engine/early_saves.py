"""Saves of finished requests, copied first thing in the next step.

vLLM may give their pages to others in that very step, so they are copied before anything else
is done to a page. See `docs/decisions/0006-last-pages-are-copied-not-held.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hetero_connector.engine.messages import Save
from hetero_connector.engine.saving import Saver
from hetero_connector.metrics import Recorder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class EarlySaves:
    """Those that no step has taken along yet."""

    def __init__(self, saver: Saver, recorder: Recorder) -> None:
        self._saver = saver
        self._recorder = recorder
        self._waiting: list[Save] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, saves: Iterable[Save]) -> None:
        """For the next step."""
        self._waiting += saves

    def take(self, output: SchedulerOutput) -> list[Save]:
        """Those whose freed pages nobody overwrites before the copy; the others are dropped."""
        saves, self._waiting = self._waiting, []
        if not saves:
            return saves
        overwritten = set(output.new_block_ids_to_zero or ())
        overwritten.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        if not overwritten:
            return saves
        kept = []
        for save in saves:
            if any(overwritten.intersection(blocks.ids) for blocks in save.copy.blocks.values()):
                self._saver.abandon(save)
                self._recorder.add("heterocache_saves_dropped", cause="overwritten")
            else:
                kept.append(save)
        return kept
