"""Questions of the router itself to the workers: how each is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ownership.router.config import RouterConfig
from ownership.router.view.checks import Ask
from ownership.router.workers import Worker, WorkerSet, WorkerState

PLAIN = {"accept-encoding": "identity"}
"""A header of the router's own questions: its session passes answers on, and decodes none."""


class Questions(Protocol):
    """The workers, and how the router asks them. Used on the event loop."""

    @property
    def workers(self) -> WorkerSet:
        """All workers that are known, whether they serve or not."""
        ...

    def servers(self) -> Mapping[str, Ask]:
        """Return how each worker that serves is asked, by its name."""
        ...

    def host_of(self, name: str) -> str:
        """Return a worker's host by its name."""
        ...


class WorkerQuestions:
    """`Questions` by HTTP."""

    def __init__(
        self, config: RouterConfig, workers: WorkerSet, session: aiohttp.ClientSession
    ) -> None:
        self._session = session
        self.workers = workers
        key = config.worker_api_key
        self._headers = PLAIN | ({"authorization": f"Bearer {key}"} if key else {})
        self._timeout = aiohttp.ClientTimeout(config.probe_timeout_s)

    def servers(self) -> Mapping[str, Ask]:
        """Return how each worker that serves is asked, by its name."""
        up = [worker for worker in self.workers if worker.state is WorkerState.UP]
        return {worker.name: partial(self._ask, worker) for worker in up}

    def host_of(self, name: str) -> str:
        """Return a worker's host by its name."""
        urls = {worker.name: worker.address.url for worker in self.workers}
        return urlsplit(urls.get(name, "")).hostname or name

    async def _ask(
        self, worker: Worker, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Any:
        """Ask one worker. Raises OSError, or ValueError for an answer that is an error."""
        url = worker.address.url + path
        try:
            async with self._session.request(
                method, url, json=body, headers=self._headers, timeout=self._timeout
            ) as answer:
                answer.raise_for_status()
                text = await answer.read()
                is_json = answer.content_type == "application/json"
        except aiohttp.ClientResponseError as error:
            raise ValueError(f"{path}: status {error.status}") from error
        except aiohttp.ClientError as error:
            raise OSError(f"{path}: {error}") from error
        return msgspec.json.decode(text) if is_json else text.decode(errors="replace")
