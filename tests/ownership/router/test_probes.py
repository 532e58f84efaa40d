"""Probes: which exchanges of a worker that does not answer are ended, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ownership.router.app import _session
from ownership.router.config import RouterConfig, WorkerAddress
from ownership.router.probes import Prober
from ownership.router.questions import WorkerQuestions
from ownership.router.workers import Exchange, Worker, WorkerSet, WorkerState
from tests.ownership.router.test_workers import workers_of

PROBE_S = 0.02


class Probes(Prober):
    """Probes whose answers a test sets."""

    def __init__(self, workers: WorkerSet) -> None:
        session: Any = None
        super().__init__(workers, session, RouterConfig(probe_s=PROBE_S))
        self.problem: Exception | None = None
        self.asked = 0

    async def _ask(self, worker: Worker) -> Exception | None:
        self.asked += 1
        return self.problem

    async def several(self, count: int = 6) -> None:
        until = self.asked + count
        while self.asked < until:
            await asyncio.sleep(PROBE_S / 4)


async def exchanging(worker: Worker) -> tuple[Exchange, asyncio.Task[None]]:
    """Return an exchange that is under way, and the task that ends with it."""
    exchange = Exchange(asyncio.timeout(None), sent_s=monotonic(), heard_s=monotonic())

    async def exchange_all() -> None:
        worker.exchanges.add(exchange)
        try:
            async with exchange.patience:
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        finally:
            worker.exchanges.discard(exchange)

    task = asyncio.create_task(exchange_all())
    await asyncio.sleep(0)
    return exchange, task


def test_workers_that_compress_their_answers_are_understood() -> None:
    async def answer(asked: web.Request) -> web.Response:
        response = web.json_response({"data": [{"id": "m"}]})
        response.enable_compression()  # as the client allows
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server, _session(RouterConfig()) as session:
            workers = WorkerSet(max_in_flight=2)
            workers.set_addresses([WorkerAddress("one", str(server.make_url("")).rstrip("/"))])
            [worker] = workers
            problem = await Prober(workers, session, RouterConfig())._ask(worker)
            assert (problem, worker.models) == (None, {"m": {"id": "m"}})
            worker.state = WorkerState.UP
            ask = WorkerQuestions(RouterConfig(), workers, session).servers()["one"]
            assert await ask("GET", "/v1/models", None) == {"data": [{"id": "m"}]}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("keys", "guarded", "serves"),
    [
        ({}, "/v1", True),
        ({}, "/", False),
        ({"worker_api_key": "wrong"}, "/v1", False),
        ({"api_keys": frozenset({b"x"})}, "/v1", False),
    ],
)
@pytest.mark.parametrize("status", [401, 403])
def test_a_worker_that_checks_the_clients_keys_serves_with_models_unknown(
    keys: dict[str, Any], guarded: str, serves: bool, status: int
) -> None:
    """With a key of the router's own a refusal means that requests are refused, too."""

    async def answer(asked: web.Request) -> web.Response:
        return web.json_response({}, status=status if asked.path.startswith(guarded) else 200)

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        config = RouterConfig(**keys)
        async with TestServer(app) as server, _session(config) as session:
            workers = WorkerSet(max_in_flight=2)
            workers.set_addresses([WorkerAddress("one", str(server.make_url("")).rstrip("/"))])
            [worker] = workers
            problem = await Prober(workers, session, config)._ask(worker)
            assert (problem is None) == serves
            assert worker.has_model("any")

    asyncio.run(run())


def play(story: Callable[[Probes, WorkerSet, Worker], Awaitable[None]]) -> None:
    async def run() -> None:
        workers, [worker] = workers_of("one")
        probes = Probes(workers)
        probes.follow()
        try:
            await story(probes, workers, worker)
        finally:
            await probes.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_refused_probe_takes_a_worker_out_and_cuts_no_stream_that_lives() -> None:
    async def story(probes: Probes, workers: WorkerSet, worker: Worker) -> None:
        exchange, task = await exchanging(worker)

        async def hear() -> None:
            while True:
                exchange.heard_s = monotonic()
                await asyncio.sleep(PROBE_S / 4)

        tokens = asyncio.create_task(hear())
        await probes.several()
        probes.problem = ConnectionRefusedError()
        await probes.several(1)
        assert worker.state is WorkerState.DOWN
        exchange.heard_s = monotonic() + 60.0  # whatever this machine does meanwhile
        tokens.cancel()
        await probes.several()
        assert not task.done()
        task.cancel()

    play(story)


def test_a_worker_that_refuses_twice_loses_what_it_does_not_answer() -> None:
    async def story(probes: Probes, workers: WorkerSet, worker: Worker) -> None:
        _, task = await exchanging(worker)
        probes.problem = ConnectionRefusedError()
        await task

    play(story)


def test_the_requests_of_a_worker_that_left_end_once_it_is_silent() -> None:
    """A machine may vanish, and its name with it, before its probes have failed."""

    async def story(probes: Probes, workers: WorkerSet, worker: Worker) -> None:
        _, task = await exchanging(worker)
        workers.set_addresses([])
        probes.follow()
        await probes.several()
        assert not task.done()
        probes.problem = TimeoutError()
        await task
        asked = probes.asked
        await asyncio.sleep(6 * PROBE_S)
        assert probes.asked <= asked + 1, "it has nothing any more"

    play(story)


def test_a_worker_that_left_and_takes_nothing_new_ends_what_it_has_begun() -> None:
    async def story(probes: Probes, workers: WorkerSet, worker: Worker) -> None:
        _, task = await exchanging(worker)
        workers.set_addresses([])
        probes.follow()
        probes.problem = ConnectionRefusedError()
        await probes.several()
        assert not task.done()
        task.cancel()

    play(story)


@pytest.mark.parametrize("has_exchange", [False, True])
def test_a_worker_that_comes_back_is_probed_by_one_task(has_exchange: bool) -> None:
    async def story(probes: Probes, workers: WorkerSet, worker: Worker) -> None:
        task = (await exchanging(worker))[1] if has_exchange else None
        address = worker.address
        workers.set_addresses([])
        probes.follow()
        workers.set_addresses([address])
        probes.follow()
        [again] = workers
        assert (again is worker) == has_exchange
        assert len(probes._tasks) == 1
        if task is not None:
            task.cancel()
        await probes.several()

    play(story)
