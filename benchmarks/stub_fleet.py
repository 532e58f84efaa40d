"""Stub workers, each in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from benchmarks.child_processes import announced


class StubFleet:
    """`count` processes of `examples.stub_worker`, on free ports. Use it as a context manager."""

    def __init__(self, count: int, model: str = "stub-model") -> None:
        self._stack = ExitStack()
        self.processes: list[subprocess.Popen[str]] = []
        self.ports: list[int] = []
        for number in range(count):
            self.start(["--name", f"stub-{number}", "--model", model])

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, arguments: Sequence[str], port: int = 0) -> int:
        """Start one more; return its port."""
        process, port = self._launch(arguments, port)
        self.processes.append(process)
        self.ports.append(port)
        return port

    def restart(self, number: int) -> None:
        """Start a worker that has ended again, at its port."""
        self.processes[number], _ = self._launch([], self.ports[number])

    def _launch(self, arguments: Sequence[str], port: int) -> tuple[subprocess.Popen[str], int]:
        command = ["-m", "examples.stub_worker", "--port", str(port), *arguments]
        line, process = self._stack.enter_context(announced(command))
        return process, int(line.split()[-1])

    def __enter__(self) -> StubFleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
