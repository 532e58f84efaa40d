"""Workers without the connector: what their KV events say, in order, lost, repeated, and of
vLLM's own publisher."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed import kv_events as theirs

from ownership.router.identity import ChainCache, PromptIdentity
from ownership.router.view import (
    Certainty,
    EventReader,
    FleetChains,
    FleetWatch,
    PrefixViews,
    StockWorkers,
    Trust,
    block_index,
)
from ownership.router.view.block_index import BlockIndex, BlockRemoved, BlockStored, block_naming
from ownership.router.view.event_reader import EventSource, event_sources
from ownership.router.view.event_stream import SILENT_S, EventStream, Step
from ownership.scheduling.step import WorkerPrefix
from tests.interleaving import try_every_switch
from tests.ownership.router.test_guide import free_ports
from tests.waiting import until

SIZE = 4
TOKENS = list(range(100, 100 + 8 * SIZE))
NAMES = [7 * i + 3 for i in range(8)]
"""Hashes as an engine with some seed makes them."""


def stored(
    begin: int, end: int, group: int = 0, kind: str = "full_attention", **more: Any
) -> theirs.BlockStored:
    """Return vLLM's event for some blocks of `TOKENS`."""
    return theirs.BlockStored(
        block_hashes=list(NAMES[begin:end]),
        parent_block_hash=NAMES[begin - 1] if begin else None,
        token_ids=TOKENS[begin * SIZE : end * SIZE],
        block_size=SIZE,
        lora_id=None,
        medium=more.pop("medium", "GPU"),
        lora_name=more.pop("lora_name", None),
        group_idx=group,
        kv_cache_spec_kind=kind,
        **more,
    )


def removed(*blocks: int, group: int = 0, medium: str = "GPU") -> theirs.BlockRemoved:
    return theirs.BlockRemoved([NAMES[x] for x in blocks], medium, group)


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(theirs.KVEventBatch(ts=1.0, events=list(events)))


class Engine:
    """An engine's stream, read without loss."""

    def __init__(self, *events: Any) -> None:
        self.stream = EventStream(0.0)
        self.stream.on_asked(0.0)
        self.stream.on_all_repeated(0.0)
        self.publish(*events)

    def publish(self, *events: Any) -> None:
        self.stream.on_batch(self.stream.expected, batch(*events), 0.0)

    def prefix(self, salt: str | None = None, adapter: str = "") -> WorkerPrefix:
        chain = ChainCache().of_tokens(TOKENS, block_naming(SIZE, salt, adapter))
        return self.stream.index.prefix(chain.keys)


def test_blocks_are_known_by_their_tokens() -> None:
    engine = Engine(stored(0, 3))
    assert engine.prefix() == WorkerPrefix(3 * SIZE, 0, 3 * SIZE)
    engine.publish(stored(3, 6))
    assert engine.prefix() == WorkerPrefix(6 * SIZE, 0, 6 * SIZE)
    engine.publish(stored(4, 6, medium="CPU"), removed(4, 5))
    assert engine.prefix() == WorkerPrefix(4 * SIZE, 0, 6 * SIZE)
    engine.publish(removed(1))
    assert engine.prefix() == WorkerPrefix(SIZE, 0, SIZE)
    engine.publish(stored(1, 2), theirs.AllBlocksCleared())
    assert (engine.prefix(), len(engine.stream.index)) == (WorkerPrefix(), 0)


def test_salts_adapters_and_media_keep_prompts_apart() -> None:
    salted = Engine(stored(0, 2, extra_keys=[("pepper",), None]))
    assert salted.prefix("pepper").hbm_tokens == 2 * SIZE
    assert salted.prefix().hbm_tokens == salted.prefix("salt").hbm_tokens == 0
    adapted = Engine(stored(0, 2, lora_name="poet", extra_keys=[("poet",), ("poet",)]))
    assert adapted.prefix(adapter="poet").hbm_tokens == 2 * SIZE
    assert adapted.prefix().hbm_tokens == 0
    media = Engine(stored(0, 3, extra_keys=[None, (("image", 0),), None]), stored(3, 4))
    assert media.prefix().hbm_tokens == SIZE


def test_a_window_counts_only_with_its_last_blocks_and_a_recurrent_state_at_its_end() -> None:
    window = {"kv_cache_spec_sliding_window": 2 * SIZE + 1}
    engine = Engine(stored(0, 6, 1, "sliding_window", **window), stored(0, 6))
    assert engine.prefix().hbm_tokens == 6 * SIZE
    engine.publish(removed(0, 1, 2, 3, group=1))
    assert engine.prefix().hbm_tokens == 6 * SIZE
    engine.publish(removed(4, group=1))
    assert engine.prefix().hbm_tokens == 0
    recurrent = Engine(stored(0, 6))
    state = stored(0, 6, 1, "mamba")
    state.block_hashes = [NAMES[3]]
    recurrent.publish(state)
    assert recurrent.prefix().hbm_tokens == 4 * SIZE
    unknown = Engine(stored(0, 6), stored(0, 6, 1, "chunked_local_attention"))
    assert unknown.prefix() == WorkerPrefix()
    assert not unknown.stream.index.is_understood


def test_parts_of_blocks_placeholders_and_remote_copies_are_left_out() -> None:
    part, empty, far = stored(2, 3), stored(2, 3), stored(2, 3, locality="REMOTE")
    part.token_ids, part.block_size = part.token_ids[:2], 2
    empty.token_ids, empty.block_size = [], 0
    engine = Engine(stored(0, 2), part, empty, far, stored(3, 4))
    assert engine.prefix().local_tokens == 2 * SIZE


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.booleans(), st.booleans(), st.booleans()), max_size=16
    ),
    st.integers(1, 16),
    st.booleans(),
)
def test_what_is_lost_is_repeated_or_told(
    steps: list[tuple[int, bool, bool, bool]], kept: int, restarts: bool
) -> None:
    """`kept`: the newest batches that the publisher can repeat."""
    truth, stream, published = BlockIndex(), EventStream(0.0), list[bytes]()
    kinds = {theirs.BlockStored: BlockStored, theirs.BlockRemoved: BlockRemoved}
    is_forgotten = False
    """True if the publisher has not repeated all that it was asked for."""

    def replay() -> None:
        nonlocal is_forgotten
        step = Step.REPLAY
        while step is Step.REPLAY:
            begin = stream.on_asked(1.0)
            is_forgotten |= begin < len(published) - kept
            for number in range(max(begin, len(published) - kept, 0), len(published)):
                stream.on_repeated(number, published[number], 1.0)
            step = stream.on_all_repeated(1.0)

    replay()
    for at, (block, is_store, is_lost, is_asked) in enumerate(steps):
        has_restarted = restarts and at == len(steps) // 2
        if has_restarted:
            truth.clear()
            published.clear()
        event = stored(0, block + 1) if is_store else removed(block)
        published.append(batch(event, theirs.BlockRemoved([at + 1000], None)))
        truth.apply(msgspec.convert(event, kinds[type(event)], from_attributes=True))
        if is_asked or has_restarted:  # regularly: before it has published as many as before
            replay()  # what it repeats may arrive by itself only then
        number = len(published) - 1
        if not is_lost and stream.on_batch(number, published[-1], 1.0) is Step.REPLAY:
            replay()
    replay()  # the regular question
    chain = ChainCache().of_tokens(TOKENS, block_naming(SIZE, None, ""))
    assert stream.expected == len(published)
    if stream.is_whole:
        assert stream.index.prefix(chain.keys) == truth.prefix(chain.keys)
    assert stream.is_whole or is_forgotten
    assert stream.restarts <= restarts or is_forgotten


def test_a_batch_that_arrives_after_it_was_repeated_is_no_restart() -> None:
    engine = Engine(stored(0, 2))
    later = batch(stored(2, 3))
    assert engine.stream.on_asked(0.0) == 0
    engine.stream.on_repeated(0, batch(stored(0, 2)), 0.0)
    engine.stream.on_repeated(1, later, 0.0)
    assert engine.stream.on_all_repeated(0.0) is Step.NOTHING
    assert engine.stream.on_batch(1, later, 0.0) is Step.REPLAY
    assert engine.stream.on_asked(0.0) == 1
    engine.stream.on_repeated(1, later, 0.0)
    assert engine.stream.on_all_repeated(0.0) is Step.NOTHING
    assert (engine.stream.restarts, engine.stream.is_whole) == (0, True)
    assert engine.prefix().hbm_tokens == 3 * SIZE


def test_without_an_answer_a_lower_number_is_a_restart() -> None:
    engine = Engine(stored(0, 2), stored(2, 3))
    assert engine.stream.on_batch(0, batch(stored(0, 1)), 0.0) is Step.REPLAY
    engine.stream.on_asked(0.0)
    engine.stream.on_unanswered(0.0)
    assert (engine.stream.restarts, engine.stream.is_whole) == (1, False)
    assert engine.prefix().hbm_tokens == SIZE


def test_what_cannot_be_read_is_told() -> None:
    engine = Engine(stored(0, 2))
    engine.stream.on_batch(1, msgspec.msgpack.encode([1.0, [["BlockStored", 1]], 0]), 0.0)
    assert not engine.stream.is_readable
    assert engine.prefix().hbm_tokens == 2 * SIZE
    engine.publish(theirs.AllBlocksCleared())
    assert engine.stream.is_readable


def test_a_token_that_is_none_is_told() -> None:
    wrong = stored(2, 3)
    wrong.token_ids = [-1] * SIZE
    engine = Engine(stored(0, 2), wrong)
    assert not engine.stream.is_readable
    assert engine.prefix().hbm_tokens == 2 * SIZE


def test_groups_may_come_while_they_are_read() -> None:
    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        index = Engine(stored(0, 2), stored(0, 2, 1, "mamba")).stream.index
        more = stored(0, 2, 2, "mamba")
        event = msgspec.convert(more, BlockStored, from_attributes=True)
        return lambda: (index.block_size, index.is_understood), lambda: index.apply(event)

    assert try_every_switch(prepare, block_index, every=4) > 5


class Worker:
    """A stock worker: vLLM's own publisher, and its server's answers."""

    def __init__(self, *, repeats: int = 10_000) -> None:
        self._ports = free_ports(2)
        self._repeats = repeats
        self.start()

    def start(self) -> None:
        until(lambda: all(map(is_free, self._ports)))  # ZMQ closes sockets on its own thread
        endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in self._ports)
        self._publisher = theirs.ZmqEventPublisher(
            0, endpoint.replace("127.0.0.1", "*"), replay, buffer_steps=self._repeats
        )

    def publish(self, *events: Any) -> None:
        self._publisher.publish(theirs.KVEventBatch(ts=time.time(), events=list(events)))

    def stop(self) -> None:
        self._publisher.shutdown()

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if path == "/kv_event_sources":
            config = msgspec.to_builtins(self._publisher.get_publisher_config().__dict__)
            return {"0": {**config, "replay_endpoint": f"tcp://*:{self._ports[1]}"}}
        if path == "/v1/models":
            return {"data": [{"id": "m", "parent": None}]}
        raise ValueError(f"{path}: status 404")


def is_free(port: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError:
            return False
    return True


class Router:
    """The view of a router that reads events."""

    def __init__(self, **workers: Worker) -> None:
        self.reader = EventReader()
        self.stock = StockWorkers(self.reader.streams)
        identity = PromptIdentity(None, ChainCache())
        self.views = PrefixViews(identity, FleetChains(), Trust(), None, stock=self.stock)
        servers = {name: worker.ask for name, worker in workers.items()}
        self.watch = FleetWatch(
            self.views, lambda: servers, events=self.reader, host_of=lambda name: "127.0.0.1"
        )
        self.servers = servers
        asyncio.run(self.watch.ask_all())

    def seen(self, later_s: float = 0.0) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the tokens that each server has of a prompt, and the reasons."""
        now_s = time.monotonic() + later_s
        view = asyncio.run(self.views.find("/v1/completions", {"prompt": TOKENS}, now_s))
        assert view.certainty is (Certainty.DEGRADED if view.reasons else Certainty.EXACT)
        return {name: x.hbm_tokens for name, x in view.prefixes.items()}, view.reasons


@contextmanager
def routed(**workers: Worker) -> Iterator[Router]:
    router = Router(**workers)
    try:
        yield router
    finally:
        router.reader.close()
        router.views.close()
        for worker in workers.values():
            worker.stop()


def test_a_router_that_starts_late_knows_what_vllm_has_published() -> None:
    early, late = Worker(), Worker()
    early.publish(stored(0, 2))
    early.publish(stored(2, 3))
    with routed(early=early, late=late) as router:
        until(lambda: router.seen() == ({"early": 3 * SIZE}, ()))
        late.publish(stored(0, 5))
        until(lambda: router.seen() == ({"early": 3 * SIZE, "late": 5 * SIZE}, ()))
        early.publish(theirs.AllBlocksCleared())
        until(lambda: router.seen() == ({"late": 5 * SIZE}, ()))
        del router.servers["late"]
        asyncio.run(router.watch.ask_all())
        until(lambda: router.seen() == ({}, ()))


def test_events_that_vllm_no_longer_repeats_are_missed_until_it_starts_again() -> None:
    worker = Worker(repeats=1)
    for begin in range(3):
        worker.publish(stored(begin, begin + 1))
    with routed(one=worker) as router:
        until(lambda: router.seen() == ({}, ("events_lost",)))
        worker.stop()
        worker.start()
        worker.publish(stored(0, 2))
        until(lambda: router.seen() == ({"one": 2 * SIZE}, ()))
        assert router.seen(later_s=SILENT_S + 5.0)[1] == ("events_silent",)


@pytest.mark.parametrize("endpoint", ["tcp://host", "tcp://127.0.0.1:*", "nonsense"])
def test_an_endpoint_that_is_none_costs_no_other_worker_its_events(endpoint: str) -> None:
    worker = Worker()
    worker.publish(stored(0, 2))
    with routed(one=worker) as router:
        router.reader.follow("bad", [EventSource(endpoint, endpoint)])
        until(lambda: router.reader.streams("bad"))
        until(lambda: router.seen()[0] == {"one": 2 * SIZE})
        worker.publish(stored(2, 3))
        until(lambda: router.seen()[0] == {"one": 3 * SIZE})


def test_an_error_with_one_engine_s_events_costs_no_other_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Worker(), Worker()
    with routed(bad=bad, good=good) as router:
        until(lambda: router.seen() == ({}, ()))
        [stream] = router.reader.streams("bad")
        failures = list[object]()

        def fail(*given: object) -> Step:
            failures.append(given)
            raise RuntimeError("a bug")

        monkeypatch.setattr(stream, "on_batch", fail)
        bad.publish(stored(0, 1))
        until(lambda: not stream.is_readable)
        bad.publish(stored(1, 2))
        until(lambda: len(failures) == 2)
        good.publish(stored(0, 2))
        until(lambda: router.seen()[0].get("good") == 2 * SIZE)
        assert router.seen()[1] == ("events_unreadable",)
    [record] = caplog.records
    assert "are not understood" in record.getMessage()
    assert record.exc_info is not None


def test_questions_that_nothing_takes_are_unanswered() -> None:
    """ZMQ keeps a thousand of them."""
    reader = EventReader()
    context = zmq.Context()
    [port] = free_ports(1)
    source = EventSource(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}")
    connection = reader._open(context, source)
    try:
        for _ in range(1_100):
            reader._ask(connection, time.monotonic())
        assert not connection.stream.has_waited(time.monotonic() + 60.0, 1.0), "none is awaited"
    finally:
        connection.events.close(linger=0)
        connection.replay.close(linger=0)
        context.destroy(linger=0)
        reader.close()


def test_events_arrive_over_ipv6() -> None:
    reader, context = EventReader(), zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.IPV6, 1)
    port = publisher.bind_to_random_port("tcp://[::1]")
    try:
        reader.follow("six", [EventSource(f"tcp://[::1]:{port}", "")])
        assert publisher.poll(10_000), "the router has subscribed"
    finally:
        reader.close()
        publisher.close(linger=0)
        context.destroy(linger=0)


def test_a_router_without_event_streams_uses_no_cpu_for_them() -> None:
    """A poll of no sockets returns at once."""
    reader = EventReader()
    assert reader._thread.ident is not None
    used = time.pthread_getcpuclockid(reader._thread.ident)
    time.sleep(0.05)
    used_s = -time.clock_gettime(used)
    time.sleep(0.4)
    used_s += time.clock_gettime(used)
    reader.close()
    assert used_s < 0.05


def test_sources_are_those_of_the_server_s_answer() -> None:
    shown = {"endpoint": "tcp://*:5557", "publisher": "zmq", "replay_endpoint": None}
    for host, found in (("10.0.0.1", "tcp://10.0.0.1:5557"), ("::1", "tcp://[::1]:5557")):
        assert event_sources({"0": shown}, host)[0].endpoint == found
    assert event_sources({"0": {**shown, "publisher": "null"}}, "h") == []
    assert event_sources({"0": {**shown, "replay_endpoint": 5}}, "h")[0].replay_endpoint == "5"
    for wrong in ([], {"0": {}}, {"0": {"endpoint": 5}}):
        with pytest.raises(ValueError, match="the answer about KV events"):
            event_sources(wrong, "h")
