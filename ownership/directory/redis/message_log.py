"""The messages that the routers of a fleet send each other, in Redis: a stream of a few seconds."""

from __future__ import annotations

from typing import NamedTuple

from ownership.directory.contract import DEFAULT_DEADLINE_S
from ownership.directory.redis.address import RedisAddress
from ownership.directory.redis.connection import RedisConnection
from ownership.directory.redis.scripts import script_named

BEGIN = "0-0"
"""The cursor before the first message."""
_KEPT_S = 10.0
"""A router that reads later than that has lost messages."""
_PAGE = 1000


class Sent(NamedTuple):
    """A message as it was read."""

    age_s: float
    """Seconds before the newest one."""
    content: bytes


class Exchanged(NamedTuple):
    """The result of one exchange."""

    messages: list[Sent]
    cursor: str
    """After the last of them."""
    has_more: bool


class RedisMessageLog:
    """Appends and reads messages, in one round trip. Redis is asked on the caller's thread."""

    def __init__(self, url: str, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """`deadline_s`: see `RedisConnection`. The first exchange connects.

        Raises ValueError for a bad URL.
        """
        self._connection = RedisConnection(RedisAddress.parse(url), deadline_s)

    def exchange(self, message: bytes, cursor: str) -> Exchanged:
        """Append a message, if it is not empty, and return all after the cursor, its own too.

        A server that has lost messages, as after a failover, may have none as new as the cursor:
        then the next exchange reads what it has. Raises DirectoryError; the message may have been
        appended even so.
        """
        script = script_named("exchange_messages")
        newest, *found = self._connection.run(script, message, cursor, _PAGE, _KEPT_S)
        ids = [x.decode() for x in found[::2]]
        newest_ms = _parsed(newest.decode())[0]
        messages = [
            Sent((newest_ms - _parsed(name)[0]) / 1e3, content)
            for name, content in zip(ids, found[1::2], strict=True)
        ]
        if _parsed(newest.decode()) < _parsed(cursor):
            cursor = BEGIN
        return Exchanged(messages, ids[-1] if ids else cursor, len(ids) == _PAGE)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()


def _parsed(name: str) -> tuple[int, int]:
    """Return an id of the stream as milliseconds and a count."""
    milliseconds, _, number = name.partition("-")
    return int(milliseconds), int(number)
