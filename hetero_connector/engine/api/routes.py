"""The routes. Each asks all engines of the server, and answers with a list of what they say."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from hetero_connector.engine.api.answers import NO_ENGINES, answered, failed
from hetero_connector.engine.api.command_routes import add_commands
from hetero_connector.engine.api.engines import Engines

PREFIX = "/v1/heterocache"
QUESTIONS = {
    "status": "Return each engine's tiers, health, newest decisions and learned costs.",
    "sessions": "Return the sessions with the latest turns, by digest, and where their state is.",
    "decisions": "Return how each engine decided on its newest requests, and what came of it.",
    "chain": "Return how each engine names chains, for a router that looks them up.",
    "costs": "Return what each engine has learned of its costs, as a profile.",
}


def make_router() -> APIRouter:
    """Return the routes for one API server."""
    router = APIRouter(prefix=PREFIX, tags=["heterocache"])
    for name, description in QUESTIONS.items():
        router.add_api_route(
            f"/{name}", _asker(name), methods=["GET"], name=name, description=description
        )
    add_commands(router)
    router.add_api_route("/requests/{request_id:path}", report, methods=["GET"], name="report")
    return router


async def report(request_id: str, request: Request) -> JSONResponse:
    """Return the reports of one request, by the id of its answer: one for each of its prompts."""
    engines: Engines | None = request.app.state.heterocache_engines
    if engines is None:
        return failed(503, NO_ENGINES)
    answers = await engines.ask({"get": "decisions"})
    if all("error" in answer for answer in answers):
        return answered(engines, answers)
    shown = [x for answer in answers for x in answer.get("decisions", ())]
    reports = [x for x in shown if _is_part_of(x["request_id"], request_id)]
    if not reports:
        return failed(404, _NO_REPORT)
    return JSONResponse({"reports": reports})


def _is_part_of(engine_id: str, request_id: str) -> bool:
    """Return whether vLLM made the engine's id from the id of an answer.

    It puts the number of a choice before it. After it comes that of a turn of `/v1/responses`, that
    of a prompt, and a random part.
    """
    return (
        re.fullmatch(rf"(\d+_)?{re.escape(request_id)}(_\d+)?(-\d+)?(-[0-9a-f]{{8}})?", engine_id)
        is not None
    )


def _asker(name: str) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def ask(request: Request) -> JSONResponse:
        engines: Engines | None = request.app.state.heterocache_engines
        if engines is None:
            return failed(503, NO_ENGINES)
        return answered(engines, await engines.ask({"get": name}))

    return ask


_NO_REPORT = (
    "no engine has a report of this request: each keeps those of its newest 256 requests, from "
    "their first token on, by the id of the answer"
)
