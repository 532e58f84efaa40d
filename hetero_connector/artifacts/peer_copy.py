"""Where another engine holds an artifact, or left it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """An artifact of another engine, as a directory told. Nothing in it is trusted.

    In its DRAM or, where `storage` says so, on the SSD of an engine whose lease has ended.
    """

    holder: int
    """The epoch under which the worker listed it."""
    dram_offset: int
    """Byte offset in that worker's DRAM arena."""
    generation: int
    """Of the slot there: another one means that the slot holds something else by now."""
    size_bytes: int
    checksum: bytes
    """xxh3-128 of the bytes, seeded with the artifact's id."""
    token: int = 0
    """The fencing token it was listed under. Only the fence looks at it, see `Peers.admits`."""
    asked_s: float = 0.0
    """The fence's clock before the directory was asked."""
    storage: str = ""
    """The SSD directory that its dead holder left it in; "" for one that serves it from DRAM."""
