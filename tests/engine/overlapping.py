"""Watch the steps of async scheduling, which overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.engine.harness import scheduler_side
from tests.engine.replays import scheduler_of

REPLAYED = "heterocache_replayed_tokens_total"


@contextmanager
def watched(llm: Any) -> Iterator[list[str]]:
    """Yield the events of steps that compute: `scheduled` or `replaying`, then `reported`."""
    scheduler, side, events = scheduler_of(llm), scheduler_side(llm), list[str]()
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def scheduled(*args: Any) -> Any:
        output = schedule(*args)
        if output.num_scheduled_tokens:
            events.append("replaying" if side._replays._running else "scheduled")
        return output

    def reported(output: Any, *args: Any) -> Any:
        if output.num_scheduled_tokens:
            events.append("reported")
        return update(output, *args)

    with (
        patch.object(scheduler, "schedule", scheduled),
        patch.object(scheduler, "update_from_output", reported),
    ):
        yield events
