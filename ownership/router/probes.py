"""Probes: each worker is asked regularly if it serves, and which models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from ownership.router.config import RouterConfig
from ownership.router.questions import PLAIN
from ownership.router.workers import Worker, WorkerSet, WorkerState

_FAILURES = 3
"""Failures in a row that make a worker `DOWN`. A refused connection is enough alone."""
_NO_SUCH_PATH = frozenset({404, 405})

_log = logging.getLogger(__name__)


class Prober:
    """Keeps one task for each worker of the set."""

    def __init__(
        self, workers: WorkerSet, session: aiohttp.ClientSession, config: RouterConfig
    ) -> None:
        self._workers, self._session, self._config = workers, session, config
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._present: set[Worker] = set()
        key = config.worker_api_key
        self._headers = PLAIN | ({"authorization": f"Bearer {key}"} if key else {})
        self._timeout = aiohttp.ClientTimeout(config.probe_timeout_s)
        # Workers that check the clients' own keys tell their models to none without one.
        self._excused = set[int]() if key or config.api_keys else {401, 403}
        """Statuses of `/v1/models` with which a worker serves. Keys guard no `/health`."""

    def follow(self) -> None:
        """Probe the workers that the set has now, and those that end what they have begun."""
        self._present = set(self._workers)
        for worker in self._tasks.keys() - self._present:
            if not worker.exchanges:
                self._tasks.pop(worker).cancel()
        for worker in self._present:
            if worker not in self._tasks or self._tasks[worker].done():
                self._tasks[worker] = asyncio.get_running_loop().create_task(self._watch(worker))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        failures, silent_since_s = 0, 0.0
        while worker in self._present or worker.exchanges:
            asked_s = monotonic()
            problem = await self._ask(worker)
            is_refused = isinstance(problem, ConnectionRefusedError)
            if problem is None:
                failures = 0
                self._set_state(worker, WorkerState.UP, "")
            elif is_refused and worker not in self._present:
                failures = 0  # it takes nothing new, and may yet end what it has begun
            else:
                failures += 1
                silent_since_s = asked_s if failures == 1 else silent_since_s
                is_down = failures >= _FAILURES or is_refused
                if is_down or worker.state is WorkerState.UNKNOWN:
                    self._set_state(worker, WorkerState.DOWN, f": {problem or 'no answer in time'}")
                if is_down and failures > 1:  # between two probes a live stream has brought a byte
                    worker.abandon_silent(silent_since_s)
            await asyncio.sleep(self._config.probe_s)

    def _set_state(self, worker: Worker, state: WorkerState, why: str) -> None:
        if worker.state is not state:
            _log.log(
                logging.INFO if state is WorkerState.UP else logging.WARNING,
                f"worker {worker.name} is {state}{why}",
            )
            worker.state = state
            self._workers.changed()

    async def _ask(self, worker: Worker) -> Exception | None:
        """Return None if the worker serves, else why it does not."""
        try:
            await self._get(worker, "/health")
            answer = await self._get(worker, "/v1/models", self._excused)
            if answer:
                models = msgspec.json.decode(answer, type=_Models).data
                worker.models = {str(model["id"]): model for model in models if "id" in model}
        except aiohttp.ClientConnectorError as error:
            return error.os_error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return error
        return None

    async def _get(self, worker: Worker, path: str, excused: Set[int] = frozenset()) -> bytes:
        """Return the answer; b"" if the worker has no such path, or its status is excused.

        Raises ClientResponseError.
        """
        url = worker.address.url + path
        async with self._session.get(url, headers=self._headers, timeout=self._timeout) as answer:
            if answer.status not in _NO_SUCH_PATH | excused:
                answer.raise_for_status()
                return await answer.read()
        return b""


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]
