"""Each parameter of a request does what it says, on the scheduler side over a real store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from hetero_connector.session_ids import session_key
from hetero_connector.store.base import PinRefusal
from tests.clock import Clock
from tests.engine.fakes import HYBRID as MODEL
from tests.engine.fakes import FakeRequest
from tests.engine.stepped import Engine, tokens
from tests.engine.test_request_params import json_params
from tests.waiting import until

Start = Callable[..., Engine]
DRAM_BYTES = 100_000
"""Room for a few hundred tokens."""


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        engines.append(Engine(MODEL, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.store.check_integrity()
        engine.side.close()


def turn(name: str, count: int = 200, seed: int = 0, **fields: Any) -> FakeRequest:
    """Return a request; what is not a field of it is a parameter of ours."""
    plain = {"session_id", "cache_salt", "kv_transfer_params", "skip_reading_prefix_cache"}
    request = {key: fields.pop(key) for key in plain & fields.keys()}
    if fields:
        request["kv_transfer_params"] = {
            **(request.get("kv_transfer_params") or {}),
            "heterocache": fields,
        }
    return FakeRequest(name, tokens(count, seed), **request)


def stored(engine: Engine, request: FakeRequest, **params: Any) -> int:
    """Return the tokens that a new request with the same prompt would restore."""
    again = FakeRequest(
        f"{request.request_id}?{time.monotonic_ns()}",
        [*request.all_token_ids, 1],
        cache_salt=request.cache_salt,
        kv_transfer_params=params,
    )
    found = engine.answered(again)
    engine.finish(again)
    return found


def press(engine: Engine, clock: Clock, name: str) -> None:
    """Store more than DRAM holds, in so much time that no earlier session protects a chain."""
    for number in range(12):
        clock.passes(61.0)
        engine.run(turn(f"{name}{number}", seed=100 + number))


def test_no_store_stores_nothing_and_restores_what_is_there(start: Start) -> None:
    engine = start()
    first = turn("a")
    engine.run(turn("a", no_store=True))
    assert stored(engine, first) == 0
    engine.run(first)
    more = FakeRequest("b", first.all_token_ids + tokens(100, 7))
    more.kv_transfer_params = {"heterocache": {"no_store": True}}
    assert engine.run(more) == 192
    assert stored(engine, more) == 192
    assert not engine.store.catalog.tiers.pinned()


@pytest.mark.parametrize(
    ("most", "stored_tokens"), [(0, 0), (63, 0), (64, 64), (130, 128), (199, 192), (10**9, 192)]
)
def test_max_offload_tokens_is_the_end_of_what_is_stored_in_whole_chunks(
    start: Start, most: int, stored_tokens: int
) -> None:
    engine = start()
    request = turn("a", kv_transfer_params={"max_offload_tokens": most})
    engine.run(request)
    assert stored(engine, request) == stored_tokens


@pytest.mark.parametrize(
    ("most", "local", "restored"),
    [(0, 0, 0), (63, 0, 0), (64, 0, 64), (150, 0, 128), (10**9, 0, 192), (64, 64, 64), (0, 64, 0)],
)
def test_max_load_tokens_count_from_what_the_engine_has(
    start: Start, most: int, local: int, restored: int
) -> None:
    engine = start()
    engine.run(turn("a"))
    capped = turn("b", kv_transfer_params={"max_load_tokens": most})
    capped.all_token_ids.append(1)
    assert engine.admit(capped, local) == restored
    engine.step(b=capped.num_tokens - local - restored)
    engine.finish(capped)
    engine.step()
    assert stored(engine, turn("a")) == 192, "what is stored stays whole"


def test_load_tiers_leave_the_ssd_alone_and_dram_serves_all(start: Start, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=8 << 20)
    request = turn("a")
    engine.run(request)
    assert stored(engine, request, kv_load_tiers=[]) == 192
    assert engine.store.flush(10.0)
    engine.store.leave_to_ssd()
    for tiers in ([], [{"medium": "CPU"}], [{"locality": "REMOTE"}]):
        assert stored(engine, request, kv_load_tiers=tiers) == 0
    for tiers in ([{"medium": "STORAGE"}], ["disk"], None):
        assert stored(engine, request, kv_load_tiers=tiers) == 192
        until(lambda: engine.store.leave_to_ssd() or not engine.store.catalog.tiers.pinned())
        assert {x for s in engine.store.match(chain(engine, request)) for x in s.tiers.values()}


def chain(engine: Engine, request: FakeRequest) -> Any:
    found = engine.side.commands._new_chain(request.cache_salt)
    found.extend(request.all_token_ids)
    return found.chunks()


def test_a_request_that_must_not_read_is_a_turn_of_its_session_all_the_same(start: Start) -> None:
    engine = start()
    engine.run(turn("a", session_id="s"))
    second = turn("b", session_id="s", skip_reading_prefix_cache=True, pin_s=60)
    assert engine.run(second) == 0
    (_, record), *others = engine.side._sessions.book.newest()
    assert (record.turns, others) == (2, [])
    assert len(engine.store.catalog.tiers.timed_pins) == 1


def test_a_pin_survives_pressure_grows_with_its_session_and_ends(start: Start) -> None:
    engine = start(dram_bytes=200_000, clock=(clock := Clock()))
    request = turn("a", 128, session_id="s", pin_s=1_000)
    engine.run(request)
    longer = FakeRequest("b", request.all_token_ids + tokens(64, 9), session_id="s")
    assert engine.run(longer) == 128
    press(engine, clock, "x")
    assert stored(engine, longer) == 192
    clock.passes(600.0)
    press(engine, clock, "y")
    assert stored(engine, longer) == 0


def test_a_pin_of_no_time_ends_the_pin(start: Start) -> None:
    engine = start()
    pins = engine.store.catalog.tiers.timed_pins
    engine.run(turn("a", session_id="s", pin_s=600))
    assert len(pins) == 1
    engine.run(turn("b", session_id="s", pin_s=0))
    assert len(pins) == 0


def test_a_salt_that_pins_too_much_is_warned_once_and_another_may_pin(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.heterocache").propagate = True
    engine = start(dram_bytes=DRAM_BYTES)
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            request = turn(f"e{number}", 64, seed=number, session_id=str(number), pin_s=60)
            request.cache_salt = "eve"
            engine.run(request)
    (line,) = [x.message for x in caplog.records if "pin_s" in x.message]
    assert PinRefusal.TENANT_FULL.value in line
    pins = engine.store.catalog.tiers.timed_pins
    eves = pins.size_bytes
    assert 0 < eves <= DRAM_BYTES / 4
    engine.run(turn("a", 64, seed=77, session_id="a", cache_salt="ann", pin_s=60))
    assert pins.size_bytes > eves


def test_what_only_a_request_with_a_ttl_stored_is_gone_afterwards(start: Start) -> None:
    engine = start(clock=(clock := Clock()))
    trunk = turn("t", 128)
    engine.run(trunk)
    mine = FakeRequest("m", trunk.all_token_ids + tokens(100, 5))
    mine.kv_transfer_params = {"heterocache": {"ttl_s": 30}}
    engine.run(mine)
    assert stored_chunks(engine, mine) == 3
    clock.passes(29.0)
    engine.run(turn("other", 64, seed=50))
    assert stored_chunks(engine, mine) == 3
    clock.passes(2.0)
    again = FakeRequest("n", [*mine.all_token_ids, 1])
    assert engine.admit(again) == 128
    engine.finish(again)
    assert stored_chunks(engine, mine) == 2
    assert stored_chunks(engine, trunk) == 2


def stored_chunks(engine: Engine, request: FakeRequest) -> int:
    """Count the stored full chunks without asking as a request."""
    return len(engine.store.match(chain(engine, request)))


def test_what_another_request_uses_outlives_the_ttl(start: Start) -> None:
    engine = start(clock=(clock := Clock()))
    mine = turn("m", 192, ttl_s=30)
    engine.run(mine)
    other = FakeRequest("o", [*mine.all_token_ids[:128], *tokens(64, 3)])
    assert engine.run(other) == 128
    clock.passes(100.0)
    engine.run(turn("late", 64, seed=50))
    assert stored_chunks(engine, other) == 3
    assert stored_chunks(engine, mine) == 2


def test_a_ttl_holds_although_the_session_ends(start: Start) -> None:
    engine = start(clock=(clock := Clock()))
    first = turn("1", 128, session_id="s", ttl_s=30)
    engine.run(first)
    last = FakeRequest("2", first.all_token_ids + tokens(64, 5), session_id="s")
    last.kv_transfer_params = {"heterocache": {"ttl_s": 30, "end_session": True}}
    engine.run(last)
    assert stored_chunks(engine, last) == 3
    for number in range(2):  # a chunk that another follows is looked at again a second later
        clock.passes(31.0)
        engine.run(turn(f"late{number}", 64, seed=50))
    assert stored_chunks(engine, last) == 0


def test_a_long_prompt_is_not_kept_by_who_comes_while_it_is_being_forgotten(start: Start) -> None:
    engine = start(dram_bytes=8 << 20, clock=(clock := Clock()))
    mine = turn("m", 64 * 200, ttl_s=30)
    engine.run(mine)
    assert stored_chunks(engine, mine) == 200
    clock.passes(31.0)
    again = FakeRequest("n", [*mine.all_token_ids, 1])
    again.kv_transfer_params = {"heterocache": {"no_store": True}}
    engine.admit(again)
    engine.finish(again)
    clock.passes(61.0)
    for number in range(4):
        engine.run(turn(f"late{number}", 64, seed=50 + number))
    assert stored_chunks(engine, mine) == 0


def test_what_found_no_room_has_no_ttl_when_another_request_stores_it(start: Start) -> None:
    engine = start(dram_bytes=DRAM_BYTES, clock=(clock := Clock()))
    mine, blocker = turn("m", 64, ttl_s=30), turn("b", 2000, seed=9)
    engine.admit(blocker)
    under_way = engine.order(b=2000)  # all slots are taken by saves that are not sealed
    engine.admit(mine)
    engine.step(m=64)
    engine.report(under_way)
    engine.finish(blocker)
    engine.run(turn("other", 64))
    assert stored_chunks(engine, mine) == 1
    engine.finish(mine)
    for number in range(3):
        clock.passes(100.0)
        engine.run(turn(f"late{number}", 64, seed=50))
    assert stored_chunks(engine, mine) == 1


def test_state_of_low_priority_leaves_first_and_of_high_priority_last(start: Start) -> None:
    def left_of(**kinds: str) -> dict[str, int]:
        """Return what is left of three prompts, the last stored first, after some pressure."""
        engine = start(dram_bytes=200_000, clock=(clock := Clock()))
        requests = {}
        for seed, (name, kind) in enumerate(kinds.items()):
            requests[name] = turn(name, 128, seed=seed, priority=kind)
            engine.run(requests[name])
        clock.passes(120.0)  # no session protects its chain any more
        left = before = {name: stored_chunks(engine, x) for name, x in requests.items()}
        for seed in range(200, 250):
            if left != before:
                break
            engine.run(turn(f"x{seed}", 64, seed=seed))
            left = {name: stored_chunks(engine, x) for name, x in requests.items()}
        return left

    assert left_of(old="normal", low="low", new="normal") == {"old": 2, "low": 1, "new": 2}
    found = left_of(old="high", mid="normal", new="normal")
    assert found["old"] == 2
    assert found["mid"] == 1


def test_an_ended_session_frees_its_pin_and_leaves_first_but_not_what_others_share(
    start: Start,
) -> None:
    engine = start(clock=(clock := Clock()))
    book = engine.side._sessions.book
    one = turn("1", 128, session_id="one", pin_s=600)
    engine.run(one)
    other = FakeRequest("2", one.all_token_ids + tokens(64, 2), session_id="other")
    engine.run(other)
    last = FakeRequest("3", one.all_token_ids + tokens(128, 3), session_id="one")
    last.kv_transfer_params = {"heterocache": {"end_session": True}}
    engine.run(last)
    assert len(engine.store.catalog.tiers.timed_pins) == 0
    assert book.find(session_key(None, "one")) is None
    assert book.find(session_key(None, "other")) is not None
    clock.passes(2.0)
    engine.run(turn("4", 64, seed=50))
    first = engine.store.catalog.tiers.evict_first
    ends = {a.node.chunk.end for place in first._places.values() for a in place}
    assert ends == {192, 256}, "only what follows the shared chunks"


def test_a_fork_keeps_the_parents_chain_although_the_parent_ends(start: Start) -> None:
    engine = start(dram_bytes=200_000, clock=(clock := Clock()))
    parent = turn("p", 128, session_id="p")
    engine.run(parent)
    child = FakeRequest("c", parent.all_token_ids + tokens(64, 4), session_id="c")
    child.kv_transfer_params = {"heterocache": {"fork": "p"}}
    assert engine.admit(child) == 128
    end = FakeRequest("e", [*parent.all_token_ids, 1], session_id="p")
    end.kv_transfer_params = {"heterocache": {"end_session": True}}
    engine.run(end)
    press(engine, clock, "x")
    assert stored_chunks(engine, parent) == 2
    engine.step(c=64)
    engine.finish(child)
    record = engine.side._sessions.book.find(session_key(None, "c"))
    assert record is not None
    assert record.parent == session_key(None, "p")


def test_a_fork_of_another_salts_session_gets_nothing_of_it(start: Start) -> None:
    engine = start()
    engine.run(turn("p", session_id="p", cache_salt="ann"))
    engine.run(turn("c", session_id="c", cache_salt="eve", fork="p"))
    record = engine.side._sessions.book.find(session_key("eve", "c"))
    assert record is not None
    assert record.parent is None


@settings(max_examples=60, deadline=None)
@given(json_params)
def test_no_parameters_raise_or_change_what_another_request_has(params: object) -> None:
    engine = Engine(MODEL)
    try:
        mine = turn("m", session_id="s", cache_salt="ann", pin_s=60)
        engine.run(mine)
        before = {a.id: a.dram for a in engine.store.catalog.tiers.index.artifacts()}
        for number in range(2):
            hostile = FakeRequest(f"h{number}", tokens(200), cache_salt="eve")
            hostile.kv_transfer_params = params
            engine.run(hostile)
            near = FakeRequest(f"n{number}", [*mine.all_token_ids, 7], cache_salt="ann")
            near.kv_transfer_params = params
            engine.admit(near)
            engine.finish(near)
        after = {a.id: a.dram for a in engine.store.catalog.tiers.index.artifacts()}
        assert before.items() <= after.items()
        assert stored(engine, mine) == 192
        engine.store.check_integrity()
    finally:
        engine.side.close()
