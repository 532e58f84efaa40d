"""What the tracked requests have left to compute, kept up as it changes.

The planner asks for it between two steps, with thousands of requests about: no question walks
over them. A request is noted when it is asked about, admitted, scheduled, preempted and over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hetero_connector.engine.scheduler.requests import RequestTracker


class Ahead(NamedTuple):
    """What tracked requests have to do before a new one, or beside it."""

    queued_tokens: int
    """Prompt tokens that running ones have not computed."""
    decodes: int
    """Running ones that decode."""
    waiting_tokens: int
    """What is left to compute to those further up the queue that wait."""


class RequestQueue:
    """Counts by request. A question costs the requests that were first asked about after it, a
    step those that prefill; no call walks over all that run."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        """Tokens left to each tracked request, 0 while it runs, as they were first asked about:
        in the order of vLLM's queue."""
        self._waiting_tokens = 0
        self._prefilling: dict[str, int] = {}
        """Prompt tokens left to each running one that prefills."""
        self._prefilling_tokens = 0
        self._decoding: set[str] = set()
        self._admitted: list[RequestTracker] = []
        """Since the last question or step: vLLM notes only afterwards how much they hold."""

    def waits(self, tracker: RequestTracker) -> None:
        """It is asked about, or was preempted; or what is to be restored of it has changed."""
        self._stop(tracker.request.request_id)
        self._wait(tracker.request.request_id, tracker.left_to_compute)

    def admitted(self, tracker: RequestTracker) -> None:
        """vLLM has given it pages, and it is in the next step."""
        self._wait(tracker.request.request_id, 0)
        self._admitted.append(tracker)

    def stepped(self, trackers: Mapping[str, RequestTracker], scheduled: Mapping[str, int]) -> None:
        """The step being built computes so many tokens of each of these requests."""
        self._settle()
        for request_id in [x for x in self._prefilling if x in scheduled]:
            request = trackers[request_id].request
            computed = request.num_computed_tokens + scheduled[request_id]
            self._run(request_id, request.num_prompt_tokens - computed)

    def gone(self, request_id: str) -> None:
        """It is over."""
        self._settle()
        self._stop(request_id)
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def ahead_of(self, new: RequestTracker) -> Ahead:
        """What the engine does before a request that is being asked about.

        Those admitted were further up the queue, but for the ones that wait: they were told to
        ask again, or load between steps. Walks over requests first asked about after `new` only.
        """
        self._settle()
        not_before = 0
        for request_id in reversed(self._waiting):
            not_before += self._waiting[request_id]
            if request_id == new.request.request_id:
                break
        return Ahead(
            self._prefilling_tokens, len(self._decoding), self._waiting_tokens - not_before
        )

    def reset(self, trackers: Iterable[RequestTracker]) -> None:
        """What all of these were to restore is dropped."""
        for tracker in trackers:
            if self._waiting.get(tracker.request.request_id):
                self.waits(tracker)

    def _wait(self, request_id: str, tokens: int) -> None:
        self._waiting_tokens += tokens - self._waiting.get(request_id, 0)
        self._waiting[request_id] = tokens

    def _settle(self) -> None:
        for tracker in self._admitted:
            request = tracker.request
            self._run(request.request_id, request.num_prompt_tokens - request.num_computed_tokens)
        self._admitted.clear()

    def _run(self, request_id: str, tokens: int) -> None:
        self._stop(request_id)
        if tokens > 0:
            self._prefilling[request_id] = tokens
            self._prefilling_tokens += tokens
        else:
            self._decoding.add(request_id)

    def _stop(self, request_id: str) -> None:
        self._prefilling_tokens -= self._prefilling.pop(request_id, 0)
        self._decoding.discard(request_id)
