"""One contract for every `PeerTransfers`, and what the agents' metadata must survive."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.errors import PeerError, StoreClosedError, TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.base import Transfer, TransferState
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerExtent, PeerTransfers
from hetero_connector.transfer.peer_connection import describe
from hetero_connector.transfer.shared_memory import SharedMemory, create_shared
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

SIZE = 64 << 10
Join = Callable[[], tuple[PeerTransfers, np.ndarray]]


def memory() -> SharedMemory:
    return create_shared("test", SIZE)


@pytest.fixture(params=["nixl", "memory"])
def join(request: pytest.FixtureRequest) -> Iterator[Join]:
    """Makes engines that can reach each other, all of this process."""
    network, made = MemoryNetwork(), []

    def one() -> tuple[PeerTransfers, np.ndarray]:
        own = memory()
        peers: PeerTransfers = (
            NixlPeers([own]) if request.param == "nixl" else MemoryPeers(network, [own])
        )
        made.append(peers)
        return peers, own.view

    yield one
    for peers in made:
        assert peers.close()


def wait(transfer: Transfer) -> TransferState:
    until(lambda: transfer.poll() is not TransferState.PENDING, pause_s=1e-4)
    assert transfer.terminal
    return transfer.poll()


def test_both_read_each_other(join: Join) -> None:
    (a, in_a), (b, in_b) = join(), join()
    in_a[: SIZE // 2], in_b[: SIZE // 2] = 1, 2
    a.connect("b", b.metadata)
    b.connect("a", a.metadata)
    first = a.submit("b", [PeerExtent(0, 5, 0, SIZE // 2 + 1, 1_000)])
    second = b.submit("a", [PeerExtent(0, 0, 0, SIZE // 2, 7), PeerExtent(0, 9, 0, SIZE - 1, 1)])
    assert wait(first) is wait(second) is TransferState.DONE
    assert (in_a[SIZE // 2 + 1 : SIZE // 2 + 1_001] == 2).all()
    assert in_b[SIZE // 2 :].sum() == 8
    assert first.error is None


def test_reads_of_a_dead_peer_fail_and_its_successor_is_read(join: Join) -> None:
    (a, own), (b, _), (c, in_c) = join(), join(), join()
    in_c[:] = 3
    a.connect("b", b.metadata)
    assert wait(a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])) is TransferState.DONE
    assert b.close()
    failed = a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])
    assert wait(failed) is TransferState.FAILED
    assert isinstance(failed.error, TransferError)
    a.connect("b", c.metadata)
    assert wait(a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])) is TransferState.DONE
    assert (own[:8] == 3).all()


def test_invalid_calls_are_refused(join: Join) -> None:
    (a, _), (b, _) = join(), join()
    with pytest.raises(PeerError, match="never connected"):
        a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])
    for metadata in (b"", b"nonsense", b.metadata[:-1], b"\0" * 300_000):
        with pytest.raises(PeerError):
            a.connect("b", metadata)
    a.connect("b", b.metadata)
    for wrong in (PeerExtent(0, SIZE - 7, 0, 0, 8), PeerExtent(1, 0, 0, 0, 8)):
        with pytest.raises(PeerError, match="outside"):
            a.submit("b", [wrong])
    for ours in (PeerExtent(0, 0, 0, SIZE - 7, 8), PeerExtent(0, 0, 0, 0, 0)):
        with pytest.raises(ValueError, match="outside our own"):
            a.submit("b", [ours])
    a.disconnect("b")
    with pytest.raises(PeerError, match="never connected"):
        a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])
    assert a.close()
    assert a.close()
    with pytest.raises(StoreClosedError):
        a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])


def test_after_the_end_of_its_process_a_port_has_new_metadata(join: Join) -> None:
    (a, own), (b, in_b) = join(), join()
    in_b[:] = 4
    a.connect("b", b.metadata)
    assert wait(a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])) is TransferState.DONE
    assert not a.maintain()
    before = a.metadata
    end(a)
    until(a.maintain)
    assert not a.maintain(), "it is told once"
    until(lambda: not a.maintain() and a.metadata != before)
    own[:] = 0
    assert wait(a.submit("b", [PeerExtent(0, 0, 0, 8, 8)])) is TransferState.DONE
    assert (own[8:16] == 4).all()
    b.connect("a", a.metadata)
    assert wait(b.submit("a", [PeerExtent(0, 8, 0, 0, 8)])) is TransferState.DONE


def end(peers: PeerTransfers) -> None:
    """Return the process that moves its bytes."""
    if isinstance(peers, MemoryPeers):
        peers.restart()
    else:
        assert isinstance(peers, NixlPeers)
        os.kill(peers.process_id, signal.SIGKILL)


def test_the_fake_stops_and_resumes() -> None:
    network, own = MemoryNetwork(), memory()
    a, b = MemoryPeers(network, [own]), MemoryPeers(network, [memory()])
    a.connect("b", b.metadata)
    network.stopped.add(b.metadata)
    late = a.submit("b", [PeerExtent(0, 0, 0, 0, 8)])
    assert late.poll() is TransferState.PENDING
    assert not late.terminal
    assert not a.close()
    network.stopped.clear()
    assert wait(late) is TransferState.DONE
    assert a.close()


METADATA = AgentMetadata("ägent", ((4_096, 1 << 30), (1 << 40, 8)), bytes(range(200)))


def test_metadata_survive_encoding() -> None:
    assert AgentMetadata.decode(METADATA.encode()) == METADATA


@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_refused_as_metadata(data: bytes) -> None:
    with pytest.raises(PeerError):
        AgentMetadata.decode(data)


@given(st.integers(0, len(METADATA.encode()) - 1), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(at: int, flip: int) -> None:
    data = bytearray(METADATA.encode())
    data[at] ^= flip
    with pytest.raises(PeerError):
        AgentMetadata.decode(bytes(data))


@pytest.mark.parametrize(
    "regions",
    [((0, 8),), ((8, 0),), ((8, 1 << 50),), (((1 << 64) - 4, 8),), tuple([(8, 8)] * 17)],
)
def test_impossible_regions_are_refused(regions: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PeerError):
        AgentMetadata.decode(AgentMetadata("a", regions, b"x").encode())


def test_metadata_of_another_version_are_refused_with_advice() -> None:
    data = bytearray(METADATA.encode())
    data[4] = 9
    with pytest.raises(PeerError, match="version 9"):
        AgentMetadata.decode(bytes(data))


extent_lists = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 1), st.integers(0, 40)),
    min_size=1,
    max_size=12,
)


@given(extent_lists, st.integers(1, 8))
def test_merged_and_cut_descriptors_move_the_same_bytes(
    places: list[tuple[int, int, int, int]], size: int
) -> None:
    """In blocks of `size`, so that neighbours meet often; both sides in one address space."""
    ours, theirs = ((0, 500), (1_000, 500)), ((10, 500), (1_500, 500))
    extents = [PeerExtent(a, b * size, c, d * size, size) for a, b, c, d in places]
    local, remote = describe(extents, ours, theirs)
    assert (local[:, 1] == remote[:, 1]).all()
    moved = [
        (int(at) + i, int(source) + i)
        for (at, n, _), (source, _, _) in zip(local, remote, strict=True)
        for i in range(int(n))
    ]
    wanted = [
        (ours[e.region][0] + e.offset + i, theirs[e.remote_region][0] + e.remote_offset + i)
        for e in extents
        for i in range(size)
    ]
    assert moved == wanted


def test_contiguous_extents_become_one_descriptor_and_large_ones_are_cut() -> None:
    regions = ((0, 1 << 30),)
    blocks = [PeerExtent(0, i << 16, 0, i << 16, 1 << 16) for i in range(100)]
    local, _ = describe(blocks, regions, regions)
    assert local[:, 1].tolist() == [2 << 20] * 3 + [(100 << 16) - (6 << 20)]
