"""The messages of an engine and its peer process, arriving in any pieces."""

from __future__ import annotations

import contextlib
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.errors import TransferError
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.peer_frames import (
    Frame,
    FrameReader,
    Kind,
    error_payload,
    parse_error,
    parse_read,
    read_payload,
)

frames = st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=200))
sizes = st.integers(0, 2**62)
extents = st.builds(PeerExtent, st.integers(0, 15), sizes, st.integers(0, 15), sizes, sizes)


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_frames_are_decoded_complete_and_in_order(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(frame.encode() for frame in sent)
    reader, received, at, i = FrameReader(), list[Frame](), 0, 0
    while at < len(data):
        size = cuts[i % len(cuts)]
        received += reader.feed(data[at : at + size])
        at, i = at + size, i + 1
    assert received == sent


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_frames_or_refused(data: bytes) -> None:
    reader = FrameReader()
    with contextlib.suppress(ValueError):
        assert sum(16 + len(f.payload) for f in reader.feed(data)) <= len(data)


def test_a_too_large_message_is_refused_before_it_has_arrived() -> None:
    head = bytearray(Frame(Kind.ENDED, 1, b"").encode())
    head[4:8] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(ValueError, match="2147483648 bytes"):
        list(FrameReader().feed(bytes(head)))


@given(st.text(max_size=50), st.lists(extents, min_size=1, max_size=20))
def test_reads_survive_encoding(name: str, asked: list[PeerExtent]) -> None:
    assert parse_read(read_payload(name, asked)) == (name, asked)


@pytest.mark.parametrize(
    "error", [TransferError(errno.ECONNRESET, "the peer is gone"), TransferError("no number")]
)
def test_errors_survive_encoding(error: TransferError) -> None:
    again = parse_error(error_payload(error))
    assert (again.errno, str(again)) == (error.errno, str(error))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_errors_or_refused(data: bytes) -> None:
    if len(data) < 4:
        with pytest.raises(ValueError, match="number"):
            parse_error(data)
    else:
        assert isinstance(parse_error(data), TransferError)
