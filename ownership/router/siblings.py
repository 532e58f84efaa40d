"""The processes of one router tell each other how they have named the chunks of prompts.

A session's requests come to any of them. Without this each would tokenise all of its text.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from ownership.router.identity import NamedPart

_MOST_BYTES = 128 << 10
"""Most bytes of a message, less than a socket takes. A part has some ten kilobytes."""
_DECODER = msgspec.msgpack.Decoder(NamedPart)


class Siblings:
    """The other processes, as one of them knows them. A message that is lost costs only time."""

    def __init__(self, seed: int, inbox: socket.socket, others: Sequence[socket.socket]) -> None:
        """`seed`: of the `ChainCache` of each. `inbox`: where the others write to. `others`: the
        ends that write to their inboxes.
        """
        self.seed = seed
        self._inbox, self._others = inbox, others

    @property
    def num_processes(self) -> int:
        return 1 + len(self._others)

    def tell(self, part: NamedPart) -> None:
        """Send a part to all that have room for it, unless it is large. Called on any thread."""
        message = msgspec.msgpack.encode(part)
        if len(message) > _MOST_BYTES:
            return
        for other in self._others:
            with suppress(OSError):  # it reads nothing now, has ended, or memory is short
                other.send(message, socket.MSG_DONTWAIT)

    @contextmanager
    def listening(self, on_part: Callable[[NamedPart], None]) -> Iterator[None]:
        """Call `on_part` on the running event loop with each part that another process sends."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                message = self._inbox.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if message:
                on_part(_DECODER.decode(message))
            else:  # the others have ended
                loop.remove_reader(self._inbox)

        loop.add_reader(self._inbox, read)
        try:
            yield
        finally:
            loop.remove_reader(self._inbox)


def make_siblings(count: int) -> list[Siblings]:
    """Return what each of so many processes gets when it is started, and started again."""
    seed = secrets.randbits(63)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    return [
        Siblings(seed, inbox, [other for at, (_, other) in enumerate(pairs) if at != own])
        for own, (inbox, _) in enumerate(pairs)
    ]
