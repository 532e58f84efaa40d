"""Reading the memory of real processes over NIXL and UCX, and everything that can happen to them.

Each owner is an engine's process with memory of its own; a few are started once for the whole file,
those that a test ends are its own. "The owner" that is stopped or killed is what its peers meet of
it: its peer process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from hetero_connector.errors import PeerError, StoreClosedError, StoreError, TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.base import Transfer, TransferState
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.shared_memory import SharedMemory, create_shared
from tests.transfer.owners import SIZES, Owner, contents, owners

pytestmark = pytest.mark.long

MIB = 1 << 20
WHOLE = [PeerExtent(0, 0, 0, 0, SIZES[0])]
CMA, TCP = "cma", "tcp"


def memory(size: int = SIZES[0]) -> SharedMemory:
    return create_shared("reader", size)


def bytes_of(peers: NixlPeers, region: int = 0) -> np.ndarray:
    return peers._regions[region].view


def wait(transfer: Transfer, timeout_s: float = 30.0) -> TransferState:
    deadline_s = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.PENDING and time.monotonic() < deadline_s:
        time.sleep(1e-4)
    return transfer.poll()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    with owners(1) as (one,):
        yield one


@pytest.fixture
def reader() -> Iterator[NixlPeers]:
    peers = NixlPeers([memory(), memory(SIZES[1])])
    yield peers
    assert peers.close()


@pytest.fixture(params=[CMA, TCP])
def any_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX's own choice on one host, and what is left of it between containers."""
    if request.param == TCP:
        monkeypatch.setenv("UCX_TLS", "tcp")
    return str(request.param)


def test_reads_exact_bytes_of_any_alignment(reader: NixlPeers, owner: Owner) -> None:
    reader.connect("w", owner.metadata)
    extents = [
        PeerExtent(0, 1, 0, 3, 5 * MIB + 7),
        PeerExtent(1, 17, 0, 16 * MIB + 1, 4_001),
        PeerExtent(1, 8, 1, 8, 8),
        PeerExtent(0, SIZES[0] - 1, 1, 4_096, 1),
    ]
    assert wait(reader.submit("w", extents)) is TransferState.DONE
    expected = [np.zeros(size, np.uint8) for size in SIZES]
    source = [contents(i, size) for i, size in enumerate(SIZES)]
    for e in extents:
        expected[e.region][e.offset : e.offset + e.size] = source[e.remote_region][
            e.remote_offset : e.remote_offset + e.size
        ]
    for i, right in enumerate(expected):
        assert np.array_equal(bytes_of(reader, i), right)


def test_many_small_reads_and_many_transfers_at_once(reader: NixlPeers, owner: Owner) -> None:
    reader.connect("w", owner.metadata)
    rng = np.random.default_rng(0)
    order = rng.permutation(SIZES[0] // 8_192)
    transfers = [
        reader.submit("w", [PeerExtent(0, int(i) * 8_192, 0, int(i) * 8_192, 8_192) for i in part])
        for part in np.array_split(order, 7)
    ]
    assert [wait(t) for t in transfers] == [TransferState.DONE] * 7
    assert np.array_equal(bytes_of(reader), contents(0, SIZES[0]))
    assert all(t.terminal for t in transfers)


def test_reads_fail_when_the_owner_is_killed_and_work_after_its_restart(any_transport: str) -> None:
    peers = NixlPeers([memory(), memory(SIZES[1])])
    with owners(2) as (first, second):
        peers.connect("w", first.metadata)
        assert wait(peers.submit("w", WHOLE)) is TransferState.DONE
        first.kill()
        for _ in range(3):
            failed = peers.submit("w", WHOLE)
            assert wait(failed) is TransferState.FAILED
            assert isinstance(failed.error, TransferError)
        bytes_of(peers)[:] = 0
        peers.connect("w", second.metadata)
        assert wait(peers.submit("w", WHOLE)) is TransferState.DONE
        assert np.array_equal(bytes_of(peers), contents(0, SIZES[0]))
        assert peers.close()
        assert second.close()


def test_a_read_of_an_owner_dead_from_the_start_fails(reader: NixlPeers) -> None:
    with owners(1) as (other,):
        reader.connect("w", other.metadata)
        other.kill()
        failed = reader.submit("w", WHOLE)
        assert wait(failed) is TransferState.FAILED
        assert isinstance(failed.error, TransferError)


def test_reads_of_owners_killed_meanwhile_are_complete_or_fail(any_transport: str) -> None:
    """A read ends well with every byte right, or it fails; none hangs."""
    peers = NixlPeers([memory()])
    right = contents(0, SIZES[0])
    outcomes: set[TransferState] = set()
    with owners(3) as many:
        for i, other in enumerate(many):
            peers.connect("w", other.metadata)
            assert wait(peers.submit("w", [PeerExtent(0, 0, 0, 0, 4_096)])) is TransferState.DONE
            killer = threading.Timer(0.01 * i, other.kill)
            killer.start()
            while TransferState.FAILED not in outcomes:
                bytes_of(peers)[:] = 0
                outcome = wait(peers.submit("w", WHOLE))
                assert outcome is not TransferState.PENDING
                outcomes.add(outcome)
                if outcome is TransferState.DONE:
                    assert np.array_equal(bytes_of(peers), right)
            killer.join()
            outcomes.clear()
            assert wait(peers.submit("w", WHOLE)) is TransferState.FAILED
    assert peers.close()


def test_a_stopped_owner_delays_no_other_read_and_its_late_bytes_stay_in_their_place(
    reader: NixlPeers, owner: Owner
) -> None:
    with owners(1) as (stopped,):
        reader.connect("stopped", stopped.metadata)
        reader.connect("w", owner.metadata)
        stopped.stop()
        half = SIZES[0] // 2
        late = reader.submit("stopped", [PeerExtent(0, 0, 0, 0, half)])
        assert wait(late, 0.3) is TransferState.PENDING
        other = reader.submit("w", [PeerExtent(0, half, 0, half, half)])
        assert wait(other) is TransferState.DONE
        assert late.poll() is TransferState.PENDING
        assert not late.terminal, "its memory may still be written"
        stopped.resume()
        assert wait(late) is TransferState.DONE
        assert np.array_equal(bytes_of(reader), contents(0, SIZES[0]))


def test_over_tcp_a_read_stays_pending_while_the_owner_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    peers = NixlPeers([memory()])
    with owners(1) as (other,):
        peers.connect("w", other.metadata)
        assert wait(peers.submit("w", [PeerExtent(0, 0, 0, 0, 4_096)])) is TransferState.DONE
        other.stop()
        late = peers.submit("w", WHOLE)
        assert wait(late, 0.3) is TransferState.PENDING
        other.resume()
        assert wait(late) is TransferState.DONE
        assert np.array_equal(bytes_of(peers), contents(0, SIZES[0]))
        other.stop()
        lost = peers.submit("w", WHOLE)
        assert wait(lost, 0.1) is TransferState.PENDING
        other.kill()
        assert wait(lost) is TransferState.FAILED
    assert peers.close()


def test_close_ends_a_read_of_a_stopped_owner_and_with_it_every_write_to_the_memory() -> None:
    peers = NixlPeers([memory()])
    with owners(1) as (stopped,):
        peers.connect("w", stopped.metadata)
        stopped.stop()
        late = peers.submit("w", WHOLE)
        assert wait(late, 0.1) is TransferState.PENDING
        assert peers.close()
        assert not psutil.pid_exists(peers.process_id)
        assert late.terminal
        assert late.poll() is TransferState.FAILED
        with pytest.raises(StoreClosedError):
            peers.submit("w", WHOLE)
        at_close = bytes_of(peers).copy()
        stopped.resume()
        time.sleep(0.3)
        assert np.array_equal(bytes_of(peers), at_close)


def test_close_takes_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = NixlPeers([memory(8_192)])
    waits: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(peers._child, "kill", lambda timeout_s: waits.append(timeout_s) or True)
        assert peers.close(timeout_s=0.5)
        assert peers.close(timeout_s=600.0)
    assert waits == [0.5, 5.0]
    assert peers.close()


def test_a_disconnected_peer_is_dropped_and_can_be_connected_again(
    reader: NixlPeers, owner: Owner
) -> None:
    for _ in range(3):
        reader.connect("w", owner.metadata)
        assert wait(reader.submit("w", WHOLE)) is TransferState.DONE
        reader.disconnect("w")
        reader.disconnect("w")
        with pytest.raises(PeerError, match="never connected"):
            reader.submit("w", WHOLE)


@pytest.mark.parametrize(
    "extent",
    [
        PeerExtent(0, SIZES[0] - 4_096, 0, 0, 4_097),
        PeerExtent(0, SIZES[0], 0, 0, 1),
        PeerExtent(0, -1, 0, 0, 1),
        PeerExtent(0, 2**63, 0, 0, 1),
        PeerExtent(2, 0, 0, 0, 1),
        PeerExtent(-1, 0, 0, 0, 1),
    ],
)
def test_addresses_outside_the_peers_memory_are_refused_before_anything_is_posted(
    reader: NixlPeers, owner: Owner, extent: PeerExtent
) -> None:
    reader.connect("w", owner.metadata)
    with pytest.raises(PeerError, match="outside"):
        reader.submit("w", [WHOLE[0], extent])
    assert not reader._child.reads


@pytest.mark.parametrize(
    "extents",
    [
        [],
        [PeerExtent(0, 0, 0, 0, 0)],
        [PeerExtent(0, 0, 0, SIZES[0], 1)],
        [PeerExtent(0, 0, 2, 0, 1)],
        [PeerExtent(0, 0, 0, -1, 1)],
    ],
)
def test_extents_outside_our_own_memory_are_refused(
    reader: NixlPeers, owner: Owner, extents: list[PeerExtent]
) -> None:
    reader.connect("w", owner.metadata)
    with pytest.raises(ValueError, match=r"extent|outside"):
        reader.submit("w", extents)


def test_metadata_with_false_regions_read_nothing(reader: NixlPeers, owner: Owner) -> None:
    """The envelope says more than NIXL was metadata: NIXL refuses the addresses."""
    metadata = AgentMetadata.decode(owner.metadata)
    wide = AgentMetadata(metadata.agent, ((metadata.regions[0][0], 1 << 40),), metadata.nixl)
    reader.connect("w", wide.encode())
    failed = reader.submit("w", [PeerExtent(0, 1 << 39, 0, 0, 4_096)])
    assert wait(failed) is TransferState.FAILED
    with pytest.raises(PeerError, match="has other metadata"):
        reader.connect("v", owner.metadata)
    reader.disconnect("w")


def test_metadata_under_another_agents_name_is_not_used(reader: NixlPeers, owner: Owner) -> None:
    metadata = AgentMetadata.decode(owner.metadata)
    reader.connect("w", AgentMetadata("another", metadata.regions, metadata.nixl).encode())
    assert wait(reader.submit("w", WHOLE)) is TransferState.FAILED
    reader.disconnect("w")
    with pytest.raises(PeerError, match="own"):
        reader.connect("me", reader.metadata)


_FUZZ = """
import random, sys
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.base import TransferState
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.shared_memory import create_shared
metadata = AgentMetadata.decode(bytes.fromhex(sys.argv[1]))
peers = NixlPeers([create_shared("reader", 8192)])
rng, ended = random.Random(1), 0
for i in range(40):
    blob = bytearray(metadata.nixl)
    if i % 4 == 0:
        del blob[rng.randrange(len(blob)):]
    else:
        for _ in range(1 + i % 3):
            at = rng.randrange(len(blob) // 2)
            blob[at] = rng.randrange(256)
    peers.connect("w", AgentMetadata(f"agent {i}", metadata.regions, bytes(blob)).encode())
    read = peers.submit("w", [PeerExtent(0, 0, 0, 0, 4096)])
    while read.poll() is TransferState.PENDING:
        pass
    ended += read.poll() is TransferState.FAILED
print(ended)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": root},
    )


def test_damaged_metadata_of_nixl_fails_its_reads_and_nothing_else(owner: Owner) -> None:
    done = run(_FUZZ, owner.metadata.hex())
    assert (done.returncode, done.stdout.strip()) == (0, "40"), done.stderr


_QUIET = """
import os, signal, sys
from hetero_connector.transfer.base import TransferState
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.shared_memory import create_shared
peers = NixlPeers([create_shared("reader", 8192)])
peers.connect("w", bytes.fromhex(sys.argv[1]))
def read():
    transfer = peers.submit("w", [PeerExtent(0, 0, 0, 0, 4096)])
    while transfer.poll() is TransferState.PENDING:
        pass
    return transfer.poll()
assert read() is TransferState.DONE
os.kill(int(sys.argv[2]), signal.SIGKILL)
while read() is TransferState.DONE:
    pass
assert peers.close()
assert "UCX_LOG_LEVEL" not in os.environ
"""


def test_nothing_is_printed_even_when_a_peer_dies() -> None:
    with owners(1) as (other,):
        done = run(_QUIET, other.metadata.hex(), str(other.pid))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


_EXIT = """
import sys
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.shared_memory import create_shared
peers = NixlPeers([create_shared("reader", 8192)])
peers.connect("w", bytes.fromhex(sys.argv[1]))
late = peers.submit("w", [PeerExtent(0, 0, 0, 0, 4096)])
print(late.poll().value)
"""


def test_a_process_with_a_read_in_flight_from_a_stopped_owner_still_exits() -> None:
    with owners(1) as (stopped,):
        metadata = stopped.metadata.hex()
        stopped.stop()
        done = run(_EXIT, metadata)
    assert (done.returncode, done.stdout.strip()) == (0, "pending"), done.stderr


def test_a_reader_killed_while_reading_does_not_disturb_the_owner(
    reader: NixlPeers, owner: Owner
) -> None:
    code = _EXIT.partition("print")[0] + "import os; os.kill(os.getpid(), 9)"
    assert run(code, owner.metadata.hex()).returncode == -9
    reader.connect("w", owner.metadata)
    assert wait(reader.submit("w", WHOLE)) is TransferState.DONE
    assert np.array_equal(bytes_of(reader), contents(0, SIZES[0]))


def test_an_idle_agent_uses_no_core() -> None:
    """NIXL's own agent class starts a progress thread that polls without a pause."""
    peers = NixlPeers([memory(8_192)])
    try:
        process = psutil.Process(peers.process_id)
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        assert sum(process.cpu_times()[:2]) - before < 0.1
    finally:
        assert peers.close()


def test_the_error_without_nixl_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl.py").write_text("raise ImportError(\"No module named 'nixl'\")")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoreError, match="nixl cannot be imported"):
        NixlPeers([memory(8_192)])


def test_transports_that_cannot_connect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "posix,sysv")
    with pytest.raises(StoreError, match="UCX_TLS"):
        NixlPeers([memory(8_192)])
