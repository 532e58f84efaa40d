"""Calls that fail, without a server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from redis.exceptions import AuthenticationError

from hetero_connector.errors import DirectoryError
from ownership.directory.breaker import FIRST_PAUSE_S
from ownership.directory.redis.address import RedisAddress
from ownership.directory.redis.connection import RedisConnection


@pytest.mark.parametrize("error", [OSError("lost"), AuthenticationError("WRONGPASS")])
def test_calls_that_fail_together_are_one_failure(error: Exception) -> None:
    connection = RedisConnection(RedisAddress.parse("redis://127.0.0.1:1"), 1.0)

    def fail(client: Any) -> None:
        raise error

    def fail_while_another_does(client: Any) -> None:
        with suppress(DirectoryError):
            connection._call(fail)
        raise error

    with pytest.raises(DirectoryError):
        connection._call(fail_while_another_does)
    assert 0.0 < connection._breaker._pause_s == FIRST_PAUSE_S
    connection._breaker._refuse_until_s = 0.0
    with pytest.raises(DirectoryError):
        connection._call(fail)
    assert connection._breaker._pause_s == 2 * FIRST_PAUSE_S, "a later one counts"
    connection.close()
