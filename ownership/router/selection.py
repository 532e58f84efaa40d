"""Doors for proxies that only ask where to send: the HTTP API of Dynamo's selection service.

The workers are those of the router's configuration. Prompts come as token ids, or as the whole body
that the proxy will send.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Awaitable, Callable, Container, Set
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ownership.router.answer import refusal_response
from ownership.router.config import RouterConfig
from ownership.router.doors import DOORS, Reason, Refusal
from ownership.router.metrics import RouterMetrics
from ownership.router.placer import Placed
from ownership.router.requests import (
    ClientLeftError,
    RefusedError,
    RouterRequest,
    has_key,
    read_fields,
    read_request,
)
from ownership.router.reservations import Reservations
from ownership.router.workers import Worker, WorkerSet, WorkerState
from ownership.scheduling import WorkerPrefix

BLOCK_TOKENS = 16
"""The tokens that each `output_block` stands for."""
_NO_MODEL = "default"
_ID = re.compile(r"[A-Za-z0-9._:~-]{1,256}")
"""Ids that a path can name."""
_COMPLETIONS = "/v1/completions"


class _Selection(msgspec.Struct):
    """A body of `/select`, `/select_and_reserve` and `/reservations`."""

    selection_id: str | None = None
    model_name: str = _NO_MODEL
    routing_group: str = "default"
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    worker_id: int | None = None
    allowed_worker_ids: frozenset[int] | None = None
    body: msgspec.Raw = msgspec.Raw()
    """The request itself, in place of its tokens."""
    path: str = "/v1/chat/completions"
    """The path of that request."""


class SelectionDoors:
    """The routes. All answers are JSON."""

    def __init__(
        self,
        config: RouterConfig,
        workers: WorkerSet,
        reservations: Reservations,
        metrics: RouterMetrics,
    ) -> None:
        self._config, self._workers, self._reservations = config, workers, reservations
        self._metrics = metrics
        one = "/reservations/{name}"
        self.routes = [
            Route("/select", self._answering(self._select), methods=["POST"]),
            Route("/select_and_reserve", self._answering(self._reserve), methods=["POST"]),
            Route("/reservations", self._answering(self._reserve_at), methods=["POST"]),
            Route(one, self._answering(self._free), methods=["DELETE"]),
            Route(f"{one}/prefill_complete", self._answering(self._prefilled), methods=["POST"]),
            Route(f"{one}/output_block", self._answering(self._output), methods=["POST"]),
            Route("/workers", self._answering(self._list), methods=["GET"]),
        ]

    async def _select(self, call: Request) -> object:
        asked, request = await self._read(call)
        placed = await self._reservations.place(request, _excluded(asked))
        return _answer(asked, placed)

    async def _reserve(self, call: Request) -> object:
        asked, request = await self._read(call)
        if asked.selection_id is None:
            asked.selection_id = uuid.uuid4().hex
        return await self._reserved(call, asked, request)

    async def _reserve_at(self, call: Request) -> object:
        asked, request = await self._read(call)
        if asked.selection_id is None or asked.worker_id is None:
            raise _refused(Reason.BAD_BODY, "a reservation needs selection_id and worker_id")
        return await self._reserved(call, asked, request)

    async def _reserved(self, call: Request, asked: _Selection, request: RouterRequest) -> object:
        assert asked.selection_id is not None
        placed = await self._reservations.place(request, _excluded(asked))
        if asked.selection_id in self._reservations:
            text = f"there is a reservation {asked.selection_id!r} already"
            raise _refused(Reason.RESERVED, text)
        answer = _answer(asked, placed)
        self._reservations.reserve(asked.selection_id, placed)
        if await call.is_disconnected():  # it left while it waited for room
            self._reservations.free(asked.selection_id)
            raise ClientLeftError
        return answer

    async def _prefilled(self, call: Request) -> object:
        self._reservations.answered(self._named(call))
        return {}

    async def _output(self, call: Request) -> object:
        self._reservations.answered(self._named(call), BLOCK_TOKENS)
        return {}

    async def _free(self, call: Request) -> object:
        self._reservations.free(self._named(call))
        return {}

    def _named(self, call: Request) -> str:
        name = str(call.path_params["name"])
        if name not in self._reservations:
            text = f"there is no reservation {name!r} in this process of the router"
            raise _refused(Reason.NO_RESERVATION, text)
        return name

    async def _list(self, call: Request) -> object:
        return [
            {
                "worker_id": worker_id(worker.name),
                "worker": worker.name,
                "endpoint": worker.address.url,
                "models": list(worker.models),
                "lifecycle": _lifecycle(worker),
            }
            for worker in self._workers
        ]

    async def _read(self, call: Request) -> tuple[_Selection, RouterRequest]:
        """Read what is asked, and the request that it is asked for. Raises RefusedError."""
        request = await read_request(call.scope, call.receive, self._config)
        try:
            asked = msgspec.json.decode(request.body, type=_Selection)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _refused(Reason.BAD_BODY, f"not a body of this API: {error}") from error
        if asked.selection_id is not None and not _ID.fullmatch(asked.selection_id):
            text = "selection_id: 1 to 256 letters, digits and ._:~- are taken"
            raise _refused(Reason.BAD_BODY, text)
        path, body = asked.path, bytes(asked.body)
        if (asked.token_ids is None) == (not body):
            text = "give the prompt as token_ids, or the request as body, with its path: hashes "
            raise _refused(Reason.BAD_BODY, text + "of blocks are not the workers' own here")
        if not body:
            path, body = _COMPLETIONS, msgspec.json.encode(_completion(asked))
        if path not in DOORS:
            raise _refused(Reason.BAD_BODY, f"path: {path!r} is none of {', '.join(DOORS)}")
        headers = request.headers
        if asked.session_id is not None:
            headers = [*headers, (b"x-session-id", asked.session_id.encode())]
        door = DOORS[path]
        request = replace(request, door=door, target=path, headers=headers, body=body)
        read_fields(request)
        request.is_stream |= asked.token_ids is not None  # its proxy tells its first token
        return asked, request

    def _answering(
        self, act: Callable[[Request], Awaitable[object]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a route's function: the key is checked, and refusals become answers."""

        async def answer(call: Request) -> Response:
            try:
                if not has_key(dict(call.headers.raw), self._config):
                    raise _refused(Reason.WRONG_KEY, "this needs one of the router's API keys")
                return _json(await act(call))
            except RefusedError as error:
                return refusal_response(error.refusal, self._metrics)
            except ClientLeftError:
                return Response(status_code=400)

        return answer


class _Others(Container[Worker]):
    """The workers that a caller does not allow, also those that come while its request waits."""

    def __init__(self, allowed: Set[int]) -> None:
        self._allowed = allowed

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and worker_id(worker.name) not in self._allowed


def _excluded(asked: _Selection) -> Container[Worker]:
    if asked.worker_id is not None:
        return _Others({asked.worker_id})
    return () if asked.allowed_worker_ids is None else _Others(asked.allowed_worker_ids)


@lru_cache(maxsize=4096)
def worker_id(name: str) -> int:
    """Return the number of a worker, the same in each router: 48 bits, so JSON has it whole."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest())


def _completion(asked: _Selection) -> dict[str, Any]:
    fields = {"prompt": asked.token_ids, "cache_salt": asked.cache_salt}
    return fields if asked.model_name == _NO_MODEL else {"model": asked.model_name, **fields}


def _answer(asked: _Selection, placed: Placed) -> dict[str, Any]:
    worker = placed.worker
    answer: dict[str, Any] = {
        "model_name": asked.model_name,
        "routing_group": asked.routing_group,
        "worker_id": worker_id(worker.name),
        "worker": worker.name,
        "dp_rank": 0,
        "endpoint": worker.address.url,
        "block_size": BLOCK_TOKENS,
        "certainty": placed.certainty or None,
        "reasons": list(placed.reasons),
        "action": placed.action or None,
    }
    if asked.selection_id is not None:
        answer["selection_id"] = asked.selection_id
    forecast = placed.forecast()
    if forecast is not None:
        gpu, cpu, disk = forecast.prefixes.get(worker.name, WorkerPrefix())
        cpu = max(gpu, cpu)
        disk = max(cpu, disk)
        overlap = {"longest_matched": disk, "gpu": gpu, "dp": {"0": gpu}, "cpu": cpu, "disk": disk}
        answer |= {
            "isl_tokens": forecast.prompt_tokens,
            "overlap": overlap,
            "effective_prefill_tokens": forecast.prompt_tokens - forecast.resume_tokens,
            "predicted_ttft_s": forecast.ttft_s,
            "predicted_cost_s": forecast.cost_s,
        }
    return answer


def _lifecycle(worker: Worker) -> str:
    if worker.address.is_draining:
        return "draining"
    return "schedulable" if worker.state is WorkerState.UP else "unschedulable"


def _json(answer: object) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _refused(reason: Reason, text: str) -> RefusedError:
    return RefusedError(Refusal(reason, text))
