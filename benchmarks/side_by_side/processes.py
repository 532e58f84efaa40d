"""Processes of a contestant besides its engine, and what all of them take of the machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_START_TIMEOUT_S = 90.0
_LOG_TAIL_BYTES = 3000


@dataclass(frozen=True)
class ServiceCommand:
    """A command that runs until it is stopped. It is ready when it listens on the port."""

    command: Sequence[str]
    port: int


class Service:
    """One running service, in a process group of its own."""

    def __init__(self, what: ServiceCommand, variables: Mapping[str, str], log: Path) -> None:
        """Start it. `log` gets its output. Raises RuntimeError if it does not get ready."""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                what.command,
                env=os.environ | dict(variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _listens(what.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
                raise RuntimeError(f"{what.command[0]} does not listen:\n{tail}")
            time.sleep(0.1)

    @property
    def group(self) -> int:
        """Its process group, which is its process id."""
        return self._process.pid

    def stop(self) -> None:
        """Ask it to end with SIGTERM, and kill it if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """Kill its process group. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def remove_left_memory(folder: Path = Path("/dev/shm")) -> None:
    """Remove the shared memory of LMCache processes that were killed: 2 GiB each, for ever."""
    for path in folder.glob("lmcache_kv_*_*"):
        process_id = path.name.split("_")[2]
        if process_id.isdecimal() and not psutil.pid_exists(int(process_id)):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Footprint:
    """The processes of some groups and their memory."""

    processes: int
    memory_bytes: int
    """Proportional set size: pages that several processes share count once."""


def footprint(groups: Iterable[int]) -> Footprint:
    """Return what the processes of these groups take now."""
    wanted = set(groups)
    count = size = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) in wanted:
                size += process.memory_full_info().pss
                count += 1
    return Footprint(count, size)
