"""Answer questions about a running engine through a Unix socket.

The socket lies in the user's private folder (`startup.rendezvous`), so only this user can connect.
A thread answers from snapshots; the scheduler's thread is never asked and never waits.

    client -> engine   one line of JSON: {"get": "status"}
    engine -> client   one JSON object, then the connection ends: the answer, or {"error": text}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.heterocache")

Answer = Callable[[], Mapping[str, Any]]

MAX_REQUEST_BYTES = 4096
_PATIENCE_S = 2.0
_BACKLOG = 8
_PAUSE_S = 0.2


class StatusServer:
    """Serves answers by name, one connection at a time, until `close`."""

    def __init__(self, path: Path, answers: Mapping[str, Answer]) -> None:
        """Listen at `path`, and remove what lies there. Raises OSError."""
        self._path = path
        self._answers = answers
        self._closed = threading.Event()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(path) as address:
                self._listener.bind(address)
            path.chmod(0o600)
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
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(_PAUSE_S):
                    return
                continue  # the process has no free file descriptor, for example
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_PATIENCE_S)
            answer = self._answer_to(_read_line(connection, MAX_REQUEST_BYTES))
            connection.sendall(json.dumps(answer).encode())
        except OSError:
            pass  # the client is slow or gone
        except Exception:
            logger.exception("a question about the engine's status was not answered")

    def _answer_to(self, line: bytes) -> Mapping[str, Any]:
        try:
            request = json.loads(line)
            name = request["get"]
            answer = self._answers[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"error": f"ask one of {', '.join(self._answers)}, as in {{'get': 'status'}}"}
        return answer()


def ask(path: Path, name: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return an engine's answer. Raises OSError if none serves there, ValueError for no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        with _short(path) as address:
            connection.connect(address)
        connection.sendall(json.dumps({"get": name}).encode() + b"\n")
        parts = list(iter(lambda: connection.recv(1 << 16), b""))
    answer = json.loads(b"".join(parts))
    if not isinstance(answer, dict):
        raise ValueError(f"{path}: the answer is no object")
    return answer


def _read_line(connection: socket.socket, limit: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) <= limit:
        part = connection.recv(limit)
        if not part:
            break
        line += part
    return line


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield an address for the path that is short enough for a socket: at most 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
