"""A Redis that fails over: a primary, its replica, and a Sentinel that watches them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from types import TracebackType

import redis

from examples.embedded_redis import EmbeddedRedis
from tests import waiting

PASSWORD = "hush"


until = partial(waiting.until, pause_s=0.05)
"""Wait with fewer questions: each is a call to Redis."""


class SentinelFleet:
    """Three servers, used as a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        shared = [f"masterauth {PASSWORD}", "repl-diskless-sync-delay 0"]
        self.primary = EmbeddedRedis(shared, password=PASSWORD)
        self.replica = EmbeddedRedis(shared, password=PASSWORD)
        self.sentinel = EmbeddedRedis(
            [
                f"sentinel monitor fleet 127.0.0.1 {self.primary.port} 1",
                f"sentinel auth-pass fleet {PASSWORD}",
                "sentinel down-after-milliseconds fleet 500",
                "sentinel failover-timeout fleet 3000",
            ],
            arguments=["--sentinel"],
        )

    @property
    def url(self) -> str:
        """The URL of the directory whose servers this Sentinel knows."""
        return (
            f"redis+sentinel://:{PASSWORD}@127.0.0.1:{self.sentinel.port}/fleet"
            f"?sentinel_password={self.sentinel.password}"
        )

    def __enter__(self) -> SentinelFleet:
        with ExitStack() as stack:
            for server in (self.primary, self.replica):
                stack.enter_context(server)
            self._follow()
            stack.enter_context(self.sentinel)
            self._wait_for_sentinel()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def lose(self, pause_s: float) -> None:
        """Kill the primary, wait for the failover, and after a pause start it as the replica."""
        self.primary.kill()
        watching = redis.Redis.from_url(self.sentinel.url)
        until(
            lambda: (
                watching.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "fleet")[1]
                == str(self.replica.port).encode()
            ),
            "the replica has taken over",
        )
        time.sleep(pause_s)
        self.primary.start()
        self.primary, self.replica = self.replica, self.primary
        self._follow()
        self._wait_for_sentinel()

    def _follow(self) -> None:
        client = redis.Redis.from_url(self.replica.url)
        client.execute_command("REPLICAOF", "127.0.0.1", self.primary.port)
        until(
            lambda: client.info("replication").get("master_link_status") == "up",
            "the replica follows",
        )

    def _wait_for_sentinel(self) -> None:
        watching = redis.Redis.from_url(self.sentinel.url)
        until(lambda: self._is_known(watching), "the Sentinel knows the replica")

    def _is_known(self, watching: redis.Redis) -> bool:
        """Return True if the replica could take over."""
        found = watching.sentinel_slaves("fleet")
        return any(
            x["port"] == self.replica.port and not x["is_sdown"] and not x["is_disconnected"]
            for x in found
        )
