"""Peers reach a process with the exported memory and nothing else of its engine."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from hetero_connector import machine
from hetero_connector.errors import StoreError
from hetero_connector.transfer import peer_child
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.base import TransferState
from hetero_connector.transfer.nixl_peers import NixlPeers, listening_addresses
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.shared_memory import create_shared
from tests.waiting import until

pytestmark = pytest.mark.long

SIZE = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def peers() -> Iterator[NixlPeers]:
    made = NixlPeers([create_shared("test", SIZE)])
    yield made
    assert made.close()


_WRITER = """
import os, struct, sys, time
os.environ["UCX_TLS"] = "tcp"
os.environ["UCX_NET_DEVICES"] = "lo"
import numpy as np
from hetero_connector.errors import TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.ucx_agent import UcxAgent
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
metadata, address = AgentMetadata.decode(bytes.fromhex(sys.argv[1])), int(sys.argv[2])
own = np.full(4096, 66, np.uint8)
agent = UcxAgent("writer", [(own.ctypes.data, 4096)])
region = metadata.regions[0][0]
agent.load(metadata.nixl.replace(struct.pack("<Q", region), struct.pack("<Q", address)))
local = agent.prepare(None, np.array([(own.ctypes.data, 8, 0)], np.uint64))
remote = agent.prepare(metadata.agent, np.array([(address, 8, 0)], np.uint64))
index, nixl = np.array([0], np.int32), agent._bindings
request = agent._agent.makeXferReq(
    nixl.NIXL_WRITE, local, index, remote, index, "", [], True
)
deadline_s = time.monotonic() + float(sys.argv[3])
try:
    agent.post(request)
    while not agent.has_ended(request) and time.monotonic() < deadline_s:
        time.sleep(0.01)
except TransferError as error:
    print(error)
time.sleep(0.2)
os._exit(0)
"""


def write_over_tcp(metadata: bytes, address: int, patience_s: float) -> None:
    """Write to memory like an attacker who reaches the port and has the metadata."""
    subprocess.run(
        [sys.executable, "-c", _WRITER, metadata.hex(), str(address), str(patience_s)],
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_an_attacker_on_the_port_writes_the_exported_memory_and_nothing_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    exported = create_shared("test", SIZE)
    secret = np.full(4_096, 1, np.uint8)
    victim = NixlPeers([exported])
    metadata = AgentMetadata.decode(victim.metadata)
    write_over_tcp(victim.metadata, metadata.regions[0][0], patience_s=60.0)
    # Else this shows nothing: that is what remains open.
    until(lambda: bool((exported.view[:8] == 66).all()))
    for address in (secret.ctypes.data, exported.view.ctypes.data + 4_096):
        until(lambda: not victim.maintain() and psutil.pid_exists(victim.process_id))
        write_over_tcp(victim.metadata, address, patience_s=5.0)
    assert (secret == 1).all()
    assert not exported.view[8:].any(), "an address of the engine is none of the process"
    assert victim.close()


def test_the_process_inherits_no_secret_no_descriptor_and_no_privileges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    with (tmp_path / "secret").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        peers = NixlPeers([create_shared("test", SIZE)])
        process = Path(f"/proc/{peers.process_id}")
        assert b"hunter2" not in (process / "environ").read_bytes()
        links = [os.readlink(fd) for fd in (process / "fd").iterdir()]
        assert not [link for link in links if "secret" in link]
        assert "NoNewPrivs:\t1" in (process / "status").read_text()
        assert peers.close()


def test_by_default_only_this_host_can_connect(
    peers: NixlPeers, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = listening_addresses(peers.process_id)
    assert addresses
    assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}


def test_with_an_interface_its_address_is_open_and_the_log_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = {h: i for h, i in machine.addresses().items() if i != "lo" and ":" not in h}
    if not mine:
        mine = {"127.0.0.1": "lo"}  # a machine without a network
    host, interface = next(iter(mine.items()))
    with caplog.at_level(logging.INFO):
        peers = NixlPeers([create_shared("test", SIZE)], interface)
    try:
        hosts = {a.rpartition(":")[0] for a in listening_addresses(peers.process_id)}
        assert hosts == {host}
        is_open = any("can read AND WRITE the DRAM tier" in m for m in caplog.messages)
        assert is_open == (interface != "lo")
    finally:
        assert peers.close()


_ENGINE = """
import sys, time
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.shared_memory import create_shared
peers = NixlPeers([create_shared("test", 8192)])
print(peers.process_id, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_dies_with_its_engine_however_that_ends(is_stopped: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ENGINE],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as engine:
        assert engine.stdout is not None
        process_id = int(engine.stdout.readline())
        if is_stopped:
            os.kill(process_id, signal.SIGSTOP)
        engine.kill()
    until(lambda: not _runs(process_id))


def _runs(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_process_ignores_signals_to_the_engines_group(
    peers: NixlPeers, number: signal.Signals
) -> None:
    os.kill(peers.process_id, number)
    other = NixlPeers([create_shared("other", SIZE)])
    peers.connect("other", other.metadata)
    assert wait(peers) is TransferState.DONE
    assert other.close()


def wait(peers: NixlPeers) -> TransferState:
    read = peers.submit("other", [PeerExtent(0, 0, 0, 0, 8)])
    until(lambda: read.poll() is not TransferState.PENDING)
    return read.poll()


def test_an_engine_with_thousands_of_open_files_reads_from_its_peers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as held:
        for _ in range(1_100):
            held.enter_context(open(os.devnull))
        peers, other = (NixlPeers([create_shared("test", SIZE)]) for _ in range(2))
        peers.connect("other", other.metadata)
        assert wait(peers) is TransferState.DONE
        assert peers.close()
        assert other.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_killed_process_ends_its_reads_and_is_restarted_after_growing_pauses() -> None:
    now_s = 100.0
    peers = NixlPeers([create_shared("test", SIZE)], clock=lambda: now_s)
    pauses = []
    for _ in range(3):
        os.kill(peers.process_id, signal.SIGKILL)
        until(peers.maintain)
        died_s, dead, before = now_s, peers.process_id, peers.metadata
        while peers.process_id == dead:
            now_s += 0.25
            assert not peers.maintain()
            assert now_s < died_s + 60.0, "it is started again"
        pauses.append(now_s - died_s)
        until(lambda before=before: not peers.maintain() and peers.metadata != before)  # type: ignore[misc]
    assert pauses == [1.0, 2.0, 4.0]
    assert peers.close()


def test_the_log_names_the_signal_that_ended_the_process_during_a_read(
    peers: NixlPeers, caplog: pytest.LogCaptureFixture
) -> None:
    other = AgentMetadata("other", ((4096, 4096),), b"y").encode()
    peers.connect("other", other)
    os.kill(peers.process_id, signal.SIGKILL)
    until(lambda: not _runs(peers.process_id))
    assert wait(peers) is TransferState.FAILED
    until(peers.maintain)
    assert "signal 9" in caplog.text
    assert "malformed" not in caplog.text


def test_a_process_that_hangs_is_killed_and_its_reads_end() -> None:
    peers, other = (NixlPeers([create_shared("test", SIZE)]) for _ in range(2))
    peers.connect("other", other.metadata)
    for _ in range(40):
        assert not peers.maintain(), "one that answers is left alone"
        time.sleep(0.02)
    os.kill(peers.process_id, signal.SIGSTOP)
    read = peers.submit("other", [PeerExtent(0, 0, 0, 0, 8)])
    asked = 0
    while not peers.maintain():
        asked += 1
        assert asked < 1_000
        time.sleep(0.002)
    assert asked >= 30
    assert read.poll() is TransferState.FAILED
    assert peers.close()
    assert other.close()


def test_a_failed_start_of_the_process_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    peers = NixlPeers([create_shared("test", SIZE)], clock=lambda: now_s)
    os.kill(peers.process_id, signal.SIGKILL)
    until(peers.maintain)
    with monkeypatch.context() as none_left:
        none_left.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError("no process")))
        now_s += 1.0
        assert [peers.maintain() for _ in range(2)] == [False, False], "no process has ended"
    now_s += 1.0
    before = peers.metadata
    assert not peers.maintain()
    now_s += 1.0
    until(lambda: not peers.maintain() and peers.metadata != before)
    assert peers.close()


def test_a_process_that_dies_once_it_is_ready_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the worker would register under a new epoch for nothing, again and again."""
    (tmp_path / "brief.py").write_text(
        "import os, socket, sys, uuid\n"
        "from hetero_connector.transfer.agent_metadata import AgentMetadata\n"
        "from hetero_connector.transfer.peer_frames import Frame, Kind\n"
        "engine = socket.socket(fileno=int(sys.argv[2]))\n"
        "metadata = AgentMetadata(uuid.uuid4().hex, ((4096, 4096),), b'x').encode()\n"
        "engine.sendall(Frame(Kind.READY, 0, metadata).encode())\n"
        f"while not os.path.exists({str(tmp_path / 'dies')!r}) and engine.recv(4096): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(peer_child, "_MODULE", "brief")
    now_s = 100.0
    with caplog.at_level(logging.INFO, "vllm.heterocache"):
        peers = NixlPeers([create_shared("test", SIZE)], clock=lambda: now_s)
        before = peers.metadata
        (tmp_path / "dies").touch()
        os.kill(peers.process_id, signal.SIGKILL)
        for _ in range(2):
            until(peers.maintain)
            dead = peers.process_id
            now_s += 60.0
            assert not peers.maintain()
            assert peers.process_id != dead, "another is started"
            until(lambda: not _runs(peers.process_id))
        until(peers.maintain)
        assert not peers.maintain()
        assert peers.metadata == before
        assert caplog.text.count("can read the DRAM tier") == 1
        (tmp_path / "dies").unlink()
        now_s += 60.0
        until(lambda: not peers.maintain() and peers.metadata != before)
    assert caplog.text.count("can read the DRAM tier") == 2, "who can connect is said again"
    assert peers.close()


_MALFORMED = ("garbage", "an unknown read", "ready twice", "failed", "alive")
"""Messages of which the last three are sound, but not due."""


@pytest.mark.parametrize("behaviour", [*_MALFORMED, "silence", "exits"])
def test_a_process_that_sends_malformed_messages_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    """It may be under attack: the engine trusts nothing it sends, and lives.

    A flood of what is not due would hold the engine's thread, so one such message is enough.
    """
    (tmp_path / "hostile.py").write_text(
        "import socket, sys\n"
        "from hetero_connector.transfer.agent_metadata import AgentMetadata\n"
        "from hetero_connector.transfer.peer_frames import Frame, Kind\n"
        "engine = socket.socket(fileno=int(sys.argv[2]))\n"
        "metadata = AgentMetadata('hostile', ((4096, 4096),), b'x').encode()\n"
        "engine.sendall(Frame(Kind.READY, 0, metadata).encode())\n"
        f"behaviour = {behaviour!r}\n"
        "engine.recv(1)\n"
        "if behaviour == 'garbage': engine.sendall(bytes([255]) * 4096)\n"
        "if behaviour == 'an unknown read': engine.sendall(Frame(Kind.ENDED, 99, b'').encode())\n"
        "if behaviour == 'ready twice': engine.sendall(Frame(Kind.READY, 0, metadata).encode())\n"
        "if behaviour == 'failed': engine.sendall(Frame(Kind.FAILED, 0, b'').encode())\n"
        "if behaviour == 'alive': engine.sendall(Frame(Kind.ALIVE, 0, b'').encode())\n"
        "while behaviour != 'exits' and engine.recv(4096): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(peer_child, "_MODULE", "hostile")
    peers = NixlPeers([create_shared("test", SIZE)])
    other = AgentMetadata("other", ((4096, 4096),), b"y").encode()
    peers.connect("other", other)
    read = peers.submit("other", [PeerExtent(0, 0, 0, 0, 8)])
    if behaviour == "silence":
        assert read.poll() is TransferState.PENDING
        with monkeypatch.context() as patched:
            asked = Mock(side_effect=AssertionError("the read is waited for"))
            patched.setattr(peers._child, "drive", asked)
            assert peers.close()
    until(lambda: read.poll() is not TransferState.PENDING)
    assert read.poll() is TransferState.FAILED
    assert peers.close()


def test_the_error_of_a_failed_start_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_child, "_MODULE", "no_such_module")
    with pytest.raises(StoreError, match="exit status 1"):
        NixlPeers([create_shared("test", SIZE)])


_CHOOSES = """
import sys
from hetero_connector.transfer.peer_process import leave_torch_out
leave_torch_out()
from nixl_meta_utils import detect_cuda_major
print(detect_cuda_major(), hasattr(sys.modules["torch"], "Tensor"))
"""


@pytest.mark.parametrize(("cuda", "chosen"), [("'12.6'", "12"), ("None", "None")])
def test_nixl_still_finds_the_cuda_version_of_torch(tmp_path: Path, cuda: str, chosen: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {cuda}")
    done = subprocess.run(
        [sys.executable, "-c", _CHOOSES],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.stdout.split() == [chosen, "False"], done.stderr
