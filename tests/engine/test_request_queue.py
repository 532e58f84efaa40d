"""The queue's sums equal those of a walk over all requests, after any events."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from hetero_connector.artifacts.chain import ChainHasher
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.request_identifier import PLAIN
from hetero_connector.engine.scheduler.request_queue import RequestQueue, WorkAhead
from hetero_connector.engine.scheduler.requests import RequestTracker
from tests.engine.fakes import FakeRequest

HASHER = ChainHasher(b"f" * 32, 64)


def walked(new: RequestTracker, trackers: Iterable[RequestTracker]) -> WorkAhead:
    """`trackers` are in the order of their first match."""
    queued = decodes = context = waiting = 0
    before_new = True
    for tracker in trackers:
        request = tracker.request
        if request.status == RequestStatus.RUNNING:
            decodes_from = max(request.num_prompt_tokens, request.num_tokens - 1)
            left = decodes_from - request.num_computed_tokens
            queued += max(0, left)
            decodes += left <= 0
            context += request.num_computed_tokens if left <= 0 else 0
        elif tracker is new:
            before_new = False
        elif before_new:
            waiting += tracker.left_to_compute
    return WorkAhead(queued, decodes, context, waiting)


class Traffic:
    """Random requests in a queue, as the scheduler side reports them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queue = RequestQueue()
        self.trackers: dict[str, RequestTracker] = {}
        self.numbers = iter(range(1_000_000))

    def of_status(self, running: bool) -> list[RequestTracker]:
        trackers = self.trackers.values()
        return [t for t in trackers if (t.request.status == RequestStatus.RUNNING) == running]

    def one(self, running: bool) -> RequestTracker | None:
        trackers = self.of_status(running)
        return self.rng.choice(trackers) if trackers else None

    def arrive(self) -> None:
        length = self.rng.randint(2, 400)
        request: Any = FakeRequest(
            f"r{next(self.numbers)}", list(range(length)), status=RequestStatus.WAITING
        )
        tracker = RequestTracker.of(request, HASHER, PLAIN, Clearings())
        self.trackers[request.request_id] = tracker
        self.queue.enqueue(tracker)
        self.check()
        self.ask(tracker)

    def ask(self, tracker: RequestTracker | None) -> None:
        if tracker is None:
            return
        tracker.local_tokens = self.rng.randrange(tracker.request.num_tokens)
        resume = self.rng.randint(tracker.local_tokens, tracker.request.num_tokens - 1)
        plan: Any = SimpleNamespace(plan=SimpleNamespace(resume_tokens=resume))
        tracker.restore = self.rng.choice([None, plan])
        self.queue.enqueue(tracker)

    def admit(self, tracker: RequestTracker | None) -> None:
        if tracker is None:
            return
        self.queue.on_admitted(tracker)
        request: Any = tracker.request
        request.num_computed_tokens = request.num_tokens - tracker.left_to_compute
        tracker.restore = None
        request.status = RequestStatus.RUNNING

    def step(self) -> None:
        running = self.of_status(running=True)
        scheduled = {}
        some = self.rng.sample(running, self.rng.randint(0, len(running)))
        for tracker in running:
            request: Any = tracker.request
            left = request.num_tokens - request.num_computed_tokens
            if left > 1 and tracker not in some:
                continue  # all that decode are in a step
            scheduled[request.request_id] = self.rng.randint(1, max(1, left))
        self.queue.on_step(self.trackers, scheduled)
        for request_id, count in scheduled.items():
            request = self.trackers[request_id].request
            request.num_computed_tokens += count
            if request.num_computed_tokens >= request.num_tokens:
                request.all_token_ids.append(7)

    def preempt(self, tracker: RequestTracker | None) -> None:
        if tracker is None:
            return
        self.step()  # vLLM reports it with the step that it builds
        request: Any = tracker.request
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.queue.enqueue(tracker)

    def end(self, tracker: RequestTracker | None) -> None:
        if tracker is not None:
            self.queue.remove(tracker.request.request_id)
            del self.trackers[tracker.request.request_id]

    def reset(self) -> None:
        for tracker in self.trackers.values():
            tracker.restore = None
        self.queue.requeue_waiting(self.trackers.values())

    def check(self) -> None:
        for tracker in self.of_status(running=False):
            assert self.queue.work_ahead_of(tracker) == walked(tracker, self.trackers.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_are_right_after_any_events(seed: int) -> None:
    traffic = Traffic(seed)
    seen: set[WorkAhead] = set()
    for _ in range(300):
        event = traffic.rng.choice(
            [
                traffic.arrive,
                traffic.arrive,
                traffic.arrive,
                lambda: traffic.ask(traffic.one(running=False)),
                lambda: traffic.admit(traffic.one(running=False)),
                traffic.step,
                traffic.step,
                lambda: traffic.preempt(traffic.one(running=True)),
                lambda: traffic.end(traffic.one(running=True)),
                lambda: traffic.end(traffic.one(running=False)),
                traffic.reset,
            ]
        )
        event()
        traffic.check()
        seen |= {traffic.queue.work_ahead_of(t) for t in traffic.of_status(running=False)}
    assert len(seen) > 50  # and not by being empty
    for tracker in list(traffic.trackers.values()):
        traffic.end(tracker)
    queue = traffic.queue
    assert (queue._waiting, queue._prefilling, queue._decoding) == ({}, {}, {})
    assert (queue._waiting_tokens, queue._prefilling_tokens) == (0, 0)
    assert queue._decoding_tokens == 0


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_with_several_stages_a_request_is_in_one_step_of_so_many(stages: int) -> None:
    """Each stage has another step: the requests are in them by turns."""
    queue, trackers = RequestQueue(stages), dict[str, RequestTracker]()
    for index in range(stages):
        request: Any = FakeRequest(f"r{index}", list(range(100 * (index + 1))))
        request.num_computed_tokens = request.num_tokens - 1
        trackers[request.request_id] = RequestTracker.of(request, HASHER, PLAIN, Clearings())
        queue.on_admitted(trackers[request.request_id])
    for step in range(50 * stages):
        name = f"r{step % stages}"
        queue.on_step(trackers, {name: 1})
        request = trackers[name].request
        request.num_computed_tokens += 1
        request.all_token_ids.append(7)
    new = RequestTracker.of(FakeRequest("new", [1]), HASHER, PLAIN, Clearings())  # type: ignore[arg-type]
    queue.enqueue(new)
    context = sum(x.request.num_computed_tokens for x in trackers.values())
    found = queue.work_ahead_of(new)
    assert found.decodes == stages
    assert found.decoded_context == pytest.approx(context, abs=stages)
    for name in trackers:
        queue.remove(name)
    assert queue.work_ahead_of(new) == WorkAhead(0, 0, 0, 0)
