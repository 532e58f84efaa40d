"""An arena is pinned as a whole or not at all, and no failure raises."""

from __future__ import annotations

import itertools
import logging
import threading

import numpy as np
import pytest
from heterocache_cuda.driver import CudaError, Driver
from heterocache_cuda.pinned import PinnedArena

from .stand_in_driver import OUT_OF_MEMORY, StandInLibrary

PIECE = 4096
NUM_PIECES = 9
SIZE = NUM_PIECES * PIECE - 100


@pytest.fixture
def arena() -> np.ndarray:
    return np.zeros(SIZE, np.uint8)


def pin(arena: np.ndarray, library: StandInLibrary) -> PinnedArena:
    return PinnedArena.pin(arena, Driver.open(0, library), piece_bytes=PIECE)


def test_pieces_cover_the_arena_until_it_is_closed(arena: np.ndarray) -> None:
    library = StandInLibrary()
    pinned = pin(arena, library)
    assert pinned.is_complete
    end = arena.ctypes.data
    for start, size in sorted(library.registered.items()):
        assert start == end
        end += size
    assert end == arena.ctypes.data + SIZE
    pinned.close()
    pinned.close()
    assert not library.registered
    assert library.calls["cuMemHostUnregister"] == NUM_PIECES


def test_threads_register_pieces_at_once(arena: np.ndarray) -> None:
    library = StandInLibrary()
    together = threading.Barrier(3)  # breaks, and so fails, if fewer threads come
    library.on_register = lambda: together.wait(60)
    pinned = pin(arena, library)
    assert pinned.is_complete
    assert not together.broken


@pytest.mark.parametrize("number", range(NUM_PIECES))
def test_a_piece_that_fails_unpins_all_others(
    arena: np.ndarray, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    library = StandInLibrary({"cuMemHostRegister_v2": {number: OUT_OF_MEMORY}})
    pinned = pin(arena, library)
    assert not pinned.is_complete
    assert not library.registered
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert "smaller dram_gib" in caplog.text
    pinned.close()


def test_what_somebody_else_has_pinned_stays_pinned(
    arena: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    library = StandInLibrary()
    theirs = arena.ctypes.data + 5 * PIECE
    Driver.open(0, library).register(theirs, PIECE)
    assert not pin(arena, library).is_complete
    assert library.registered == {theirs: PIECE}
    assert "ALREADY_REGISTERED" in caplog.text


@pytest.mark.parametrize("number", range(3))
def test_a_piece_that_cannot_be_unpinned_is_a_warning(
    arena: np.ndarray, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    library = StandInLibrary({"cuMemHostUnregister": {number: OUT_OF_MEMORY}})
    pin(arena, library).close()
    assert len(library.registered) == 1
    (address,) = library.registered
    assert f"{address:#x} stays locked" in caplog.text


def test_a_failed_piece_and_a_failed_rollback_do_not_raise(arena: np.ndarray) -> None:
    library = StandInLibrary(
        {"cuMemHostRegister_v2": {8: OUT_OF_MEMORY}, "cuMemHostUnregister": {0: OUT_OF_MEMORY}}
    )
    assert not pin(arena, library).is_complete
    assert len(library.registered) == 1


def test_a_device_with_other_addresses_is_refused(
    arena: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    library = StandInLibrary()
    library.can_use_host_pointers = False
    assert not pin(arena, library).is_complete
    assert not library.calls["cuMemHostRegister_v2"]
    assert "at the host's own addresses" in caplog.text


def test_an_attribute_that_cannot_be_read_is_a_failure_too(arena: np.ndarray) -> None:
    library = StandInLibrary({"cuDeviceGetAttribute": {0: OUT_OF_MEMORY}})
    assert not pin(arena, library).is_complete


def test_progress_is_logged(arena: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seconds = itertools.count(0, 7)
    driver = Driver.open(0, StandInLibrary())
    PinnedArena.pin(arena, driver, piece_bytes=PIECE, clock=lambda: float(next(seconds)))
    *progress, last = caplog.messages
    assert len(progress) >= 2
    assert all("of 0 GiB of host memory in" in line for line in progress)
    assert last.startswith("pinned 0.0 GiB of host memory in")


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_does_not_open_names_the_call(call: str) -> None:
    with pytest.raises(CudaError, match=f"{call} failed with CUDA_ERROR_OUT_OF_MEMORY"):
        Driver.open(0, StandInLibrary({call: {0: OUT_OF_MEMORY}}))
