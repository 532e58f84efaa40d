"""The choice among workers: room, failures, and one request that tries again."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import aiohttp
import pytest
from starlette.types import Message

from ownership.directory.breaker import FIRST_PAUSE_S, CircuitBreaker
from ownership.router.answer import Answer
from ownership.router.config import RouterConfig, WorkerAddress
from ownership.router.doors import Refusal
from ownership.router.metrics import RouterMetrics
from ownership.router.placer import Candidates, LeastLoaded, Placed, Prefill
from ownership.router.proxy import Proxy
from ownership.router.requests import RefusedError, RouterRequest
from ownership.router.spans import RouterSpans
from ownership.router.workers import Exchange, Worker, WorkerSet, WorkerState
from tests.ownership.router.bench import PATIENCE_S
from tests.ownership.router.test_admission import request


def workers_of(*names: str) -> tuple[WorkerSet, list[Worker]]:
    workers = WorkerSet(max_in_flight=2)
    workers.set_addresses(WorkerAddress(name, f"http://{name}") for name in names)
    found = list(workers)
    for worker in found:
        worker.state = WorkerState.UP
    return workers, found


def test_a_worker_that_lost_a_request_gets_one_after_its_pause_and_no_other() -> None:
    now_s = 100.0
    workers, (one, two) = workers_of("one", "two")
    one.breaker = CircuitBreaker(lambda: now_s)
    one.breaker.on_failure()
    assert workers.candidates(request(), ()) == [two]
    assert workers.room(request()) == 2
    now_s += 1.0
    assert workers.candidates(request(), ()) == [one]
    assert workers.candidates(request(), ()) == [two]
    one.breaker.on_success()
    assert workers.candidates(request(), ()) == [one, two]


def test_while_all_workers_pause_requests_wait_for_the_end_of_a_pause() -> None:
    now_s = 100.0
    workers, found = workers_of("one", "two")
    for worker in found:
        worker.breaker = CircuitBreaker(lambda: now_s)
        worker.breaker.on_failure()
    assert workers.room(request()) == 0
    now_s += 1.0
    assert workers.room(request()) == 1
    assert workers.candidates(request(), ()) == found[:1]
    assert workers.candidates(request(), ()) == found[1:]
    assert workers.room(request()) == 0, "both are tried"


def test_a_worker_that_is_down_keeps_only_the_requests_that_it_answers() -> None:
    """Also one that it got after its first probe had failed has no answer."""

    async def story() -> None:
        _, (worker, _) = workers_of("one", "two")
        ended: list[str] = []

        async def wait(name: str, exchange: Exchange) -> None:
            worker.exchanges.add(exchange)
            try:
                async with exchange.patience:
                    await asyncio.Event().wait()
            except TimeoutError:
                ended.append(name)

        exchanges = {
            "silent": Exchange(asyncio.timeout(None), sent_s=1.0, heard_s=2.0),
            "unanswered": Exchange(asyncio.timeout(None), sent_s=9.0),
            "answering": Exchange(asyncio.timeout(None), sent_s=1.0, heard_s=9.0),
        }
        tasks = [asyncio.create_task(wait(*item)) for item in exchanges.items()]
        await asyncio.sleep(0)
        worker.abandon_silent(5.0)
        await asyncio.gather(*tasks[:2])
        assert sorted(ended) == ["silent", "unanswered"]
        assert not tasks[2].done()
        tasks[2].cancel()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_without_any_worker_there_is_no_room_to_wait_for() -> None:
    workers, (one, two) = workers_of("one", "two")
    one.state = WorkerState.DOWN
    two.address = two.address._replace(is_draining=True)
    assert workers.room(request()) is None
    assert workers.candidates(request(), ()) == []


def test_a_worker_that_stays_keeps_what_is_known_of_it() -> None:
    workers, (one, _) = workers_of("one", "two")
    workers.set_addresses([WorkerAddress("three", "http://three"), one.address])
    assert {x.name: x.state for x in workers} == {"one": "up", "three": "unknown"}
    workers.set_addresses([WorkerAddress("one", "http://moved")])
    assert [x.state for x in workers] == ["unknown"]


def test_a_worker_that_comes_back_has_its_requests_and_its_pause_while_they_run() -> None:
    workers, (one, two) = workers_of("one", "two")
    exchange = Exchange(asyncio.Timeout(None), sent_s=1.0)
    one.exchanges.add(exchange)
    one.breaker.on_failure()
    workers.set_addresses([two.address])
    assert list(workers) == [two]
    workers.set_addresses([two.address, one.address])
    (back,) = (x for x in workers if x.name == "one")
    assert (back.in_flight, back.breaker.is_open) == (1, True)
    assert back.state is WorkerState.UNKNOWN, "it may be another process by now"
    workers.set_addresses([two.address, WorkerAddress("one", "http://moved")])
    assert [x.in_flight for x in workers] == [0, 0], "another address is another worker"
    back.exchanges.discard(exchange)
    workers.set_addresses([two.address])
    workers.set_addresses([two.address, one.address])
    assert not any(x.breaker.is_open for x in workers), "nothing is kept of one that is idle"


class LosingMeanwhile(LeastLoaded):
    """Its first placement takes so long that the worker loses another request meanwhile."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._losing = [worker.breaker]

    async def place(self, request: RouterRequest, candidates: Candidates) -> Placed | Refusal:
        if self._losing:
            self._losing.pop().on_failure()
        return await super().place(request, candidates)


def test_no_worker_gets_more_than_it_has_room_for_while_others_wait() -> None:
    async def story() -> list[int]:
        workers, (one,) = workers_of("one")
        seen: list[int] = []

        async def serve(proxy: Proxy, turns: int) -> None:
            placed = await proxy.place(request())
            with proxy.under_way(placed.worker):
                seen.append(one.in_flight)
                for _ in range(turns):
                    await asyncio.sleep(0)

        async with aiohttp.ClientSession() as session:
            metrics, spans = RouterMetrics(), RouterSpans("")
            proxy = Proxy(RouterConfig(), workers, LeastLoaded(), session, metrics, spans)
            await asyncio.gather(*(serve(proxy, 10 + number) for number in range(10)))
        return seen

    seen = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    assert (len(seen), max(seen)) == (10, 2)


class Meeting(Proxy):
    """Its workers lose all requests at once, when so many are under way."""

    lost: asyncio.Barrier

    async def _pass_on(self, *given: Any, **more: Any) -> None:
        await self.lost.wait()
        raise ConnectionResetError

    async def _prefilled(self, *given: Any, **more: Any) -> bytes:
        await self.lost.wait()
        raise ConnectionResetError


@pytest.mark.parametrize("is_prefill", [False, True])
def test_requests_that_are_lost_together_are_one_failure(is_prefill: bool) -> None:
    async def story() -> Worker:
        workers = WorkerSet(max_in_flight=6)
        workers.set_addresses([WorkerAddress("one", "http://one")])
        [one] = workers
        one.state = WorkerState.UP
        async with aiohttp.ClientSession() as session:
            metrics, spans = RouterMetrics(), RouterSpans("")
            proxy = Meeting(RouterConfig(), workers, LeastLoaded(), session, metrics, spans)
            proxy.lost = asyncio.Barrier(6)

            async def lose() -> None:
                if is_prefill:
                    await proxy.prefill(Placed(request(), one), Prefill(one, b""))
                    return
                with pytest.raises(RefusedError):
                    await proxy._serve(request(), Answer(send_nothing))

            await asyncio.gather(*(lose() for _ in range(6)))
        return one

    worker = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    assert worker.breaker._pause_s == FIRST_PAUSE_S


async def send_nothing(message: Message) -> None:
    raise AssertionError("nothing is to be sent")


class Prefilling(LeastLoaded):
    """Another worker computes each prompt."""

    async def place(self, request: RouterRequest, candidates: Candidates) -> Placed | Refusal:
        placed = await super().place(request, candidates)
        if isinstance(placed, Placed):
            placed.prefill = Prefill(placed.worker, b"")
        return placed


class Silencing(Proxy):
    """Its workers are given up during the prefill."""

    async def prefill(self, placed: Placed, prefill: Prefill) -> None:
        placed.worker.abandon_silent(math.inf)
        await asyncio.Event().wait()


def test_a_decoder_that_is_silent_during_the_prefill_has_not_had_the_request() -> None:
    async def story() -> RouterRequest:
        workers, _ = workers_of("one", "two")
        asked = request()
        async with aiohttp.ClientSession() as session:
            metrics, spans = RouterMetrics(), RouterSpans("")
            proxy = Silencing(RouterConfig(), workers, Prefilling(), session, metrics, spans)
            with pytest.raises(RefusedError):
                await proxy._serve(asked, Answer(send_nothing))
        return asked

    asked = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    assert (asked.times_lost, asked.is_whole) == (0, False)


class Failing(Proxy):
    """Its workers lose another request during each prefill, and this one after it."""

    async def prefill(self, placed: Placed, prefill: Prefill) -> None:
        placed.worker.breaker.on_failure()

    async def _pass_on(self, *given: Any, **more: Any) -> None:
        raise ConnectionResetError


def test_a_decoder_that_fails_before_and_after_the_prefill_has_failed_twice() -> None:
    async def story() -> Worker:
        workers, (one,) = workers_of("one")
        async with aiohttp.ClientSession() as session:
            metrics, spans = RouterMetrics(), RouterSpans("")
            proxy = Failing(RouterConfig(), workers, Prefilling(), session, metrics, spans)
            with pytest.raises(RefusedError):
                await proxy._serve(request(), Answer(send_nothing))
        return one

    worker = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    assert worker.breaker._pause_s == 2 * FIRST_PAUSE_S


def test_a_request_waits_if_all_workers_pause_since_it_was_let_through() -> None:
    async def story() -> Placed:
        workers, (one,) = workers_of("one")
        async with aiohttp.ClientSession() as session:
            metrics, spans = RouterMetrics(), RouterSpans("")
            proxy = Proxy(RouterConfig(), workers, LosingMeanwhile(one), session, metrics, spans)
            return await proxy.place(request())

    assert asyncio.run(asyncio.wait_for(story(), PATIENCE_S)).worker.name == "one"


def test_a_request_for_one_worker_waits_for_the_end_of_its_pause_alone() -> None:
    async def story() -> Placed:
        workers, (one, two) = workers_of("one", "two")
        two.breaker.on_failure()
        async with aiohttp.ClientSession() as session:
            metrics, spans = RouterMetrics(), RouterSpans("")
            proxy = Proxy(RouterConfig(), workers, LeastLoaded(), session, metrics, spans)
            return await proxy.place(request(), tried=[one])

    assert asyncio.run(asyncio.wait_for(story(), PATIENCE_S)).worker.name == "two"
