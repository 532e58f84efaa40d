"""A big index stays out of Python's garbage collections, and leaves no garbage of its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from hetero_connector.store import garbage
from hetero_connector.store.catalog.index import PrefixIndex
from hetero_connector.store.garbage import BIG, Freezer, frozen_load
from tests.store.filling import CHUNK


class Looked:
    """An object that collections look at."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave everything frozen: collections of a million objects would slow the tests after it."""
    yield
    gc.enable()


def is_looked_at(thing: object) -> bool:
    return any(x is thing for x in gc.get_objects())


def test_what_a_big_load_makes_is_not_looked_at() -> None:
    with frozen_load(BIG):
        assert not gc.isenabled()
        made = Looked()
    assert gc.isenabled()
    assert not is_looked_at(made)


def test_garbage_from_before_a_big_load_is_not_kept() -> None:
    loop: list[object] = []
    loop.append(loop)
    thing = Looked()
    loop.append(thing)
    gone = weakref.ref(thing)
    del loop, thing
    with frozen_load(BIG):
        assert gone() is None


def test_a_small_load_changes_nothing() -> None:
    with frozen_load(BIG - 1):
        assert gc.isenabled()
        made = Looked()
    assert is_looked_at(made)


def test_a_load_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(OSError, match="disk"), frozen_load(BIG):
        raise OSError("disk")
    assert gc.isenabled()


def test_who_disabled_the_collector_finds_it_disabled() -> None:
    gc.disable()
    with frozen_load(BIG):
        made = Looked()
    assert not gc.isenabled()
    assert is_looked_at(made)


@pytest.mark.parametrize(
    ("size", "growth", "is_frozen"),
    [
        (BIG, garbage._GROWTH, True),
        (BIG, garbage._GROWTH - 1, False),
        (BIG - 1, garbage._GROWTH, False),
    ],
)
def test_what_survives_a_full_collection_is_frozen_once_a_big_index_has_grown(
    size: int, growth: int, is_frozen: bool
) -> None:
    index = PrefixIndex(CHUNK, offer=lambda artifact: None)
    index.nodes = dict.fromkeys(range(size))  # type: ignore[arg-type]
    index.num_added = 1000
    freezer = Freezer(index)
    freezer.start()
    try:
        made = Looked()
        index.num_added += growth
        gc.collect(1)
        assert is_looked_at(made), "who survived young collections may be garbage"
        gc.collect()
        assert is_looked_at(made) is not is_frozen
        later = Looked()
        gc.collect()
        assert is_looked_at(later), "it has not grown since"
    finally:
        freezer.stop()
    index.num_added += growth
    last = Looked()
    gc.collect()
    assert is_looked_at(last)
