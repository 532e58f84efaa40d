"""The proxy: one request, from its door to a worker and back, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from time import monotonic

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from ownership.router.admission import Admission
from ownership.router.answer import Answer, answer_id
from ownership.router.config import RouterConfig
from ownership.router.doors import DOORS, OTHER, Reason, Refusal
from ownership.router.metrics import RouterMetrics
from ownership.router.placer import Placed, Placer, Prefill
from ownership.router.requests import (
    ClientLeftError,
    Headers,
    RefusedError,
    RouterRequest,
    read_request,
)
from ownership.router.spans import RouterSpans
from ownership.router.workers import Exchange, Worker, WorkerSet

FIRST_ERROR = 400
"""An answer with this status or a higher one has no token."""
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a worker for which another one is asked, if there is another."""
_RESENT = 1
"""A request is sent again so often after a worker that had it was lost: it may be what ended it."""
_WHOLE_BYTES = 256 * 1024
"""An answer of known length is sent when it is whole, up to this size."""
_LARGE_BYTES = 1024 * 1024
"""A larger body is sent in parts, between which other requests go on."""
_SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that the client for workers would add."""

_log = logging.getLogger(__name__)


class _WorkerLostError(Exception):
    """The worker cannot be reached, or did not answer to the end."""

    def __init__(self, error: Exception, sent_s: float, *, is_passed_on: bool) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.sent_s = sent_s
        """The time at which it was passed on to the worker, if it was."""
        self.was_sent = is_passed_on and _was_sent(error)
        self.can_serve = isinstance(error, aiohttp.ServerDisconnectedError)
        """True if it may have closed a kept connection only, without having seen the request."""


class _BusyError(Exception):
    """The worker has refused the request, and another one may take it."""


class _PausedError(Exception):
    """All workers for a request have lost others since there was room for it, and pause."""


class Proxy:
    """The ASGI application behind every path that workers serve."""

    def __init__(
        self,
        config: RouterConfig,
        workers: WorkerSet,
        placer: Placer,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        spans: RouterSpans,
    ) -> None:
        self._config, self._workers, self._placer = config, workers, placer
        self._session, self._metrics, self._spans = session, metrics, spans
        self._admission = Admission(
            workers.room, config.max_queued, config.queue_s, metrics.queued.set
        )
        workers.on_change.append(self._admission.admit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = DOORS.get(scope["path"], OTHER)
        answer, spans, reason = Answer(send), self._spans.begin(scope), ""
        try:
            request = await read_request(scope, receive, self._config)
            request.spans = spans
            await self._serve_while_connected(request, receive, answer)
        except RefusedError as error:
            reason = error.refusal.reason
            self._metrics.refused.labels(reason).inc()
            await answer.refuse(door.api, error.refusal)
        except ClientLeftError:
            reason = "client_left"
            self._metrics.left.inc()
        finally:
            spans.on_end(answer.status, reason)
            if answer.status and reason != "client_left":  # also one that was cut
                self._metrics.requests.labels(door.name, str(answer.status)).inc()

    async def _serve_while_connected(
        self, request: RouterRequest, receive: Receive, answer: Answer
    ) -> None:
        """Serve the request; a client that leaves ends it, and thereby the worker's part."""
        serving = asyncio.current_task()
        assert serving is not None
        has_left = False

        async def watch() -> None:
            nonlocal has_left
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left = True
            serving.cancel()

        watching = asyncio.get_running_loop().create_task(watch())
        try:
            await self._serve(request, answer)
        except asyncio.CancelledError:
            if not has_left:
                raise
            serving.uncancel()
            raise ClientLeftError from None
        finally:
            watching.cancel()

    async def _serve(self, request: RouterRequest, answer: Answer) -> None:
        """Send the request to workers until one answers. Raises RefusedError if none does."""
        arrived_s = monotonic()
        tried = list[Worker]()
        while True:
            with request.spans.placing():
                placed = await self.place(request, tried)
                request.spans.on_placed(placed)
            worker = placed.worker
            tried.append(worker)
            try:
                await self._exchange(placed, answer, arrived_s, tried)
                return
            except _BusyError:
                pass
            except _WorkerLostError as lost:
                _log.warning("worker %s was lost: %s", worker.name, lost)
                worker.breaker.on_failure(lost.sent_s)
                if answer.status:
                    self._metrics.cut.labels(worker.name).inc()
                    await answer.cut(request.door.api, _lost(worker))
                    return
                request.times_lost += lost.was_sent
                request.is_whole |= lost.was_sent  # a prefill could end one worker more
                has_others = bool(self._workers.usable(request, tried))
                if request.times_lost > _RESENT or not (has_others or lost.can_serve):
                    raise RefusedError(_lost(worker)) from None
                if not has_others:
                    tried.remove(worker)
            self._metrics.retried.labels(worker.name).inc()

    @property
    def queued(self) -> int:
        """The number of requests that wait for room."""
        return self._admission.queued

    async def place(self, request: RouterRequest, tried: Container[Worker] = ()) -> Placed:
        """Wait for room, then choose a worker that is not in `tried`. Raises RefusedError."""
        request.tried, model = tried, request.model
        if model is not None and not self._workers.is_known(model):
            text = f"The model `{model}` does not exist."
            raise RefusedError(Refusal(Reason.UNKNOWN_MODEL, text))

        def candidates() -> Sequence[Worker]:
            found = self._workers.candidates(request, tried)
            if not found:
                if self._workers.usable(request, tried):
                    raise _PausedError
                text = "no worker serves this model at present"
                raise RefusedError(Refusal(Reason.NO_WORKER, text, retry_after_s=2))
            return found

        placed = None
        while placed is None:
            await self._admission.enter(request)
            try:
                placed = await self._placer.place(request, candidates)
            except _PausedError:
                pass  # it waits again
            finally:
                self._admission.placed(counts=isinstance(placed, Placed))
        if isinstance(placed, Refusal):
            raise RefusedError(placed)
        if placed.certainty:
            self._metrics.placements.labels(placed.certainty, placed.action).inc()
            self._metrics.prompt_tokens.inc(placed.prompt_tokens)
            self._metrics.tokenized.inc(placed.tokenized)
            for reason in placed.reasons:
                self._metrics.doubts.labels(reason).inc()
        return placed

    async def _exchange(
        self, placed: Placed, answer: Answer, arrived_s: float, tried: Sequence[Worker]
    ) -> None:
        """Send a request to its worker, and the worker's answer to the client."""
        worker = placed.worker
        with self.under_way(worker) as exchange:
            if len(tried) == 1:
                self._metrics.wait.observe(exchange.sent_s - arrived_s)
            self._placer.on_sent(placed, exchange.sent_s)
            sent_s, is_passed_on = exchange.sent_s, False
            try:
                async with exchange.patience:
                    if placed.prefill is not None:
                        await self.prefill(placed, placed.prefill)
                    sent_s, is_passed_on = monotonic(), True
                    await self._pass_on(placed, exchange, answer, arrived_s, tried)
            except _BusyError:
                self._placer.on_failed(placed, monotonic())
                raise
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                self._placer.on_failed(placed, monotonic())
                raise _WorkerLostError(error, sent_s, is_passed_on=is_passed_on) from error
            except BaseException:  # the client has left
                self._end(placed, answer)
                raise
        self._end(placed, answer)

    def _end(self, placed: Placed, answer: Answer) -> None:
        if answer.status >= FIRST_ERROR:
            self._placer.on_failed(placed, monotonic())
        else:
            self._placer.on_ended(placed, answer.num_events, monotonic())

    @contextmanager
    def under_way(self, worker: Worker) -> Iterator[Exchange]:
        """Count an exchange at its worker while it lasts."""
        exchange = Exchange(asyncio.timeout(None), monotonic())
        in_flight = self._metrics.in_flight.labels(worker.name)
        worker.exchanges.add(exchange)
        in_flight.inc()
        try:
            yield exchange
        finally:
            worker.exchanges.discard(exchange)
            in_flight.dec()
            self._admission.left()

    async def prefill(self, placed: Placed, prefill: Prefill) -> None:
        """Have another worker compute the prompt. If that fails, the one that decodes computes it.

        Meanwhile the request counts at both workers. If this one is lost, one more gets it at most.
        """
        worker, request = prefill.worker, placed.request
        answer, problem = b"", ""
        try:
            with self.under_way(worker) as exchange:
                async with exchange.patience:
                    answer = await self._prefilled(request, prefill)
            worker.breaker.on_success()
        except aiohttp.ClientResponseError as error:
            problem = f"status {error.status}"
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            worker.breaker.on_failure(exchange.sent_s)
            problem = str(error) or type(error).__name__
            if _was_sent(error):
                request.times_lost += 1
                request.is_whole = True
        if problem:
            _log.warning("worker %s computed no prefill: %s", worker.name, problem)
        self._metrics.prefills.labels(worker.name, "failed" if problem else "done").inc()
        self._placer.on_prefilled(placed, answer, problem, monotonic())

    async def _prefilled(self, request: RouterRequest, prefill: Prefill) -> bytes:
        """Return a prefill worker's answer. Raises aiohttp.ClientError, OSError."""
        headers = [x for x in request.headers if x[0] != b"accept-encoding"]
        async with self._sending(
            request, prefill.worker, prefill.body, headers, "prefill"
        ) as response:
            response.raise_for_status()
            return await response.read()

    async def _pass_on(
        self,
        placed: Placed,
        exchange: Exchange,
        answer: Answer,
        arrived_s: float,
        tried: Sequence[Worker],
    ) -> None:
        """Send the worker's answer, byte for byte, no faster than the client reads it.

        The head is sent with the first part of the body: up to then another worker may answer.
        """
        request = placed.request
        body = request.body if placed.body is None else placed.body
        async with self._sending(request, placed.worker, body, request.headers) as response:
            if response.status in BUSY and self._workers.usable(request, tried):
                raise _BusyError
            read = response.content.readany
            part = await read()
            exchange.heard_s = now_s = monotonic()
            placed.worker.breaker.on_success()
            if response.status < FIRST_ERROR:
                self._placer.on_first_byte(placed, now_s)
                self._metrics.first_byte.labels(request.door.name).observe(now_s - arrived_s)
            if (response.content_length or _WHOLE_BYTES) < _WHOLE_BYTES:
                part += await response.content.read()
            placed.answer_id = answer_id(part)
            await answer.start(response, placed)
            while part:
                await answer.send(part)
                part = await read()
                exchange.heard_s = monotonic()
            await answer.end()

    @asynccontextmanager
    async def _sending(
        self,
        request: RouterRequest,
        worker: Worker,
        body: bytes,
        headers: Headers,
        leg: str = "upstream",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a body to a worker, and yield the answer's head."""
        with request.spans.sending(worker.name, leg) as span:
            asking = self._session.request(
                request.method,
                URL(worker.address.url + request.target, encoded=True),
                data=BytesIO(body) if len(body) > _LARGE_BYTES else body or None,
                headers=CIMultiDict(
                    (name.decode("latin-1"), _as_written(value))
                    for name, value in span.headers(headers)
                ),
                skip_auto_headers=_SKIPPED,
                allow_redirects=False,
            )
            async with asking as response:
                span.on_status(response.status)
                yield response


def _was_sent(error: Exception) -> bool:
    """Return False if the worker cannot have got the request."""
    return not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def _as_written(value: bytes) -> str:
    """Decode a header's value so that aiohttp, which writes UTF-8, sends the same bytes.

    It cannot send bytes that are no UTF-8: they arrive as the UTF-8 of their Latin-1 letters.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _lost(worker: Worker) -> Refusal:
    text = f"worker {worker.name} was lost while it served this request; send it again"
    return Refusal(Reason.WORKER_LOST, text, retry_after_s=1)
