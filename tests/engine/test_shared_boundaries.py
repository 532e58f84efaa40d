"""vLLM's prefix cache gets the boundary state of forks that restores pass, once it is loaded.

The prefix cache is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from hetero_connector.engine.messages import WorkerReport
from hetero_connector.engine.scheduler.shared_boundaries import SharedBoundaries, can_share
from hetero_connector.spec import StateType
from tests.engine.fakes import HYBRID, FakeBlockTables, FakeRequest
from tests.engine.stepped import Engine, artifacts_of, in_use, tokens

SWA = StateType.WINDOW_SWA
FORK = 128
"""The token after which the stored chains differ."""
PAGES = range(6, 8)
"""The pages of the window before the fork."""
END = 288
"""The last token at which a chain can be resumed: the end of a short chunk."""
NUM_BLOCKS = 65


def prefix_cache(num_blocks: int = NUM_BLOCKS) -> KVCacheManager:
    """Return vLLM's prefix cache of a model with the groups of `HYBRID`."""
    size: dict[str, Any] = {
        "block_size": 16, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32
    }  # fmt: skip
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**size)),
        KVCacheGroupSpec(["swa"], SlidingWindowSpec(**size, sliding_window=32)),
    ]
    return KVCacheManager(KVCacheConfig(num_blocks, [], groups), 1024, 16, 16)


class Tables(FakeBlockTables):
    """Block tables that tests set, with vLLM's own prefix cache."""

    def __init__(self, manager: KVCacheManager) -> None:
        super().__init__()
        self.manager = manager

    def reset_prefix_cache(self) -> bool:
        return self.manager.reset_prefix_cache()

    @property
    def coordinator(self) -> Any:
        return self.manager.coordinator

    @property
    def block_pool(self) -> Any:
        return self.manager.block_pool


class Sharing:
    """An engine that has stored two chains which fork, and vLLM's prefix cache."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, **options: Any) -> None:
        self.engine = Engine(HYBRID, **options)
        self.manager = prefix_cache(num_blocks)
        self.pool = self.manager.block_pool
        for name, seed in (("a", 1), ("b", 2)):
            self.engine.run(request(name, seed))
        self.engine.tables = Tables(self.manager)
        self.engine.side.bind(self.engine.tables)  # type: ignore[arg-type]

    def order(self, restoring: FakeRequest) -> Any:
        """Admit a request and order its restore; return the loads."""
        restored = self.engine.admit(restoring)
        self.last = self.engine.order(**{restoring.request_id: restoring.num_tokens - restored})
        return self.last.loads

    def report(self) -> None:
        """Let the worker report the last step."""
        self.engine.report(self.last)

    def end(self, name: str) -> None:
        """End a request."""
        self.engine.finish(self.engine.requests[name])
        self.engine.step()

    @property
    def num_used(self) -> int:
        """The blocks that vLLM counts as used, without its null block."""
        return self.pool.num_gpu_blocks - self.pool.get_num_free_blocks() - 1

    def is_cached(self, of: FakeRequest, page: int) -> bool:
        """Return whether vLLM would hit the page of the windows."""
        return self.pool.get_cached_block(of.block_hashes[page], [1]) is not None  # type: ignore[arg-type]

    def has_window(self) -> bool:
        """Return whether vLLM would hit the window before the fork, and no other page."""
        of = request("hit", 1)
        cached = [page for page in range(len(of.block_hashes)) if self.is_cached(of, page)]
        assert cached in ([], list(PAGES)), "all of it, or nothing"
        return bool(cached)


def request(name: str, seed: int, end: int = 300) -> FakeRequest:
    """Return a request of the chain `seed`, which leaves the others at the fork."""
    return FakeRequest(name, tokens(FORK) + tokens(end - FORK, seed))


@pytest.fixture
def sharing_of() -> Iterator[Callable[..., Sharing]]:
    made: list[Sharing] = []

    def make(**options: Any) -> Sharing:
        made.append(sharing := Sharing(**options))
        return sharing

    yield make
    for sharing in made:
        assert sharing.num_used == 0, "no block is lost"
        assert in_use(sharing.engine) == []
        assert sharing.engine.side._shared.loaders() == {}
        sharing.engine.store.check_integrity()
        sharing.engine.side.close()


@pytest.fixture
def sharing(sharing_of: Callable[..., Sharing]) -> Sharing:
    return sharing_of()


def test_a_restore_that_passes_a_fork_loads_its_window_too(sharing: Sharing) -> None:
    own, shared = sharing.order(request("c", 1))
    assert [(x.state_type, x.start, x.end) for x in artifacts_of(shared)] == [(SWA, 64, FORK)]
    assert shared.blocks.keys() == {(SWA, 1)}
    blocks = shared.blocks[SWA, 1]
    assert range(blocks.first_page, blocks.first_page + len(blocks.ids)) == PAGES
    assert 0 not in blocks.ids
    assert artifacts_of(own)[-1].end == END
    assert not sharing.has_window(), "it is not loaded yet"
    sharing.report()
    assert sharing.has_window()
    window = [sharing.pool.get_cached_block(request("x", 2).block_hashes[i], [1]) for i in PAGES]  # type: ignore[arg-type]
    assert [x[0].block_id for x in window if x] == blocks.ids
    sharing.end("c")


def test_without_a_fork_nothing_is_shared(sharing: Sharing) -> None:
    alone = FakeRequest("alone", tokens(300, seed=9))
    sharing.engine.run(alone)
    assert len(sharing.order(FakeRequest("again", tokens(300, seed=9)))) == 1
    sharing.report()
    sharing.end("again")


def test_what_vllm_has_in_its_cache_is_not_loaded_again(sharing: Sharing) -> None:
    sharing.order(request("c", 1))
    sharing.report()
    assert len(sharing.order(request("d", 2))) == 1
    sharing.report()
    for name in "cd":
        sharing.end(name)


def test_the_next_session_waits_for_what_it_will_hit(sharing: Sharing) -> None:
    engine = sharing.engine
    engine.admit(request("c", 1))
    waiting = request("d", 2)
    assert engine.ask(waiting) is None, "admitted in the same step"
    sharing.last = engine.order(c=300 - END)
    assert engine.ask(waiting) is None, "under way"
    sharing.report()
    assert engine.admit(waiting, local=FORK) == END - FORK
    (load,) = engine.step(d=300 - END).loads
    assert {x.start for x in artifacts_of(load) if x.state_type is not SWA} == {128, 192, 256}
    for name in "cd":
        sharing.end(name)


def test_a_session_waits_no_longer_than_the_load(sharing: Sharing) -> None:
    sharing.order(request("c", 1))
    waiting = request("d", 2)
    assert sharing.engine.ask(waiting) is None
    sharing.engine.side.on_invalid_blocks()
    sharing.report()
    assert not sharing.has_window()
    assert sharing.engine.admit(waiting) == END
    sharing.engine.step(d=300 - END)
    for name in "cd":
        sharing.end(name)


@pytest.mark.parametrize(
    "happen",
    [
        lambda x: x.engine.side.reset(),
        lambda x: x.engine.side.on_invalid_blocks(),
        lambda x: x.engine.side.on_report(WorkerReport(broken=True)),
        lambda x: x.engine.side.root.on_weights_changed(None),
        lambda x: x.manager.reset_prefix_cache(),
        lambda x: x.pool.free_blocks(x.pool.get_new_blocks(x.pool.get_num_free_blocks())),
    ],
    ids=["reset", "invalid blocks", "failed load", "new weights", "vLLM's reset", "reuse"],
)
def test_what_is_no_longer_right_is_not_shared(
    sharing: Sharing, happen: Callable[[Sharing], object]
) -> None:
    sharing.order(request("c", 1))
    assert sharing.num_used == 0, "a reset need not wait"
    assert happen(sharing) is not False
    sharing.report()
    assert not sharing.has_window()
    sharing.end("c")


def test_the_state_is_right_also_if_the_request_has_ended(sharing: Sharing) -> None:
    sharing.order(request("c", 1))
    sharing.engine.finish(sharing.engine.requests["c"])
    sharing.report()
    assert sharing.has_window()
    sharing.engine.step()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_blocks_of_a_parked_load_are_held_until_it_ends(
    sharing_of: Callable[..., Sharing], is_dropped: bool
) -> None:
    sharing = sharing_of(parking="always")
    own, shared = sharing.order(request("c", 1))
    assert own.parked
    assert shared.parked
    assert sharing.num_used == len(PAGES), "no step is ordered after the copy"
    if is_dropped:
        sharing.engine.side.on_invalid_blocks()
    sharing.report()
    assert sharing.has_window() is not is_dropped
    sharing.end("c")


def test_nothing_is_shared_where_few_blocks_are_free(sharing: Sharing) -> None:
    reserve = NUM_BLOCKS // 8
    used = sharing.pool.get_new_blocks(sharing.pool.get_num_free_blocks() - reserve - 1)
    assert len(sharing.order(request("c", 1))) == 1
    sharing.report()
    sharing.pool.free_blocks(used)
    sharing.end("c")


def test_nothing_is_shared_under_speculative_decoding() -> None:
    manager = prefix_cache()
    assert can_share(manager)
    manager.coordinator.single_type_managers[1].use_eagle = True
    assert not can_share(manager)
    shared = SharedBoundaries(HYBRID)
    shared.bind(manager)
    assert not shared.is_supported


def test_turns_of_one_session_are_no_fork(sharing: Sharing) -> None:
    turns = [request(f"turn {i}", 5, FORK + 16 * i) for i in (1, 2, 3)]
    store, engine = sharing.engine.store, Engine(HYBRID)
    for turn in [*turns, request("next", 5)]:
        engine.run(turn)
    (key,) = [
        x.chunk.key for x in engine.store.catalog.tiers.index.nodes.values() if x.chunk.end == FORK
    ]
    assert not engine.store.is_fork(key), "short chunks, and a full one that continues them"
    for seed in (6, 7):
        engine.run(request(f"short {seed}", seed, FORK + 32))
    assert engine.store.is_fork(key), "more ends than the turns of a session have"
    assert store.is_fork(key), "two full chunks"
    engine.side.close()
