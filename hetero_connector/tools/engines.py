"""The running engines of this user: finds them, chooses among them, and has them do something."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hetero_connector.engine.scheduler.status_socket import ask
from hetero_connector.engine.startup.rendezvous import status_paths
from hetero_connector.errors import CommandError
from hetero_connector.tools.command import note

Status = Mapping[str, Any]
Answer = dict[str, Any]

_PATIENCE_S = 30.0
"""An engine answers a command so much later at most than the command itself may take."""


@dataclass(frozen=True)
class RunningEngine:
    """An engine that answers at its socket."""

    socket: Path
    status: Status

    @property
    def title(self) -> str:
        """Its model and process, for people."""
        about = self.status["engine"]
        return f"{about['model']} (pid {about['pid']})"

    @property
    def names(self) -> str:
        """Its title, with its ssd_dir if it has one: what people may call it."""
        ssd_dir = self.status["engine"]["config"]["ssd_dir"]
        return self.title if ssd_dir is None else f"{self.title} at {ssd_dir}"

    def is_named(self, name: str) -> bool:
        """Return whether people may call it so."""
        about = self.status["engine"]
        ssd_dir = about["config"]["ssd_dir"]
        names = {about["model"], Path(about["model"]).name, str(about["pid"]), about["engine"]}
        return name in names or (ssd_dir is not None and Path(name).absolute() == Path(ssd_dir))


class Found(NamedTuple):
    """Engines of this user on this machine."""

    running: list[RunningEngine]
    silent: list[Path]
    """The sockets of engines that do not answer: what they are called is unknown."""


def find() -> Found:
    """Return the engines that run. Those that were killed are left out."""
    answers = ask_all(dict.fromkeys(status_paths(), "status"))
    running = [RunningEngine(path, x) for path, x in answers.items() if x and "engine" in x]
    running.sort(key=lambda x: (x.status["engine"]["started"], x.socket))
    return Found(running, [path for path, x in answers.items() if x is None])


def choose(name: str | None, *, may_be_all: bool = False) -> Found:
    """Return the engines with this name; None: the only one, or all of them if it `may_be_all`.

    Those that do not answer are noted. They are returned if they may be meant: without a name, or
    if no engine that answers has it. Raises CommandError for none, StoreError if the folder of
    their sockets is not this user's own.
    """
    engines, silent = find()
    for path in silent:
        note(f"the engine at {path} hangs, it does not answer")
    chosen = [x for x in engines if name is None or x.is_named(name)]
    if not chosen and silent:
        return Found([], silent)
    if not engines:
        raise CommandError(
            "no engine of this user runs on this machine with HeteroConnector, or its socket is "
            f"not in {tempfile.gettempdir()}: set TMPDIR as the engine has it; in a container, run "
            "this inside; to a systemd unit with PrivateTmp give a TMPDIR elsewhere"
        )
    known = "; ".join(x.names for x in engines)
    if not chosen:
        raise CommandError(f"no running engine is called {name!r}: there are {known}")
    if name is None and len(chosen) + len(silent) > 1 and not may_be_all:
        raise CommandError(
            f"several engines run here: choose with --engine MODEL, PID or SSD_DIR; {known}"
        )
    return Found(chosen, silent if name is None else [])


def ask_all(questions: Mapping[Path, str], timeout_s: float = 5.0) -> dict[Path, Answer | None]:
    """Ask engines, by socket, at the same time; return the answers, None for one that gives none.

    Left out is a socket at which no engine listens any more.
    """

    def answer(path: Path) -> dict[Path, Answer | None]:
        for _ in range(2):  # an engine that is ending breaks off the first answer, and then is gone
            try:
                return {path: ask(path, {"get": questions[path]}, timeout_s)}
            except (FileNotFoundError, ConnectionRefusedError):
                return {}
            except TimeoutError:
                break
            except (OSError, ValueError):
                continue
        return {path: None}

    found: dict[Path, Answer | None] = {}
    with ThreadPoolExecutor(max(1, len(questions))) as pool:
        for one in pool.map(answer, questions):
            found |= one
    return found


def do(
    engines: Sequence[RunningEngine], command: Mapping[str, Any], wait_s: float = 0.0
) -> list[Answer]:
    """Have all engines do something at the same time; return their answers in order.

    `wait_s`: as long as the command itself may wait. The answer of an engine that refuses, or does
    not answer, is `{"error": text}`.
    """
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(lambda x: _ask(x.socket, command, wait_s + _PATIENCE_S), engines))


def _ask(path: Path, question: Mapping[str, Any], timeout_s: float) -> Answer:
    try:
        return ask(path, question, timeout_s)
    except TimeoutError:
        return {"error": f"no answer within {timeout_s:.0f} s"}
    except (OSError, ValueError) as error:
        return {"error": f"the engine has ended meanwhile: {error}"}
