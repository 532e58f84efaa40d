"""The order of admission: shares of classes, fairness between clients, bounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace

import pytest

from ownership.router import admission
from ownership.router.admission import WEIGHTS, Admission
from ownership.router.doors import OTHER, Reason
from ownership.router.requests import Priority, RefusedError, RouterRequest
from tests.clock import Clock


def request(
    caller: str = "", priority: Priority = Priority.NORMAL, model: str = ""
) -> RouterRequest:
    return RouterRequest(OTHER, "POST", "/", [], b"", caller, priority, model or None)


class Room:
    """Room for requests, by model."""

    def __init__(self, **by_model: int) -> None:
        self.by_model = Counter(by_model)
        self.has_workers = True

    def __call__(self, wanted: RouterRequest) -> int | None:
        if "a worker" in wanted.tried:
            return 0
        return self.by_model[wanted.model or "any"] if self.has_workers else None


class Bench:
    """An admission whose order of entry is recorded."""

    def __init__(self, room: Room, max_queued: int = 10_000, queue_s: float = 60.0) -> None:
        self.room = room
        self.admission = Admission(room, max_queued, queue_s)
        self.entered: list[RouterRequest] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def enter(self, wanted: RouterRequest) -> None:
        await self.admission.enter(wanted)
        self.entered.append(wanted)
        self.admission.placed(counts=True)
        self.room.by_model[wanted.model or "any"] -= 1  # it is sent after it was placed

    async def wait(self, *wanted: RouterRequest) -> list[asyncio.Task[None]]:
        """Let requests enter; return when those who must wait do."""
        tasks = [asyncio.create_task(self.enter(x)) for x in wanted]
        self.tasks += tasks
        await settle()
        return tasks

    async def release(self, count: int = 1, model: str = "any") -> None:
        for _ in range(count):
            self.room.by_model[model] += 1
            self.admission.left()
            await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def play(story: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


def test_with_room_nothing_waits() -> None:
    async def story() -> None:
        bench = Bench(Room(any=3))
        await bench.wait(*[request()] * 3)
        assert len(bench.entered) == 3
        assert bench.admission.queued == 0

    play(story())


def test_one_end_lets_one_request_in() -> None:
    """Although the request that gets the room counts at its worker only after it was placed."""

    async def run() -> None:
        bench = Bench(Room(any=1))
        await bench.wait(*(request() for _ in range(4)))
        assert len(bench.entered) == 1
        await bench.release()
        assert len(bench.entered) == 2

    asyncio.run(run())


def test_a_request_that_needs_no_room_after_all_leaves_it_to_the_next() -> None:
    async def run() -> None:
        bench = Bench(Room(any=1))
        await bench.admission.enter(request())
        await bench.wait(request())
        assert not bench.entered
        bench.admission.placed(counts=False)
        await settle()
        assert len(bench.entered) == 1

    asyncio.run(run())


def test_a_client_with_a_thousand_requests_does_not_delay_another_s_one() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0))
        await bench.wait(*[request("busy")] * 1000)
        await bench.wait(request("rare"))
        await bench.release(3)
        assert "rare" in [x.caller for x in bench.entered]
        await bench.release(998)
        assert len(bench.entered) == 1001

    play(story())


def test_classes_get_their_shares_and_none_starves() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0))
        for priority in Priority:
            await bench.wait(*[request(priority=priority)] * 200)
        await bench.release(105)
        served = Counter(x.priority for x in bench.entered)
        total = sum(WEIGHTS.values())
        for priority, weight in WEIGHTS.items():
            assert abs(served[priority] - 105 * weight / total) <= 2
        for task in bench.tasks:
            task.cancel()

    play(story())


def test_the_share_of_a_class_does_not_grow_with_its_clients() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0))
        for number in range(20):
            await bench.wait(*[request(f"batch {number}", Priority.LOW)] * 10)
        await bench.wait(*[request("chat", Priority.HIGH)] * 200)
        await bench.release(85)
        served = Counter(x.priority for x in bench.entered)
        assert abs(served[Priority.LOW] - 85 / 17) <= 1
        low = Counter(x.caller for x in bench.entered if x.priority is Priority.LOW)
        assert set(low.values()) == {1}, "each client one, before any has two"
        for task in bench.tasks:
            task.cancel()

    play(story())


def test_a_class_keeps_its_share_of_a_model_however_much_it_gets_of_another() -> None:
    """Chats take a hundred turns at the fast model while all workers of the slow one are full."""

    async def story() -> None:
        bench = Bench(Room(slow=0, fast=0))
        await bench.wait(*[request("chat", Priority.HIGH, "fast")] * 101)
        await bench.wait(request("batch", Priority.LOW, "slow"))
        await bench.wait(*[request("chat", Priority.HIGH, "slow")] * 2)
        await bench.release(100, model="fast")
        await bench.release(3, model="slow")
        slow = [x.caller for x in bench.entered if x.model == "slow"]
        assert slow == ["chat", "chat", "batch"]
        for task in bench.tasks:
            task.cancel()

    play(story())


class OneRoom(Room):
    """Room for requests of any model: all have the same workers."""

    def __call__(self, wanted: RouterRequest) -> int | None:
        return self.by_model.total()


def test_classes_of_models_that_have_the_same_workers_get_their_shares() -> None:
    async def story() -> None:
        bench = Bench(OneRoom(any=0))
        await bench.wait(*[request("batch", Priority.LOW, "a")] * 200)
        await bench.wait(*[request("chat", Priority.HIGH, "b")] * 200)
        await bench.release(85)
        served = Counter(x.priority for x in bench.entered)
        assert abs(served[Priority.LOW] - 85 / 17) <= 1
        for task in bench.tasks:
            task.cancel()

    play(story())


def test_within_a_flow_the_first_is_first() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0))
        wanted = [request() for _ in range(20)]
        await bench.wait(*wanted)
        await bench.release(20)
        assert [id(x) for x in bench.entered] == [id(x) for x in wanted]

    play(story())


def test_a_full_model_does_not_block_another_s_requests() -> None:
    async def story() -> None:
        bench = Bench(Room(a=0, b=0))
        await bench.wait(request("x", model="a"), request("y", model="b"))
        await bench.release(model="b")
        assert [x.model for x in bench.entered] == ["b"]
        await bench.release(model="a")
        assert len(bench.entered) == 2

    play(story())


def test_a_full_model_does_not_block_requests_of_the_same_client() -> None:
    """Without API keys all clients are one."""

    async def story() -> None:
        bench = Bench(Room(a=0, b=0))
        first, other, second = request(model="a"), request(model="b"), request(model="a")
        kept_from_all = replace(request(model="b"), tried=Everything())
        await bench.wait(first, kept_from_all, other, second)
        await bench.release(model="b")
        assert bench.entered == [other]
        await bench.release(2, model="a")
        assert bench.entered == [other, first, second]
        for task in bench.tasks:
            task.cancel()

    play(story())


class Everything:
    """The workers that a request may not go to: all."""

    def __contains__(self, worker: object) -> bool:
        return True


def test_the_end_of_a_pause_is_noticed_without_an_event() -> None:
    async def story() -> None:
        room = Room(any=0)
        bench = Bench(room)
        waiting = await bench.wait(request(), request())
        room.by_model["any"] = 2
        await asyncio.gather(*waiting)

    play(story())


def test_too_many_and_too_long_are_refused_with_a_reason() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0), max_queued=2, queue_s=0.05)
        first = await bench.wait(request(), request())
        (third,) = await bench.wait(request())
        with pytest.raises(RefusedError) as full:
            await third
        assert full.value.refusal.reason is Reason.QUEUE_FULL
        for task in first:
            with pytest.raises(RefusedError) as late:
                await task
            assert late.value.refusal.reason is Reason.QUEUE_TIMEOUT
            assert late.value.refusal.status == 429
        assert bench.admission.queued == 0
        await bench.release()
        await bench.wait(request())
        assert len(bench.entered) == 1

    play(story())


def test_a_full_queue_refuses_no_request_that_can_run() -> None:
    """The requests that wait are for a model whose workers are full."""

    async def story() -> None:
        bench = Bench(Room(a=0, b=1), max_queued=1)
        await bench.wait(request(model="a"))
        (other,) = await bench.wait(request(model="b"))
        assert [x.model for x in bench.entered] == ["b"]
        await other
        bench.tasks[0].cancel()

    play(story())


def test_with_a_full_queue_the_next_one_is_who_had_the_least() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0), max_queued=1)
        first, second = request(), request()
        await bench.wait(first)
        bench.room.by_model["any"] = 1  # a pause has ended, and no event has told it
        await bench.wait(second)
        assert bench.entered == [first]
        await bench.release()
        assert bench.entered == [first, second]

    play(story())


def test_a_request_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0))
        one, two = await bench.wait(request(), request())
        one.cancel()
        await settle()
        assert bench.admission.queued == 1
        await bench.release()
        assert two.done()
        # Admitted, and cancelled before it could go on: the room is not lost.
        (three, four) = await bench.wait(request(), request())
        bench.room.by_model["any"] += 1
        bench.admission.left()
        three.cancel()
        await settle()
        assert four.done()

    play(story())


def test_without_any_worker_a_request_goes_on_to_be_refused() -> None:
    async def story() -> None:
        bench = Bench(Room(any=0))
        (waiting,) = await bench.wait(request())
        bench.room.has_workers = False
        bench.admission.admit()
        await settle()
        assert waiting.done()

    play(story())


def test_retry_after_follows_the_pace_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "monotonic", clock := Clock(0.0))

    async def story() -> None:
        bench = Bench(Room(any=0))
        for _ in range(64):  # a quiet night
            clock.passes(60.0)
            bench.admission.left()
        await bench.wait(*[request()] * 50)
        await bench.release()
        assert bench.admission.retry_after_s == 1
        for _ in range(9):
            clock.passes(0.5)
            await bench.release()
        assert bench.admission.retry_after_s == 20
        for _ in range(20):
            clock.passes(100.0)
            await bench.release()
        assert bench.admission.retry_after_s == 60
        for task in bench.tasks:
            task.cancel()

    play(story())
