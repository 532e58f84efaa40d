"""The running engines of this user: finds them, chooses among them, and has them do something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def is_named(self, name: str) -> bool:
        """Return whether people may call it so."""
        about = self.status["engine"]
        ssd_dir = about["config"]["ssd_dir"]
        names = {about["model"], Path(about["model"]).name, str(about["pid"]), about["engine"]}
        return name in names or (ssd_dir is not None and Path(name).absolute() == Path(ssd_dir))


def find(name: str | None = None) -> list[RunningEngine]:
    """Return the engines that answer, or those of them with this name.

    Engines that were killed are left out, and so is one that hangs, with a note.
    """
    found = [x for x in _running() if name is None or x.is_named(name)]
    return sorted(found, key=lambda x: (x.status["engine"]["started"], x.socket))


def choose(name: str | None, *, may_be_all: bool = False) -> list[RunningEngine]:
    """Return the engines with this name; None: the only one, or all of them if it `may_be_all`.

    Raises CommandError for none, StoreError if the folder of their sockets is not this user's own.
    """
    engines = find()
    if not engines:
        raise CommandError("no engine of this user runs on this machine with HeteroConnector")
    chosen = [x for x in engines if name is None or x.is_named(name)]
    known = "; ".join(x.title for x in engines)
    if not chosen:
        raise CommandError(f"no running engine is called {name!r}: there are {known}")
    if name is None and len(chosen) > 1 and not may_be_all:
        raise CommandError(
            f"several engines run here: choose with --engine MODEL, PID or SSD_DIR; {known}"
        )
    return chosen


def do(
    engines: Sequence[RunningEngine], command: Mapping[str, Any], wait_s: float = 0.0
) -> list[Answer]:
    """Have all engines do something at the same time; return their answers in order.

    `wait_s`: as long as the command itself may wait. The answer of an engine that refuses, or does
    not answer, is `{"error": text}`.
    """
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(lambda x: _ask(x.socket, command, wait_s + _PATIENCE_S), engines))


def _running() -> Iterator[RunningEngine]:
    for path in status_paths():
        try:
            status = ask(path, {"get": "status"})
        except TimeoutError:
            note(f"left out: the engine at {path} hangs, it does not answer")
            continue
        except (OSError, ValueError):
            continue  # it was killed, or is ending
        if "engine" in status:
            yield RunningEngine(path, status)


def _ask(path: Path, question: Mapping[str, Any], timeout_s: float) -> Answer:
    try:
        return ask(path, question, timeout_s)
    except TimeoutError:
        return {"error": f"no answer within {timeout_s:.0f} s"}
    except (OSError, ValueError) as error:
        return {"error": f"the engine has ended meanwhile: {error}"}
