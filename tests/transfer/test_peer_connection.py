"""The memory of a failed read is released at the right time, on a scripted agent."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from hetero_connector.errors import TransferError
from hetero_connector.transfer.agent_metadata import AgentMetadata
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.peer_connection import PeerConnection, PeerRead, describe
from hetero_connector.transfer.ucx_agent import Descriptors

REGIONS = ((0, 1 << 30),)
METADATA = AgentMetadata("owner", REGIONS, b"nixl")
GONE = TransferError(errno.ECONNRESET, "the peer is gone")


class Agent:
    """Replaces `UcxAgent`."""

    def __init__(self) -> None:
        self.made = 0
        self.failing: set[int] = set()
        """Requests that end with an error."""
        self.failing_posts = False
        self.done: set[int] = set()
        self.held: set[int] = set()
        """Requests that something is still at work on, whatever was said of them."""
        self.log: list[str] = []

    def load(self, metadata: bytes) -> str:
        return "owner"

    def unload(self, peer: str) -> None:
        self.log.append("closed")

    def prepare(self, peer: str | None, descriptors: Descriptors) -> int:
        return 1

    def drop(self, side: int) -> None:
        pass

    def make_read(self, local: int, remote: int, index: np.ndarray) -> int:
        self.made += 1
        return self.made

    def post(self, request: int) -> None:
        if self.failing_posts:
            self.failing.add(request)
            raise GONE

    def has_ended(self, request: int) -> bool:
        if request in self.failing:
            raise GONE
        return request in self.done

    def release(self, request: int) -> bool:
        if request in self.held:
            return False
        self.log.append(f"released {request}")
        return True


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def connection(agent: Agent) -> PeerConnection:
    return PeerConnection(agent, METADATA)  # type: ignore[arg-type]


def read_of(posts: int) -> PeerRead:
    """A read in posts of 4 MiB."""
    size = posts * (4 << 20)
    return PeerRead(*describe([PeerExtent(0, 0, 0, 0, size)], REGIONS, REGIONS))


def drive(connection: PeerConnection, times: int = 1_000) -> None:
    """Drive it many times: waiting alone never ends a read."""
    for _ in range(times):
        connection.drive()


def test_a_read_ends_when_all_its_posts_have_ended(
    agent: Agent, connection: PeerConnection
) -> None:
    read = read_of(2)
    connection.add(read)
    drive(connection)
    agent.done.add(1)
    drive(connection)
    assert not read.terminal
    agent.done.add(2)
    drive(connection)
    assert read.terminal
    assert read.error is None
    assert agent.log == ["released 1", "released 2"], "the connection stays"


@pytest.mark.parametrize("while_posting", [False, True])
def test_a_failed_read_ends_after_its_handle_is_released_and_the_connection_closed(
    agent: Agent, connection: PeerConnection, while_posting: bool
) -> None:
    read = read_of(1)
    agent.failing_posts, agent.held = while_posting, {1}
    connection.add(read)
    drive(connection)
    agent.failing.add(1)
    drive(connection)
    assert not read.terminal, "UCX is still at work on it: its memory may be written"
    assert not connection.idle
    agent.held.clear()
    connection.drive()
    assert agent.log == ["released 1", "closed"]
    assert read.terminal
    assert read.error is GONE


def test_no_read_of_a_broken_connection_ends_before_all_posts_have(
    agent: Agent, connection: PeerConnection
) -> None:
    first, second = read_of(1), read_of(1)
    connection.add(first)
    connection.add(second)
    drive(connection)
    agent.failing.add(1)
    agent.held = {2}
    drive(connection)
    assert not first.terminal, "the connection is not closed yet"
    agent.failing.add(2)
    agent.held.clear()
    drive(connection)
    assert first.terminal
    assert second.terminal
    assert agent.log[-1] == "closed"


def test_reads_that_wait_for_a_broken_connection_use_a_new_one(
    agent: Agent, connection: PeerConnection
) -> None:
    connection.add(read_of(1))
    drive(connection)
    agent.failing.add(1)
    agent.held = {1}
    drive(connection)
    later = read_of(1)
    connection.add(later)
    drive(connection)
    assert agent.made == 1
    agent.held.clear()
    drive(connection)
    agent.done.add(2)
    drive(connection)
    assert later.terminal
    assert later.error is None
