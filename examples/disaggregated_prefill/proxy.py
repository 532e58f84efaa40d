"""An OpenAI-compatible proxy for a fleet of stock servers that prefill or decode.

A prefill is the same request with one output token and `do_remote_decode`. The decoder reads the
state from the prefiller's DRAM: `do_remote_prefill` asks it to look there, and the prefiller's
answer names the token to resume at. Nothing else is handed off, so a failed prefill costs only
time: the decoder computes the prompt itself. It also computes one that must not be stored.

    python -m examples.disaggregated_prefill.proxy --prefill URL ... --decode URL ...
"""

from __future__ import annotations

import argparse
import io
import logging
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from ownership.router.doors import DOORS
from ownership.router.handoffs import can_hand_off, decode_body, prefill_body

CONNECT_S = 5.0
PREFILL_S = 120.0
RETRY_AFTER_S = 5.0
"""The pause before a prefiller that could not be reached, or did not answer, is asked again."""
_CONNECTION_HEADERS = {
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "transfer-encoding",
}

logger = logging.getLogger("proxy")


class Proxy:
    """Prefills on the server with the fewest requests; keeps a session on one decoder."""

    def __init__(
        self, prefillers: Sequence[str], decoders: Sequence[str], prefill_s: float = PREFILL_S
    ) -> None:
        """`prefillers`, `decoders`: base addresses, `http://host:port`. `prefill_s`: timeout."""
        self._prefillers, self._decoders = list(prefillers), list(decoders)
        self._prefill_timeout = ClientTimeout(total=prefill_s, sock_connect=CONNECT_S)
        self._outstanding: Counter[str] = Counter()
        self._skip_until_s: defaultdict[str, float] = defaultdict(float)
        self._client: ClientSession

    def app(self) -> web.Application:
        """Return the web application. Run it with `handler_cancellation`."""
        app = web.Application(client_max_size=0)  # no limit: the servers limit prompts
        app.cleanup_ctx.append(self._connect)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/{path:health|v1/models}", self._ask_a_decoder)
        return app

    async def _connect(self, _: web.Application) -> AsyncIterator[None]:
        # A new connection each time: one kept open may be closed by the server as it is used.
        connector = TCPConnector(limit=0, force_close=True)
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_S)
        options: dict[str, Any] = {"auto_decompress": False, "timeout": timeout}
        async with ClientSession(connector=connector, **options) as self._client:
            yield

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        try:
            body = msgspec.json.decode(content)
        except (ValueError, RecursionError) as error:
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        params = body.get("kv_transfer_params") or {}
        if not isinstance(params, dict):
            return _error(400, "kv_transfer_params is not a JSON object")
        session = body.get("session_id") or request.headers.get("X-Session-ID")
        session = session or params.get("session_id")
        answer = None
        if can_hand_off(body):
            prefill = prefill_body(DOORS[request.path].name, body)
            answer = await self._prefill(request, prefill)
        if answer is not None:
            try:
                content = decode_body(body, answer)
            except ValueError as error:
                logger.warning("a prefiller's answer is of no use: %s", error)
        return await self._relay(request, self._decoder(session), content)

    async def _ask_a_decoder(self, request: web.Request) -> web.StreamResponse:
        return await self._relay(request, self._decoder(None), None)

    def _decoder(self, session: object) -> str:
        if session:
            return self._decoders[zlib.crc32(str(session).encode()) % len(self._decoders)]
        return min(self._decoders, key=self._outstanding.__getitem__)

    async def _prefill(self, request: web.Request, body: bytes) -> bytes | None:
        """Return a prefiller's answer; None if no prefill succeeded."""
        headers = _forwarded(request.headers)
        for server in sorted(self._prefillers, key=self._outstanding.__getitem__):
            if time.monotonic() < self._skip_until_s[server]:
                continue
            self._prefillers.remove(server)
            self._prefillers.append(server)  # equally busy servers take turns
            try:
                with self._counted(server):
                    post = self._client.post(
                        server + request.path,
                        data=io.BytesIO(body),
                        headers=headers,
                        timeout=self._prefill_timeout,
                    )
                    async with post as answer:
                        content = await answer.read()
            except (ClientError, TimeoutError) as error:
                logger.warning("the prefiller %s cannot be reached: %r", server, error)
                self._skip_until_s[server] = time.monotonic() + RETRY_AFTER_S
                if isinstance(error, ClientError):
                    continue
                return None  # the request has waited for long enough
            if answer.status != 200:
                logger.warning("the prefiller %s answered %d", server, answer.status)
                return None
            return content
        return None

    async def _relay(
        self, request: web.Request, server: str, body: bytes | None
    ) -> web.StreamResponse:
        """Stream the decoder's answer to the client."""
        response: web.StreamResponse | None = None
        headers = _forwarded(request.headers)
        url = server + request.path
        data = None if body is None else io.BytesIO(body)
        try:
            with self._counted(server):
                async with self._client.request(
                    request.method, url, data=data, headers=headers
                ) as answer:
                    response = web.StreamResponse(
                        status=answer.status, headers=_forwarded(answer.headers)
                    )
                    await response.prepare(request)
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
        except (ClientError, TimeoutError) as error:
            if response is None:
                return _error(502, f"the decoder {server} cannot be reached: {error!r}")
            if request.transport is None:
                return response  # the client has left
            logger.warning("the decoder %s ended in the middle of an answer: %r", server, error)
            request.transport.close()  # no end of the stream: the client must see the failure
        return response

    @contextmanager
    def _counted(self, server: str) -> Iterator[None]:
        self._outstanding[server] += 1
        try:
            yield
        finally:
            self._outstanding[server] -= 1


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.lower() not in _CONNECTION_HEADERS}


def _error(status: int, message: str) -> web.Response:
    logger.warning(message)
    error = {"message": message, "type": "proxy_error", "code": status}
    return web.json_response({"error": error}, status=status)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.disaggregated_prefill.proxy")
    parser.add_argument("--prefill", nargs="*", default=[], metavar="URL", help="none: no prefill")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--prefill-timeout", type=float, default=PREFILL_S, metavar="SECONDS")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    app = Proxy(given.prefill, given.decode, given.prefill_timeout).app()
    web.run_app(app, host=given.host, port=given.port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
