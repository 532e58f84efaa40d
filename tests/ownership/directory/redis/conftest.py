"""A real Redis for tests that kill, pause or restart it."""

from collections.abc import Iterator

import pytest

from examples.embedded_redis import EmbeddedRedis


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as started:
        yield started
