"""Answer questions about a running engine, and carry out commands, through a Unix socket.

The socket lies in the user's private folder (`startup.rendezvous`), so only this user can connect.
Threads answer from snapshots; what a command needs of the scheduler's thread, it asks for.

    client -> engine   one line of JSON: {"get": "status"}, or {"do": "clear", ...} with arguments
    engine -> client   one JSON object, then the connection ends: the answer, or {"error": text};
                       for wrong arguments with "malformed": true
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_connector.errors import CommandError, MalformedCommandError

logger = logging.getLogger("vllm.heterocache")

Answer = Callable[[], Mapping[str, Any]]
Command = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Takes the arguments, which a client chose. Raises CommandError."""

MAX_REQUEST_BYTES = 8 << 20
"""Enough for the tokens of a prompt of a million tokens."""
MAX_CLIENTS = 8
"""Connections that are served at the same time."""
MAX_COMMANDS = 4
"""Commands that are carried out at the same time. The other places are for questions."""
_PATIENCE_S = 2.0
"""A client has so long to send its line, and to take the answer."""
_ITEMS_AT_ONCE = 256
"""Items of a list that are encoded at once: a few milliseconds in which no other thread runs."""
_ADDRESS_BYTES = 107
"""Longest path that is the address of a socket."""
_MODE = 0o1600
"""For this user alone. What cleans `/tmp` by age leaves alone what has the sticky bit."""
_BACKLOG = 1024
"""A client that finds this many waiting is refused at once: its `connect` raises OSError."""
_PAUSE_S = 0.2


class StatusServer:
    """Serves answers and commands by name until `close`."""

    def __init__(
        self,
        path: Path,
        answers: Mapping[str, Answer],
        commands: Mapping[str, Command] | None = None,
    ) -> None:
        """Listen at `path`, and remove what lies there. Raises OSError."""
        self._path = path
        self._answers = answers
        self._commands = commands or {}
        self._closed = threading.Event()
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        self._free_for_commands = threading.BoundedSemaphore(MAX_COMMANDS)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_address(path) as address:
                self._listener.bind(address)
            path.chmod(_MODE)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._run, name="heterocache-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket. Idempotent."""
        self._closed.set()
        with contextlib.suppress(OSError):  # it is closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):  # the folder may be gone or read-only by now
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            self._free.acquire()  # further clients wait in the backlog
            try:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="heterocache-client", daemon=True
                ).start()
            except (OSError, RuntimeError):
                self._free.release()
                if self._closed.wait(_PAUSE_S):
                    return
                continue  # the process has no free file descriptor or thread, for example

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                answer = "".join(_encode(self._answer_to(_read_line(connection)))).encode()
                connection.settimeout(_PATIENCE_S)
                connection.sendall(answer)
        except OSError:
            pass  # the client is slow or gone
        except Exception:
            logger.exception("a question about the engine's status was not answered")
        finally:
            self._free.release()

    def _answer_to(self, line: bytes) -> Mapping[str, Any]:
        try:
            request = json.loads(line)
            answer = self._answers[request["get"]] if "get" in request else None
            command = None if answer is not None else self._commands[request.pop("do")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {"error": self._usage()}
        if command is None:
            assert answer is not None
            return answer()
        if not self._free_for_commands.acquire(blocking=False):
            return {"error": f"{MAX_COMMANDS} commands are being carried out: repeat it later"}
        try:
            return command(request)
        except MalformedCommandError as error:
            return {"error": str(error), "malformed": True}
        except CommandError as error:
            return {"error": str(error)}
        finally:
            self._free_for_commands.release()

    def _usage(self) -> str:
        usage = f"ask one of {', '.join(self._answers)}, as in {{'get': 'status'}}"
        if self._commands:
            usage += f"; or do one of {', '.join(self._commands)}, as in {{'do': 'clear'}}"
        return f"{usage}, in one line of at most {MAX_REQUEST_BYTES} bytes"


def ask(path: Path, question: Mapping[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """Return an engine's answer. Raises OSError if none serves there, ValueError for no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        with short_address(path) as address:
            connection.connect(address)
        connection.sendall(encode_request(question))
        parts = list(iter(lambda: connection.recv(1 << 16), b""))
    answer = json.loads(b"".join(parts))
    if not isinstance(answer, dict):
        raise ValueError(f"{path}: the answer is no object")
    return answer


def encode_request(question: Mapping[str, Any]) -> bytes:
    """Return a question or a command as its line."""
    return json.dumps(question).encode() + b"\n"


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Yield an address for the path that is short enough for a socket: the path itself if it is.

    `/proc/net/unix` lists a socket by the address that it was bound to.
    """
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _encode(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as JSON, in parts: the encoder keeps the interpreter from the engine.

    A recording of a minute would stop the scheduler's thread for a second or two.
    """
    opening = "{"
    for name, value in answer.items():
        yield f"{opening}{json.dumps(name)}: "
        opening = ", "
        if isinstance(value, list) and len(value) > _ITEMS_AT_ONCE:
            for first in range(0, len(value), _ITEMS_AT_ONCE):
                part = json.dumps(value[first : first + _ITEMS_AT_ONCE])
                yield f"{', ' if first else '['}{part[1:-1]}"
            yield "]"
        else:
            yield json.dumps(value)
    yield "}" if answer else "{}"


def _read_line(connection: socket.socket) -> bytes:
    """Return what the client sends: up to a line's end, the limit, or its end of sending.

    Raises TimeoutError for a client that takes too long, however often it sends a byte.
    """
    deadline = time.monotonic() + _PATIENCE_S
    parts, size = list[bytes](), 0
    while not (parts and parts[-1].endswith(b"\n")) and size <= MAX_REQUEST_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts) if size <= MAX_REQUEST_BYTES else b""
