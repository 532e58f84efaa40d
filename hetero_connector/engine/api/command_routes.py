"""The routes that change something. Each has all engines of the server carry out a command.

They are refused unless the server has an API key, which vLLM then demands for everything under
`/v1`: without one, whoever reaches the port could empty the cache, or learn from `warm` what others
have sent. A gateway that authenticates users can add the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from hetero_connector.engine.api.answers import NO_ENGINES, answered, failed
from hetero_connector.engine.api.engines import Engines
from hetero_connector.engine.scheduler.commands import pack_tokens

if TYPE_CHECKING:
    from argparse import Namespace

MAX_BODY_BYTES = 8 << 20
"""Enough for a million token ids."""
MAX_AT_ONCE = 4
"""Commands under way: the engines' sockets serve twice as many clients, so status stays open."""
_BODY_S = 30.0
_MARGIN_S = 30.0
"""An engine answers so much later at most than the command itself may wait."""
_MAX_WAIT_S = 600.0


class Command(NamedTuple):
    """A route, and what it has the engines do."""

    does: str
    """The command at the socket."""
    description: str
    wait_s: float = 0.0
    """The command's own default of `wait_s`."""
    takes_prompt: bool = False
    fixed: Mapping[str, Any] = {}


COMMANDS = {
    "clear": Command("clear", "Forget `all`, what a `salt` or a `model` stored, or a `session`."),
    "warm": Command("warm", "Bring what is stored of a prompt from SSD to DRAM.", 20.0, True),
    "pin": Command("pin", "Evict nothing of a prompt or a `session` for `seconds`.", 0.0, True),
    "unpin": Command("unpin", "End the pin of a prompt or a `session`.", 0.0, True),
    "scrub": Command("scrub", "Check all that is stored, at `mib_per_s`; `stop`: end that."),
    "drain": Command("drain", "Store nothing new, and write what is in DRAM to SSD.", 60.0),
    "resume": Command("drain", "Store again after `drain`.", fixed={"resume": True}),
}


def add_commands(router: APIRouter) -> None:
    """Add the routes."""
    at_once = asyncio.Semaphore(MAX_AT_ONCE)
    for name, command in COMMANDS.items():
        router.add_api_route(
            f"/{name}",
            _carrier(command, at_once),
            methods=["POST"],
            name=name,
            description=command.description,
        )


def has_api_key(args: Namespace | None) -> bool:
    """Return whether vLLM demands a key with this server's arguments."""
    from vllm import envs

    return any(getattr(args, "api_key", None) or [envs.VLLM_API_KEY])


class _RefusedError(Exception):
    """The request is answered with this status and text."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _carrier(
    command: Command, at_once: asyncio.Semaphore
) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def carry_out(request: Request) -> JSONResponse:
        state = request.app.state
        engines: Engines | None = state.heterocache_engines
        try:
            if not state.heterocache_has_key:
                raise _RefusedError(403, _NO_KEY)
            if engines is None:
                raise _RefusedError(503, NO_ENGINES)
            arguments = await _read_arguments(request)
            if command.takes_prompt and "session" not in arguments:
                arguments = await _with_tokens(request, arguments)
            if at_once.locked():
                raise _RefusedError(429, f"{MAX_AT_ONCE} commands are under way: try again later")
            async with at_once:
                question = {**arguments, **command.fixed, "do": command.does}
                wait_s = _wait_s(arguments, command.wait_s)
                answers = await engines.ask(question, wait_s + _MARGIN_S)
        except _RefusedError as error:
            return failed(error.status, str(error))
        return answered(engines, answers, is_command=True)

    return carry_out


async def _read_arguments(request: Request) -> dict[str, Any]:
    """Return the body, an object; nothing for no body."""
    try:
        async with asyncio.timeout(_BODY_S):
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _RefusedError(413, f"a body may have {MAX_BODY_BYTES} bytes at most")
    except TimeoutError:
        raise _RefusedError(408, f"the body did not arrive within {_BODY_S:.0f} s") from None
    if not body:
        return {}
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # a browser sends others without asking the server first
        raise _RefusedError(415, "send JSON with `Content-Type: application/json`")
    try:
        arguments = msgspec.json.decode(body)  # refuses text that no answer could repeat
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise _RefusedError(400, "the body must be a JSON object")
    for name in ("do", "get", "resume", "tokens"):
        if name in arguments:
            raise _RefusedError(400, f"unknown argument {name}")
    return arguments


def _wait_s(arguments: Mapping[str, Any], default_s: float) -> float:
    """Return how long the command may wait. What is no number is left to the engines to refuse."""
    wait_s = arguments.get("wait_s", default_s)
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)):
        return default_s
    if not 0 <= wait_s <= _MAX_WAIT_S:
        raise _RefusedError(400, f"wait_s must be seconds, at most {_MAX_WAIT_S:.0f}")
    return float(wait_s)


_OWN = ("salt", "keep_s", "wait_s", "seconds")


async def _with_tokens(request: Request, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the prompt's tokens in place of what describes it."""
    own = {name: arguments.pop(name) for name in _OWN if name in arguments}
    if "token_ids" in arguments:
        token_ids = arguments.pop("token_ids")
        if arguments:
            raise _RefusedError(
                400, f"unknown argument {', '.join(arguments)[:200]} besides token_ids"
            )
    else:
        token_ids = await _tokenize(request, arguments)
    if not isinstance(token_ids, list) or not token_ids:
        raise _RefusedError(400, "token_ids must be a list of token ids that is not empty")
    try:
        return {**own, "tokens": pack_tokens(token_ids)}
    except ValueError as error:
        raise _RefusedError(400, str(error)) from None


async def _tokenize(request: Request, described: Mapping[str, Any]) -> Any:
    """Have vLLM make the tokens of a `prompt`, or of `messages`, as its route `/tokenize` does."""
    from pydantic import ValidationError
    from vllm.entrypoints.serve.tokenize.protocol import (
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    kinds = {"prompt": TokenizeCompletionRequest, "messages": TokenizeChatRequest}
    given = [name for name in kinds if name in described]
    if len(given) != 1:
        raise _RefusedError(400, "say which prompt: one of token_ids, prompt and messages")
    kind = kinds[given[0]]
    if unknown := sorted(described.keys() - kind.model_fields.keys()):
        raise _RefusedError(400, f"unknown argument {', '.join(unknown)[:200]}")
    tokenization = getattr(request.app.state, "serving_tokenization", None)
    if tokenization is None:
        raise _RefusedError(501, "this server has no tokenizer: send token_ids")
    try:
        asked = kind.model_validate(described)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
        raise _RefusedError(400, problems[:2000]) from None
    answer = await tokenization.create_tokenize(asked, request)
    if hasattr(answer, "error"):
        raise _RefusedError(answer.error.code, answer.error.message)
    return answer.tokens


_NO_KEY = (
    "refused: this server has no API key, so anyone could command it. Start it with --api-key, or "
    "VLLM_API_KEY in its environment; or use `heterocache` on the engines' host"
)
