"""A TLS proxy for a Redis server that was built without TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from types import TracebackType


class TlsProxy:
    """Listens on a free port of 127.0.0.1 with the context's certificate."""

    def __init__(self, context: ssl.SSLContext, server_port: int) -> None:
        self._context = context
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> TlsProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with raw:
            try:
                client = self._context.wrap_socket(raw, server_side=True)
            except OSError:  # a client that does not trust the certificate
                return
            with client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join(timeout=5.0)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
