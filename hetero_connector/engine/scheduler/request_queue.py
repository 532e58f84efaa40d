"""Sums of the tokens that tracked requests have left to compute, updated with every change.

The planner asks for them between two steps, while thousands of requests may be tracked, so no
question walks over all of them. A request's entry changes when it is matched, admitted, scheduled,
preempted and finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hetero_connector.engine.scheduler.requests import RequestTracker


class WorkAhead(NamedTuple):
    """The work that tracked requests have before a new request, or at the same time."""

    queued_tokens: int
    """Tokens that running requests compute before they decode."""
    decodes: int
    """Running requests that decode."""
    decoded_context: int
    """Tokens that those have computed, summed. A request that computes several tokens in a step, or
    none, counts as if it computed one."""
    waiting_tokens: int
    """Tokens left to compute for waiting requests that are ahead in the queue."""


class RequestQueue:
    """Keeps the tokens left by request, and their sums.

    `work_ahead_of` costs the requests that were matched first after the given one, `on_step` those
    that prefill. No call walks over all running requests.
    """

    def __init__(self, stages: int = 1) -> None:
        """`stages`: pipeline stages. A request that decodes is in one step of so many."""
        self._waiting: dict[str, int] = {}
        """Tokens left to each tracked request, 0 while it runs. The order is that of the first
        match, which is the order of vLLM's queue."""
        self._waiting_tokens = 0
        self._prefilling: dict[str, int] = {}
        """Tokens left to each running request before it decodes."""
        self._prefilling_tokens = 0
        self._stages = stages
        self._decoding: dict[str, int] = {}
        """Computed tokens of each running request that decodes, times the stages, less `_steps` at
        that moment."""
        self._decoding_tokens = 0
        self._steps = 0
        self._admitted: list[RequestTracker] = []
        """Admitted requests whose computed tokens vLLM has not set yet."""

    def enqueue(self, tracker: RequestTracker) -> None:
        """Count the request as waiting, after a match, a preemption or a change of its restore."""
        self._stop(tracker.request.request_id)
        self._wait(tracker.request.request_id, tracker.left_to_compute)

    def on_admitted(self, tracker: RequestTracker) -> None:
        """Count the request as running: vLLM has given it pages, and it is in the next step."""
        self._wait(tracker.request.request_id, 0)
        self._admitted.append(tracker)

    def on_step(self, trackers: Mapping[str, RequestTracker], scheduled: Mapping[str, int]) -> None:
        """Count the tokens of each request that the step being built computes."""
        self._settle()
        self._steps += 1
        for request_id in [x for x in self._prefilling if x in scheduled]:
            tracker = trackers[request_id]
            computed = tracker.request.num_computed_tokens + scheduled[request_id]
            self._run(request_id, tracker.decodes_from, computed)

    def remove(self, request_id: str) -> None:
        self._settle()
        self._stop(request_id)
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def work_ahead_of(self, new: RequestTracker) -> WorkAhead:
        """Return the work that the engine has before the request `new`, which is being matched.

        Admitted requests were ahead of it in the queue. So were waiting requests that were matched
        first before it: they have no answer yet, or load between steps.
        """
        self._settle()
        not_before = 0
        for request_id in reversed(self._waiting):
            not_before += self._waiting[request_id]
            if request_id == new.request.request_id:
                break
        decodes = len(self._decoding)
        context = (self._decoding_tokens + decodes * self._steps) // self._stages
        waiting = self._waiting_tokens - not_before
        return WorkAhead(self._prefilling_tokens, decodes, context, waiting)

    def requeue_waiting(self, trackers: Iterable[RequestTracker]) -> None:
        """Count the waiting ones of these requests again: their restores were dropped."""
        for tracker in trackers:
            if self._waiting.get(tracker.request.request_id):
                self.enqueue(tracker)

    def _wait(self, request_id: str, tokens: int) -> None:
        self._waiting_tokens += tokens - self._waiting.get(request_id, 0)
        self._waiting[request_id] = tokens

    def _settle(self) -> None:
        """Count the tokens left to requests that were admitted since the last call."""
        for tracker in self._admitted:
            request = tracker.request
            self._run(request.request_id, tracker.decodes_from, int(request.num_computed_tokens))
        self._admitted.clear()

    def _run(self, request_id: str, decodes_from: int, computed: int) -> None:
        self._stop(request_id)
        if (tokens := decodes_from - computed) > 0:
            self._prefilling[request_id] = tokens
            self._prefilling_tokens += tokens
        else:
            self._decoding[request_id] = computed * self._stages - self._steps
            self._decoding_tokens += self._decoding[request_id]

    def _stop(self, request_id: str) -> None:
        self._prefilling_tokens -= self._prefilling.pop(request_id, 0)
        self._decoding_tokens -= self._decoding.pop(request_id, 0)
