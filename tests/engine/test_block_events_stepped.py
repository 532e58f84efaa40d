"""Block events of a scheduler side with a real store, step by step, as a router takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import ROOT, ChunkKey, Tier
from hetero_connector.engine.messages import WorkerReport
from hetero_connector.engine.scheduler.block_events import EventGroup
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.request_identifier import RequestIdentity, extra_keys
from hetero_connector.engine.scheduler.weight_updates import Weights
from hetero_connector.planner.checkpoints import CheckpointPolicy, Full, Zero
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.spec import ModelSpec, StateType
from tests.engine.event_consumer import Consumer
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, layer
from tests.engine.stepped import CHUNK, Engine, tokens

BLOCK = 16
GROUP = EventGroup(0, "full_attention", BLOCK, BLOCK)
REPLAY = WindowReplay.of(HYBRID)


class Router:
    """An engine, and a router that takes the events of each of its steps."""

    def __init__(self, model: ModelSpec, **settings: Any) -> None:
        self.engine = Engine(model, event_group=GROUP, **settings)
        self.engine.asks_again = True  # reads from SSD take a while
        self.model = model
        self.view = Consumer()
        self.names = 0
        self.chunks: dict[ChunkKey, tuple[ChunkKey, int, set[int]]] = {}
        """Parent, end and blocks of each chunk that a request may have stored."""
        self.roots: dict[ChunkKey, bytes] = {}

    def run(self, token_ids: list[int], **request: Any) -> int:
        """Run a request and return the tokens that it restored."""
        self.names += 1
        asked = FakeRequest(f"{self.names}", token_ids, **request)
        self._learn(asked)
        restored = self.engine.run(asked)
        self.see()
        return restored

    def see(self) -> None:
        """Take the events of the last step and of as many as there are news for."""
        side = self.engine.side
        self._publish([])
        while side._has_news():
            self.engine.step()
            self._publish([])
            self.engine.recorder.drain()

    def clear_pages(self) -> None:
        """Reset vLLM's own prefix cache, and take the events of the next step."""
        self.engine.tables.prefixes = {}
        self._publish([AllBlocksCleared()])
        self.see()

    def check(self) -> None:
        """Compare the view with what the store can restore."""
        held = self._resumable()
        assert {medium: self.view.of(medium) for medium in held} == held
        described = self.engine.side._events._announcements._chunks.keys()  # type: ignore[union-attr]
        assert described <= self.engine.store.catalog.tiers.index.nodes.keys(), "a leak"

    def _publish(self, events: list[Any]) -> None:
        batch = KVEventBatch(ts=0.0, events=[*events, *self.engine.side.take_events()])
        self.view.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(batch))[1])

    def _learn(self, request: FakeRequest) -> None:
        hashes = [int(maybe_convert_block_hash(x)) for x in request.block_hashes]  # type: ignore[arg-type]
        identity = RequestIdentity()
        extra = extra_keys(request, identity, Clearings())  # type: ignore[arg-type]
        chain = RequestChain(self.engine.side.root.hasher, extra)
        chain.extend(request.all_token_ids)
        for end in range(BLOCK, request.num_tokens + 1, BLOCK):
            chunk = chain.ending_at(end)
            of_chunk = set(hashes[chunk.start // BLOCK : chunk.end // BLOCK])
            self.chunks[chunk.key] = chunk.parent, chunk.end, of_chunk
            self.roots[chunk.key] = chain.root

    def _resumable(self) -> dict[str, set[int]]:
        """Return the blocks behind which a stored chain can be resumed, found chain by chain."""
        root = self.engine.side.root.hasher.root
        held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        prefix = set(self.model.prefix_types)
        for key in self.engine.store.catalog.tiers.index.nodes:
            if key == ROOT or self.roots[key] != root:
                continue
            chain = []
            while key != ROOT:
                chain.append(key)
                key = self.chunks[key][0]
            copies = self.engine.store.copies_of(chain)
            if not all(c is not None and prefix <= c.state_types for c in copies):
                continue
            assert copies[0] is not None
            end = self.chunks[chain[0]][1]
            if not self.model.is_complete(copies[0].state_types, end):
                replay = self.engine.side._replays._rule
                end = end - replay.tokens if replay else 0
            for chunk, found in zip(chain, copies, strict=True):
                assert found is not None
                if self.chunks[chunk][1] > end:
                    continue
                if prefix <= found.dram:
                    held["CPU"] |= self.chunks[chunk][2]
                if prefix <= found.ssd or not prefix <= found.dram:
                    held["STORAGE"] |= self.chunks[chunk][2]
        return held


def routers(model: ModelSpec, **settings: Any) -> Iterator[Router]:
    router = Router(model, **settings)
    yield router
    router.engine.side.close()


@pytest.fixture
def dense() -> Iterator[Router]:
    yield from routers(DENSE)


@pytest.fixture
def hybrid() -> Iterator[Router]:
    yield from routers(HYBRID, checkpoints=Zero())


def test_an_event_names_a_chunk_as_vllm_names_its_blocks(dense: Router) -> None:
    prompt = tokens(CHUNK + 20)
    request = FakeRequest("a", prompt, cache_salt="tenant")
    dense.engine.run(request)
    first, rest = dense.engine.side.take_events()
    hashes = [maybe_convert_block_hash(x) for x in request.block_hashes]  # type: ignore[arg-type]
    assert msgspec.to_builtins(first) == {
        "type": "BlockStored",
        "block_hashes": hashes[:4],
        "parent_block_hash": None,
        "token_ids": prompt[:CHUNK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": [("tenant",), None, None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "LOCAL",
    }
    assert msgspec.to_builtins(rest)["block_hashes"] == hashes[4:5]
    assert msgspec.to_builtins(rest)["parent_block_hash"] == hashes[3]


def test_windows_must_be_there_for_blocks_to_count(hybrid: Router) -> None:
    hybrid.run(tokens(200))
    assert len(hybrid.view.of("CPU")) == 192 // BLOCK, "the end of the request is a checkpoint"
    store = hybrid.engine.store
    with store.catalog.locked():
        for artifact in list(store.catalog.tiers.index.artifacts()):
            if artifact.state_type is StateType.WINDOW_SWA:
                store.catalog.tiers.forget(artifact)
    hybrid.see()
    assert hybrid.view.of("CPU") == set(), "nothing could be restored"
    assert hybrid.run(tokens(200)) == 0


def test_state_in_two_tiers_counts_for_the_slower_one(tmp_path: Path) -> None:
    model = ModelSpec((layer("a", 0), layer("b", 0, StateType.COMPRESSED_HCA)), alignment=16)
    for router in routers(model, ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 20):
        router.run(tokens(CHUNK))
        store = router.engine.store
        assert store.flush(10.0)
        router.see()
        assert router.view.of("CPU") == router.view.of("STORAGE") != set()
        leaves = {StateType.DENSE_KV: Tier.DRAM, StateType.COMPRESSED_HCA: Tier.SSD}
        with store.catalog.locked():
            for artifact in list(store.catalog.tiers.index.artifacts()):
                store.catalog.tiers.drop(artifact, leaves[artifact.state_type])
        router.see()
        assert router.view.of("CPU") == set()
        assert len(router.view.of("STORAGE")) == CHUNK // BLOCK


def test_other_weights_withdraw_what_they_cannot_use(dense: Router) -> None:
    dense.run(tokens(200))
    before = dense.view.of("CPU")
    dense.engine.side.root.on_weights_changed("v2")
    dense.see()
    assert dense.view.of("CPU") == set()
    dense.engine.side.root.on_weights_changed(Weights().version)
    dense.see()
    assert dense.view.of("CPU") == before
    assert dense.run(tokens(200)) == 192


def test_an_engine_that_cannot_load_announces_nothing(dense: Router) -> None:
    dense.run(tokens(200))
    assert dense.view.of("CPU")
    dense.engine.side.on_report(WorkerReport(broken=True))
    dense.see()
    assert dense.view.of("CPU") == set()


def test_what_a_start_finds_on_ssd_counts_from_its_first_use(tmp_path: Path) -> None:
    settings = {"ssd_dir": tmp_path / "ssd", "ssd_bytes": 1 << 20}
    for router in routers(DENSE, **settings):
        router.run(tokens(200))
        assert router.engine.store.flush(10.0)
        router.see()
        before = router.view.of("STORAGE")
        assert len(before) == 192 // BLOCK
    for router in routers(DENSE, **settings):
        router.see()
        assert router.view.of("STORAGE") == set()
        assert router.engine.side.take_events() == []
        assert router.run([*tokens(200), *tokens(40, seed=3)]) == 192
        assert router.view.of("STORAGE") >= before


def test_a_chunk_is_announced_by_a_request_that_has_all_its_tokens(tmp_path: Path) -> None:
    settings = {"ssd_dir": tmp_path / "ssd", "ssd_bytes": 1 << 20}
    prompt, whole = tokens(150), tokens(170)
    for router in routers(DENSE, **settings):
        router.run(whole)
        assert router.engine.store.flush(10.0)
    for router in routers(DENSE, **settings):
        asked = FakeRequest("answered as before", list(prompt), num_prompt_tokens=150)
        restored = router.engine.admit(asked)
        router.engine.step(**{asked.request_id: 150 - restored})
        asked.all_token_ids.extend(whole[150:])
        router.engine.grow_table(asked)
        router.engine.step(**{asked.request_id: 20})
        router.engine.finish(asked)
        assert router.run(prompt) == 144, "it has not the last chunk's tokens"
        assert router.run(whole) == 160
        router.see()
        request = FakeRequest("all blocks", whole)
        hashes = {int(maybe_convert_block_hash(x)) for x in request.block_hashes}  # type: ignore[arg-type]
        assert len(hashes) == 10
        assert hashes <= router.view.of("CPU") | router.view.of("STORAGE")


def test_the_group_that_routers_index_is_found_behind_windows() -> None:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    window = SlidingWindowSpec(block_size=16, sliding_window=64, **shape)
    full = FullAttentionSpec(block_size=32, **shape)

    def group_of(*specs: Any) -> EventGroup | None:
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return EventGroup.of(SimpleNamespace(kv_cache_groups=groups, hash_block_size=16))  # type: ignore[arg-type]

    assert group_of(window, window, full) == EventGroup(2, "full_attention", 32, 16)
    assert group_of(window) is None


def test_hashes_of_small_blocks_are_joined_to_those_of_the_groups_blocks() -> None:
    engine = Engine(DENSE, event_group=EventGroup(0, "full_attention", 32, 16))
    request = FakeRequest("a", tokens(CHUNK))
    engine.run(request)
    (event,) = engine.side.take_events()
    wanted = [maybe_convert_block_hash(x) for x in request.block_hashes[1::2]]  # type: ignore[arg-type]
    assert (event.block_hashes, event.block_size) == (wanted, 32)  # type: ignore[union-attr]
    engine.side.close()


def test_an_engine_without_events_notes_no_changes() -> None:
    engine = Engine(DENSE)
    engine.run(FakeRequest("a", tokens(200)))
    assert not engine.store.has_changed
    assert engine.side.take_events() == ()
    engine.side.close()


@pytest.mark.parametrize(
    ("model", "checkpoints", "replay"),
    [(DENSE, Full(), None), (HYBRID, Zero(), None), (HYBRID, Zero(), REPLAY)],
    ids=["dense", "hybrid", "replayed"],
)
def test_a_view_is_the_stores_after_a_random_run(
    tmp_path: Path, model: ModelSpec, checkpoints: CheckpointPolicy, replay: WindowReplay | None
) -> None:
    rng = Random(f"{len(model.layers)} {replay}")
    router = Router(
        model,
        dram_bytes=40_000,
        checkpoints=checkpoints,
        window_replay=replay,
        ssd_dir=tmp_path / "ssd",
        ssd_bytes=120_000,
        spill_delay_s=0.0,
    )
    prompts = [tokens(rng.randrange(100, 500), seed=seed) for seed in range(12)]
    was_full = False
    for turn in range(150):
        action = rng.random()
        if action < 0.02:
            router.engine.side.reset()
        elif action < 0.05:
            router.clear_pages()
        elif action < 0.07:
            router.engine.side.root.on_weights_changed(rng.choice(["a", Weights().version]))
        prompt = rng.choice(prompts)
        cut = rng.randrange(40, len(prompt))
        salt = rng.choice([None, None, "tenant"])
        suffix = tokens(rng.randrange(120), seed=turn)
        if rng.random() < 0.3:  # an answer, so that the same prompt finds its end in it
            router.run([*prompt, *suffix], num_prompt_tokens=len(prompt), cache_salt=salt)
            router.run(prompt, cache_salt=salt)
        else:
            router.run([*prompt[:cut], *suffix], cache_salt=salt)
        assert router.engine.store.flush(10.0)
        router.see()
        router.check()
        was_full |= router.view.of("CPU") != router.view.of("STORAGE") != set()
    assert was_full, "nothing was ever evicted"
    router.engine.side.reset()
    router.see()
    assert router.view.of("CPU") | router.view.of("STORAGE") == set()
    router.engine.side.close()
