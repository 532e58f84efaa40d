import gc
import multiprocessing
import os
from pathlib import Path

import psutil
import pytest

from hetero_connector import machine
from hetero_connector.errors import ConfigError, StoreError
from hetero_connector.store import arena as arena_module
from hetero_connector.store.arena import Arena, ArenaHandle
from hetero_connector.transfer import shared_memory

SIZE = 1 << 20


def _open_arenas() -> int:
    """Count the descriptors of arenas in this process: those of other tests come and go."""
    links = (os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd"))
    return sum("heterocache-arena" in link for link in links)


def _double_first_byte(handle: ArenaHandle) -> None:
    arena = Arena.attach(handle)
    arena.view[0] *= 2
    arena.close()


def test_another_process_sees_and_changes_the_same_bytes() -> None:
    arena = Arena.create(SIZE)
    arena.view[0] = 21
    child = multiprocessing.get_context("spawn").Process(
        target=_double_first_byte, args=(arena.handle,)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert arena.view[0] == 42
    arena.close()


def test_attaching_in_the_creating_process_gives_the_same_mapping() -> None:
    arena = Arena.create(SIZE)
    again = Arena.attach(arena.handle)
    assert again is arena
    again.close()
    arena.view[1] = 1  # the first use is still open
    arena.close()
    with pytest.raises(StoreError, match="after it was closed"):
        _ = arena.view


def test_a_view_survives_closing() -> None:
    arena = Arena.create(SIZE)
    view = arena.view
    view[-1] = 9
    arena.close()
    arena.close()
    assert view[-1] == 9


def test_closing_gives_descriptor_and_memory_back() -> None:
    gc.collect()
    before = _open_arenas()
    arena = Arena.create(SIZE)
    assert os.path.exists(arena.handle.path)
    assert _open_arenas() > before
    arena.close()
    assert _open_arenas() == before


def test_pages_are_reserved_at_once() -> None:
    arena = Arena.create(SIZE)
    assert os.stat(arena.handle.path).st_blocks * 512 >= SIZE
    arena.close()


def test_too_much_memory_is_refused_before_it_is_taken() -> None:
    asked = machine.memory().available_bytes + (64 << 30)
    with pytest.raises(ConfigError, match=r"dram_gib.*GiB are available") as e:
        Arena.create(asked)
    assert e.value.key == "dram_gib"
    assert f"{asked / 2**30:.2f}" in str(e.value)


def test_memory_that_runs_out_while_reserving_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_memory(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module, "_reserve", out_of_memory)
    gc.collect()
    before = _open_arenas()
    with pytest.raises(ConfigError, match="dram_gib"):
        Arena.create(SIZE)
    assert _open_arenas() == before


def test_a_kernel_without_huge_pages_or_populate_still_reserves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "_MADV_HUGEPAGE", 9999)
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", 9999)
    arena = Arena.create(SIZE)
    assert os.stat(arena.handle.path).st_blocks * 512 >= SIZE
    arena.close()


@pytest.mark.parametrize("shared", [True, False])
def test_pieces_alternate_between_the_nodes_of_the_host(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = sorted(os.sched_getaffinity(0))
    nodes = [{usable[0]}, {usable[-1]}]
    ran: dict[int, set[int]] = {}
    real = arena_module.populate

    def populate(address: int, size_bytes: int) -> None:
        ran[address] = os.sched_getaffinity(0)
        real(address, size_bytes)

    monkeypatch.setattr(machine, "processors_by_node", lambda: nodes)
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", SIZE)
    monkeypatch.setattr(arena_module, "populate", populate)
    arena = Arena.create(5 * SIZE - 4096, shared=shared)
    assert ran == {arena.address + n * SIZE: nodes[n % 2] for n in range(5)}
    assert os.sched_getaffinity(0) == set(usable)
    arena.close()


@pytest.mark.parametrize("shared", [True, False])
def test_on_one_node_no_thread_is_bound(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processors_by_node", lambda: [os.sched_getaffinity(0)])
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", SIZE)
    Arena.create(3 * SIZE, shared=shared).close()


def test_one_piece_that_cannot_be_had_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = arena_module.populate, []

    def populate(address: int, size_bytes: int) -> None:
        calls.append(address)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        real(address, size_bytes)

    monkeypatch.setattr(arena_module, "_PIECE_BYTES", SIZE)
    monkeypatch.setattr(arena_module, "populate", populate)
    gc.collect()
    before = _open_arenas()
    with pytest.raises(ConfigError, match="dram_gib"):
        Arena.create(6 * SIZE)
    assert _open_arenas() == before


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_arena_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="dram_gib"):
        Arena.create(size)


def test_attaching_to_a_dead_engine_says_so() -> None:
    with pytest.raises(StoreError, match="engine must be running"):
        Arena.attach(ArenaHandle("/proc/4194304/fd/3", SIZE))


def test_a_descriptor_that_is_something_else_now_is_refused(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "other")
    with open(path, "wb") as f:
        f.write(b"x" * 100)
    with pytest.raises(StoreError, match="engine that made it is gone"):
        Arena.attach(ArenaHandle(path, SIZE))


def test_a_private_arena_is_for_this_process_only() -> None:
    arena = Arena.create(SIZE, shared=False)
    assert Arena.attach(arena.handle) is arena
    arena.close()
    arena.view[0] = 1
    handle = arena.handle
    arena.close()
    with pytest.raises(StoreError, match="its own process only"):
        Arena.attach(handle)


def test_two_private_arenas_are_two() -> None:
    first, second = (Arena.create(SIZE, shared=False) for _ in range(2))
    assert first.handle != second.handle
    first.view[0] = 1
    assert second.view[0] == 0
    first.close()
    second.close()


@pytest.mark.parametrize("populate", [shared_memory._MADV_POPULATE_WRITE, 9999])
def test_private_pages_are_reserved_at_once(populate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MADV_POPULATE_WRITE", populate)
    before = psutil.Process().memory_info().rss
    arena = Arena.create(64 * SIZE, shared=False)
    assert psutil.Process().memory_info().rss - before >= 60 * SIZE
    arena.close()


def test_a_child_does_not_inherit_a_private_arena() -> None:
    arena = Arena.create(SIZE, shared=False)
    start = arena.address
    child = os.fork()
    if child == 0:
        mapped = any(
            int(line.split("-")[0], 16) <= start < int(line.split("-")[1].split()[0], 16)
            for line in Path("/proc/self/maps").read_text().splitlines()
        )
        os._exit(1 if mapped else 0)
    assert os.waitpid(child, 0)[1] == 0
    arena.close()
