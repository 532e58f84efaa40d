"""A running engine answers questions at its socket, and nothing that a client does harms it."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetero_connector.engine.scheduler import status_socket
from hetero_connector.engine.scheduler.status_socket import MAX_REQUEST_BYTES, StatusServer
from hetero_connector.engine.startup import rendezvous
from hetero_connector.tools import engines
from hetero_connector.tools import status as printing
from tests.waiting import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / ("long" * 40)  # longer than the address of a socket may be
    folder.mkdir()
    return folder / "engine.status"


@pytest.fixture
def server(path: Path) -> Iterator[StatusServer]:
    server = StatusServer(path, {"status": lambda: {"tiers": [1, 2]}, "bad": fail})
    yield server
    server.close()


def ask(path: Path, name: str) -> dict[str, Any]:
    return status_socket.ask(path, {"get": name})


def fail() -> dict[str, Any]:
    raise TypeError("a defect")


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    with status_socket.short_address(path) as address:
        connection.connect(address)
    return connection


def test_a_question_is_answered(server: StatusServer, path: Path) -> None:
    assert ask(path, "status") == {"tiers": [1, 2]}
    assert ask(path, "status") == {"tiers": [1, 2]}


def test_only_this_user_can_connect(server: StatusServer, path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) & 0o777 == 0o600


def test_what_cleans_folders_by_age_finds_that_the_socket_is_in_use(
    server: StatusServer, path: Path
) -> None:
    """It spares what `/proc/net/unix` lists, and what has the sticky bit."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        short = Path(folder) / "engine.status"
        other = StatusServer(short, {})
        try:
            listed = Path("/proc/net/unix").read_text().split()
            assert str(short) in listed
            for socket_path in (short, path):
                assert socket_path.stat().st_mode & stat.S_ISVTX
        finally:
            other.close()


@pytest.mark.parametrize("length", [106, 107, 108, 109])
def test_a_path_may_be_of_any_length(length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / ("x" * (length - len(folder) - 3)) / "s"
        path.parent.mkdir()
        assert len(str(path)) == length
        server = StatusServer(path, {"status": lambda: {"length": length}})
        try:
            assert ask(path, "status") == {"length": length}
        finally:
            server.close()


QUESTIONS = [
    *(b"", b"\n", b"{}\n", b"[1]\n", b"null\n", b'{"get": []}\n', b'{"get": "weights"}\n'),
    *(b'{"get": "status"', b'{"do": "status"}\n', b'{"do": {}}\n', b'"get"\n', b'{"get": null}\n'),
    *(
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"[" * (MAX_REQUEST_BYTES + 1),
        b"x" * 2 * MAX_REQUEST_BYTES,
    ),
]


@pytest.mark.parametrize("line", QUESTIONS)
def test_another_question_is_answered_with_what_can_be_asked(
    server: StatusServer, path: Path, line: bytes
) -> None:
    with connect(path) as connection:
        try:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            answer = json.loads(b"".join(iter(lambda: connection.recv(4096), b"")))
            assert "ask one of status, bad" in answer["error"]
        except (ConnectionResetError, BrokenPipeError):
            assert len(line) > MAX_REQUEST_BYTES, "it answers without reading on"
    assert ask(path, "status") == {"tiers": [1, 2]}


def test_clients_that_hang_or_leave_do_not_stop_it(
    server: StatusServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_socket, "_PATIENCE_S", 0.1)
    silent = [connect(path) for _ in range(3 * status_socket.MAX_CLIENTS)]
    connect(path).close()
    assert ask(path, "status") == {"tiers": [1, 2]}
    for connection in silent:
        connection.close()


def test_a_client_that_sends_a_byte_now_and_then_is_not_listened_to_for_long(
    server: StatusServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_socket, "_PATIENCE_S", 0.1)
    with connect(path) as connection:
        for _ in range(500):
            try:
                connection.sendall(b" ")
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.02)
        else:
            pytest.fail("it still listens")


def test_a_hundred_clients_are_all_answered(server: StatusServer, path: Path) -> None:
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: ask(path, "status"), range(100)))
    assert answers == [{"tiers": [1, 2]}] * 100


def test_questions_are_answered_while_commands_take_long(path: Path) -> None:
    end, begun = threading.Event(), threading.Semaphore(0)

    def drain(_: object) -> dict[str, Any]:
        begun.release()
        assert end.wait(60)
        return {"ended": True}

    server = StatusServer(path, {"status": lambda: {"tiers": [1, 2]}}, {"drain": drain})
    try:
        do, count = {"do": "drain"}, status_socket.MAX_COMMANDS
        with ThreadPoolExecutor(count) as pool:
            long = [pool.submit(status_socket.ask, path, do, 60.0) for _ in range(count)]
            for _ in long:
                assert begun.acquire(timeout=30)
            assert "repeat it later" in status_socket.ask(path, do)["error"]
            assert ask(path, "status") == {"tiers": [1, 2]}
            end.set()
            assert [answer.result() for answer in long] == [{"ended": True}] * len(long)
        assert status_socket.ask(path, do) == {"ended": True}
    finally:
        end.set()
        server.close()


def test_a_line_of_50_mb_is_not_kept(server: StatusServer, path: Path) -> None:
    part, sent = b"x" * (1 << 20), 0
    with connect(path) as connection:
        try:
            while sent < 50:
                connection.sendall(part)
                sent += 1
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert sent <= MAX_REQUEST_BYTES // len(part) + 2, "it goes on reading"
    assert ask(path, "status") == {"tiers": [1, 2]}


@pytest.mark.parametrize("reads", [0, 1])
def test_a_client_that_reads_slowly_holds_no_place_for_long(
    path: Path, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    monkeypatch.setattr(status_socket, "_PATIENCE_S", 0.5)
    long = "x" * (4 << 20)
    server = StatusServer(path, {"status": lambda: {"tiers": [1, 2]}, "long": lambda: {"x": long}})
    try:
        slow = []
        for _ in range(status_socket.MAX_CLIENTS):
            slow.append(connect(path))
            slow[-1].sendall(b'{"get": "long"}\n')
            assert len(slow[-1].recv(reads)) == reads
        assert ask(path, "status") == {"tiers": [1, 2]}
        for connection in slow:
            connection.close()
    finally:
        server.close()


@pytest.mark.parametrize("count", [0, 1, 256, 257, 5_000])
def test_a_long_answer_is_encoded_in_parts_between_which_other_threads_run(count: int) -> None:
    rows = [{"name": 'a"b', "at": [number, None]} for number in range(count)]
    for answer in ({}, {"rows": rows}, {"is_complete": True, "rows": rows, "none": None, "x": {}}):
        parts = list(status_socket._encode(answer))
        assert json.loads("".join(parts)) == answer
        assert max(map(len, parts)) <= 256 * len(json.dumps(rows[-1:]))


def test_what_is_no_socket_of_an_engine_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are not read as paths, and nothing outside of the folder is opened or removed."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    monkeypatch.setattr(rendezvous, "_directory", lambda: folder)
    own = f"{rendezvous._pid_namespace()}.{os.getpid()}.status"
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / f"link.1.{own}").symlink_to(secret)
    (folder / f"dangling.1.{own}").symlink_to("/nowhere/at/all")
    (folder / f"folder.1.{own}").mkdir()
    (folder / f"file.1.{own}").write_text('{"engine": 1}')
    os.mkfifo(folder / f"pipe.1.{own}")
    (folder / f"\x1b[31m..\n$(id).1.{own}").write_text("")
    assert engines.find() == ([], [])
    assert rendezvous.sockets_of_server("../secret", None) == []
    assert rendezvous.sockets_of_server(".*", None) == []
    assert secret.read_text() == "{}"
    dead = folder / f"dead.1.{rendezvous._pid_namespace()}.999999999.status"
    dead.symlink_to(secret)
    rendezvous.status_path("e")
    assert not dead.is_symlink(), "left by an engine that was killed"
    assert secret.exists(), "the link is removed, and not what it leads to"


def test_an_answer_that_fails_is_logged_and_costs_one_connection(
    server: StatusServer, path: Path
) -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        ask(path, "bad")
    assert ask(path, "status") == {"tiers": [1, 2]}


def test_a_closed_engine_leaves_nothing(path: Path) -> None:
    before = threading.active_count()
    server = StatusServer(path, {})
    server.close()
    server.close()
    with pytest.raises(OSError, match="No such file"):
        ask(path, "status")
    until(lambda: threading.active_count() <= before, "its thread ends")


def test_sockets_of_killed_engines_are_not_shown_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_directory", lambda: tmp_path)
    (tmp_path / f"gone.{rendezvous._pid_namespace()}.999999999.status").write_text("")
    assert engines.find() == ([], [])
    own = rendezvous.status_path("e")
    assert rendezvous.status_paths() == []
    status = {"engine": {"started": 0.0}}
    server = StatusServer(own, {"status": lambda: status})
    try:
        assert [x.status for x in engines.find().running] == [status]
    finally:
        server.close()


def test_a_clients_request_id_is_printed_as_it_is() -> None:
    decision = {
        "request_id": "[red]x[/red]\x1b[2J", "time": 0.0, "prompt_tokens": 5200, "local_tokens": 16,
        "stored_tokens": 5120, "choice": "replay", "boundary": 5120, "replayed_tokens": 384,
        "restored_tokens": {"dram": 4000, "ssd": 720}, "reason": None, "predicted_s": 0.083,
        "observed_s": 0.091, "computing_s": 0.614,
    }  # fmt: skip
    unplanned: dict[str, Any] = decision | {
        "choice": "compute", "reason": "nothing_stored", "restored_tokens": {},
        "predicted_s": None, "computing_s": None,
    }  # fmt: skip
    tiers = {
        "tier": "dram", "capacity_bytes": 1 << 30, "artifacts": {"dense_kv": 7},
        "bytes": {"dense_kv": 3 << 20},
    }  # fmt: skip
    about = {"model": "m", "pid": 1, "heterocache": "0.1.0", "vllm": "0.32.0", "started": 0.0}
    status = {
        "engine": about,
        "now": 7200.0,
        "health": {"io_alive": True, "ssd_writable": False, "ssd_readable": True},
    }
    status |= {"tiers": [tiers], "decisions": [decision, unplanned], "pins": {"count": 0}}
    status["activity"] = {"draining": True, "scrub": None}
    console = Console(width=200, record=True, file=io.StringIO())
    printing.show([status], 10, console)
    shown = console.export_text()
    for expected in (
        "up 2.0 h", "not working: ssd_writable, draining", "3 MiB", "1 GiB", "[red]x[/red]",
        "5,104 - 384", "dram+ssd", "83 ms", "91 ms", "614 ms", "compute: nothing stored",
    ):  # fmt: skip
        assert expected in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("shared", [True, None, False])
def test_an_engine_that_was_reset_alone_says_so(shared: bool | None) -> None:
    said = ", shares nothing until the fleet is reset" if shared is False else ""
    status = {"health": {"shared": shared}, "activity": {"draining": False, "scrub": None}}
    assert printing.state_text(status) == f"healthy{said}"
    assert printing.broken_parts(status) == [], "an operator has reset it"
