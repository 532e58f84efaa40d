"""Every directory under test, two workers of it, and its clock."""

from collections.abc import Iterator

import pytest

from ownership.directory import Directory, Lease
from tests.ownership.fleet_bench import BENCHES, LIMITS, DirectoryBench, join


@pytest.fixture(params=sorted(BENCHES))
def bench(request: pytest.FixtureRequest) -> Iterator[DirectoryBench]:
    made = BENCHES[request.param](LIMITS)
    yield made
    made.close()


@pytest.fixture
def directory(bench: DirectoryBench) -> Iterator[Directory]:
    opened = bench.open()
    yield opened
    opened.close()


@pytest.fixture
def ann(directory: Directory) -> Lease:
    return join(directory, "ann")


@pytest.fixture
def bob(directory: Directory) -> Lease:
    return join(directory, "bob")
