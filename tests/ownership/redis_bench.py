"""A Redis directory under test on a real server, with a clock that the test controls."""

from __future__ import annotations

import atexit
import itertools
from functools import cache

import redis

from examples.embedded_redis import EmbeddedRedis
from ownership.directory import Directory, DirectoryLimits
from ownership.directory.redis import RedisDirectory

CLOCK_KEY = "test-clock"
SIMULATED_TIME = f"local function server_s() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"

_numbers = itertools.count()


@cache
def shared_server() -> EmbeddedRedis:
    """Return one server for all tests that leave it running. Each test has its own fleet."""
    server = EmbeddedRedis().start()
    atexit.register(server.stop)
    return server


def new_fleet() -> str:
    """Return the name of a fleet that no other test uses."""
    return f"test-{next(_numbers)}"


class RedisBench:
    """Every client has connections of its own."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._redis = redis.Redis.from_url(shared_server().url)
        self.fleet = new_fleet()
        self._now_s = 1_000.0
        self._opened: list[Directory] = []
        self.advance(0.0)

    def open(self) -> Directory:
        opened = RedisDirectory(
            f"{shared_server().url}?fleet={self.fleet}",
            self._limits,
            deadline_s=30.0,
            server_time=SIMULATED_TIME,
        )
        self._opened.append(opened)
        return opened

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
        self._redis.set(CLOCK_KEY, repr(self._now_s))

    def close(self) -> None:
        for opened in self._opened:
            opened.close()
        self._redis.close()
