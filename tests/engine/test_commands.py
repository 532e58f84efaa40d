"""Commands at a running engine: they do what they say, or change nothing and say why."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from hetero_connector.artifacts.record import ArtifactId, ChunkKey, Tier
from hetero_connector.engine.api import command_routes
from hetero_connector.engine.scheduler import commands as module
from hetero_connector.engine.scheduler import session_book
from hetero_connector.engine.scheduler.block_events import EventGroup
from hetero_connector.engine.scheduler.clearings import Clearings
from hetero_connector.engine.scheduler.commands import pack_tokens
from hetero_connector.engine.scheduler.idle_steps import IdleSteps, Loop
from hetero_connector.engine.scheduler.session_book import PromptName, SessionBook
from hetero_connector.engine.scheduler.status_socket import ask
from hetero_connector.engine.scheduler.step_calls import StepCalls
from hetero_connector.errors import CommandError, StoreError
from hetero_connector.session_ids import session_key
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.tools import engines as tools
from tests.clock import Clock
from tests.engine.fakes import HYBRID, FakeRequest
from tests.engine.stepped import CHUNK, Engine, tokens
from tests.interleaving import try_every_switch
from tests.waiting import until

Start = Callable[..., Engine]
DRAM_BYTES = 100_000
"""Room for a few hundred tokens."""


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def start(model: ModelSpec = HYBRID, **options: Any) -> Engine:
        engines.append(Engine(model, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.store.check_integrity()
        engine.side.close()


def do(engine: Engine, name: str, **arguments: Any) -> dict[str, Any]:
    """Carry out a command on a thread of its own while the engine steps, as a client's thread."""
    command = engine.side.commands.by_name()[name]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(command, arguments)

        def is_done() -> bool:
            if engine.side.has_work and not future.done():
                engine.step()
            return future.done()

        until(is_done, f"{name} is done")
        return future.result()


def turn(name: str, count: int = 200, seed: int = 0, **request: Any) -> FakeRequest:
    return FakeRequest(name, tokens(count, seed), **request)


def stored(engine: Engine, request: FakeRequest) -> int:
    """Return the tokens that a new request with the same prompt would restore."""
    again = FakeRequest(
        f"{request.request_id}?", [*request.all_token_ids, 1], cache_salt=request.cache_salt
    )
    found = engine.answered(again)
    engine.finish(again)
    return found


def test_clearing_everything_is_a_reset_and_empties_the_engines_own_cache(start: Start) -> None:
    engine = start()
    first = turn("a", session_id="s")
    engine.run(first)
    before = engine.store.generation
    assert stored(engine, first)
    answer = do(engine, "clear", all=True)
    assert answer == {"cleared": "all", "kept": True, "pages": True}
    assert engine.tables.resets == 1
    assert engine.store.generation.tag != before.tag
    assert stored(engine, first) == 0
    assert engine.run(turn("b")) == 0
    assert stored(engine, first), "it is stored again"


def test_a_cleared_session_leaves_what_others_share_with_it(start: Start) -> None:
    engine = start()
    shared = tokens(128, seed=1)
    one = FakeRequest("1", shared + tokens(128, seed=2), session_id="one")
    other = FakeRequest("2", shared + tokens(128, seed=3), session_id="other")
    engine.run(one)
    engine.run(FakeRequest("1b", one.all_token_ids + tokens(100, seed=4), session_id="one"))
    engine.run(other)
    answer = do(engine, "clear", session="one")
    assert answer["chunks"] >= 4
    assert stored(engine, one) == 128
    assert stored(engine, other) == 256
    with pytest.raises(CommandError, match="no such session"):
        do(engine, "clear", session="one")


def test_a_turn_that_begins_while_its_session_is_cleared_starts_a_session_anew(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine steps between the command's parts. Its own cache is emptied after the store."""
    engine = start()
    first = turn("a", session_id="s")
    engine.run(first)
    later = FakeRequest("b", [*first.all_token_ids, *tokens(40, 1)], session_id="s")
    forget, resets = engine.store.forget_session, list[int]()

    def forget_late(session: Hashable, leaves: Sequence[ChunkKey]) -> int:
        resets.append(engine.tables.resets)
        engine.admit(later)
        engine.step(b=8)
        return forget(session, leaves)

    monkeypatch.setattr(engine.store, "forget_session", forget_late)
    assert do(engine, "clear", session="s")["pages"]
    assert (resets, engine.tables.resets) == ([0], 1)
    with pytest.raises(CommandError, match="a turn of the session is running"):
        do(engine, "clear", session="s")
    engine.finish(later)


def test_a_cleared_session_is_out_of_the_journal_before_the_answer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_forget, forget = threading.Event(), Journal.forget

    def late(journal: Journal, ids: Iterable[ArtifactId]) -> None:
        assert may_forget.wait(60)
        forget(journal, ids)

    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    engine.run(turn("a", session_id="s"))
    assert engine.store.flush(60)
    assert rows_in_journal(engine) > 3
    monkeypatch.setattr(Journal, "forget", late)
    threading.Timer(0.3, may_forget.set).start()  # an answer that waits for nothing comes before
    answer = do(engine, "clear", session="s")
    assert answer == {"cleared": "session", "chunks": 3, "pages": True, "kept": True}
    assert rows_in_journal(engine) == 0


def rows_in_journal(engine: Engine) -> int:
    assert engine.store.folder is not None
    journal = Journal.open_copy(engine.store.folder / "journal.sqlite")
    try:
        return journal.count()
    finally:
        journal.close()


def test_a_session_is_cleared_though_the_journal_does_not_take_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_JOURNAL_S", 0.05)
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    request = turn("a", session_id="s")
    engine.run(request)
    assert engine.store.flush(60)

    def full(*_: object) -> None:
        raise StoreError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "forget", full)
        answer = do(engine, "clear", session="s")
    assert answer["kept"] is False
    assert f"the journal of {engine.store.folder}" in answer["reason"]
    assert stored(engine, request) == 0
    until(lambda: rows_in_journal(engine) == 0)


@pytest.mark.parametrize("turns", [3, 40])
@pytest.mark.parametrize("rewrites", [False, True])
def test_a_cleared_session_of_many_turns_leaves_nothing(
    start: Start, turns: int, rewrites: bool
) -> None:
    """Each turn's last chunk is short; the next turn goes on before it, or rewrites some more."""
    engine = start(dram_bytes=8 << 20)
    prompt = tokens(80)
    for number in range(turns):
        engine.run(FakeRequest(f"r{number}", list(prompt), session_id="s"))
        kept = len(prompt) - 70 * (rewrites and number % 3 == 2)
        prompt = prompt[:kept] + tokens(80, seed=1000 + number)
    engine.admit(FakeRequest("aborted", list(prompt), session_id="s"))
    engine.finish(engine.requests["aborted"])
    assert len(list(engine.store.catalog.tiers.index.artifacts())) > turns
    do(engine, "clear", session="s")
    assert not list(engine.store.catalog.tiers.index.artifacts())


def test_a_session_is_named_by_its_id_and_salt_or_by_its_digest(start: Start) -> None:
    engine = start()
    request = turn("1", session_id="s", cache_salt="t")
    engine.run(request)
    with pytest.raises(CommandError, match="with its salt"):
        do(engine, "clear", session="s")
    assert stored(engine, request)
    digest = session_key("t", "s").hex()
    with pytest.raises(CommandError, match="at least 16 characters"):
        do(engine, "clear", session=digest[:15])
    do(engine, "clear", session=digest[:16])
    assert stored(engine, request) == 0
    engine.run(turn("2", session_id="s", cache_salt="t"))
    do(engine, "clear", session="s", salt="t")
    assert stored(engine, request) == 0


def test_a_session_with_a_running_turn_is_not_cleared(start: Start) -> None:
    engine = start()
    request = turn("1", session_id="s")
    engine.admit(request)
    with pytest.raises(CommandError, match="running"):
        do(engine, "clear", session="s")
    engine.finish(request)


def test_nothing_is_found_under_a_cleared_salt_and_other_salts_keep_theirs(
    start: Start, tmp_path: Path
) -> None:
    engine = start()
    engine.side.commands.clearings = Clearings(tmp_path / "cleared.json")
    mine, other, plain = turn("m", cache_salt="m"), turn("o", cache_salt="o"), turn("p")
    for request in (mine, other, plain):
        engine.run(request)
        assert stored(engine, request)
    answer = do(engine, "clear", salt="m")
    assert answer["chunks"] >= 3
    assert stored(engine, mine) == 0
    assert stored(engine, other)
    assert stored(engine, plain)
    engine.run(turn("m2", cache_salt="m"))
    assert stored(engine, mine), "what comes later is stored"
    reopened = Clearings(tmp_path / "cleared.json")
    assert (reopened.of_salt("m"), reopened.of_salt("o")) == (1, 0)
    assert "m" not in json.loads((tmp_path / "cleared.json").read_text()), "a digest names it"


def test_pages_of_a_cleared_salt_are_not_stored_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests run vLLM keeps its pages, and new requests of the salt hit them."""
    engine = start()

    def saved_after_a_local_hit(name: str, **request: Any) -> int:
        hit = turn(name, **request)
        engine.admit(hit, local=CHUNK)
        saves = engine.step(**{name: 200 - CHUNK}).saves
        engine.finish(hit)
        engine.step()
        return len(saves)

    engine.tables.prefixes = {b"a page": 1}
    monkeypatch.setattr(engine.tables, "reset_prefix_cache", lambda: False)
    assert saved_after_a_local_hit("before", cache_salt="m")
    assert not do(engine, "clear", salt="m")["pages"]
    assert not saved_after_a_local_hit("again", cache_salt="m")
    assert saved_after_a_local_hit("other", cache_salt="o")
    engine.run(turn("computed", seed=3, cache_salt="m"))
    assert stored(engine, turn("computed", seed=3, cache_salt="m")), "no page of it is old"
    engine.side.commands.model_names = frozenset({"base"})
    assert not do(engine, "clear", model="base")["pages"]
    assert not saved_after_a_local_hit("plain", seed=4)
    engine.tables.prefixes = {}
    assert saved_after_a_local_hit("later", cache_salt="m", seed=5)


def adapter(folder: Path, name: str) -> LoRARequest:
    """Return an adapter whose file has its name as content."""
    path = folder / name
    path.mkdir()
    (path / "adapter_model.safetensors").write_text(name[:1])
    return LoRARequest(name, ord(name[-1]), str(path))


def test_a_cleared_adapter_leaves_the_model_and_other_adapters_theirs(
    start: Start, tmp_path: Path
) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    engine.side.commands.model_names = frozenset({"base"})
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "b")
    requests = {
        name: turn(name, lora_request=lora)
        for name, lora in (("a", a), ("b", b), ("a2", adapter(tmp_path, "a2")), ("base", None))
    }

    def restored(*names: str) -> list[int]:
        return [
            engine.run(turn(f"{name}?", lora_request=requests[name].lora_request)) for name in names
        ]

    assert restored("a", "b", "base") == [0, 0, 0]
    assert restored("a", "b", "base", "a2") == [192] * 4, "a2 has the content of a"
    engine.side.commands.model_names = frozenset({"base"})
    answer = do(engine, "clear", model="a")
    assert (answer["cleared"], answer["known"], answer["pages"]) == ("model", True, True)
    assert restored("a", "b", "base") == [0, 192, 192]
    assert restored("a", "a") == [192, 192], "what comes later is stored"
    do(engine, "clear", model="base")
    assert restored("base", "a", "b") == [0, 192, 192]
    assert do(engine, "clear", model="c")["known"] is False
    assert restored("base", "a", "b") == [192] * 3
    assert Clearings.in_folder(engine.store.folder).of_model("a") == 1


def test_clearing_the_model_frees_its_sessions_and_prompts_and_no_adapters(
    start: Start, tmp_path: Path
) -> None:
    engine = start()
    engine.side.commands.model_names = frozenset({"base"})
    lora = adapter(tmp_path, "a")
    mine, shared = turn("m", 128, seed=1, session_id="m"), turn("s", 128, seed=2, session_id="s")
    for request in (mine, shared):
        engine.run(request)
    engine.run(turn("s2", 128, seed=3, session_id="s", lora_request=lora))
    pins = engine.store.catalog.tiers.timed_pins
    do(engine, "pin", tokens=pack_tokens(mine.all_token_ids))
    do(engine, "pin", session="s")
    assert do(engine, "clear", model="base")["chunks"] == 2, "the other session has both models"
    assert len(pins) == 1
    assert [stored(engine, x) for x in (mine, shared)] == [0, 0]
    assert engine.run(turn("s3", 128, seed=3, lora_request=lora)) > 0


def test_a_running_request_of_a_cleared_salt_saves_nothing_of_its_old_pages(start: Start) -> None:
    engine = start()
    running = turn("r", cache_salt="m")
    engine.admit(running)
    engine.step(r=128)
    do(engine, "clear", salt="m")
    engine.step(r=72)
    engine.finish(running)
    engine.step()
    assert stored(engine, running) == 0


def test_what_was_cleared_of_a_session_is_withdrawn_from_routers(start: Start) -> None:
    engine = start(event_group=EventGroup(0, "full_attention", 16, 16))
    engine.run(turn("1", count=128, session_id="s"))
    engine.side.take_events()
    do(engine, "clear", session="s")
    removed = [h for event in engine.side.take_events() for h in event.block_hashes]
    assert len(removed) == 8, "each block of the prompt"


def test_warming_stages_a_prompt_from_ssd(start: Start, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    request = turn("a", count=256)
    engine.run(request)
    assert engine.store.flush(10)
    engine.store.leave_to_ssd()
    ids = pack_tokens(request.all_token_ids)
    answer = do(engine, "warm", tokens=ids)
    assert answer == {"tokens": 256, "stored_tokens": 256, "dram_tokens": 256}
    chain = engine.side.commands._new_chain(None)
    chain.extend(request.all_token_ids)
    found = engine.store.match(chain.chunks())
    assert {x.tiers[StateType.DENSE_KV] for x in found} == {Tier.DRAM}
    assert found[-1].tiers[StateType.WINDOW_SWA] is Tier.DRAM, "its checkpoint"
    assert found[0].tiers[StateType.WINDOW_SWA] is Tier.SSD, "a restore does not need it"
    unknown = do(engine, "warm", tokens=pack_tokens([5] * 300))
    assert (unknown["stored_tokens"], unknown["dram_tokens"]) == (0, 0)
    assert do(engine, "warm", tokens=ids, salt="x")["stored_tokens"] == 0


def test_a_prompt_that_was_warmed_is_expected_until_its_salt_is_cleared(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetero_connector.engine.scheduler import session_book

    monkeypatch.setattr(session_book, "_CAPACITY", 1)  # the first prompt's session is not known
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    prefetched = engine.store.catalog.tiers.prefetched
    prompts = {salt: turn(salt, count=128, cache_salt=salt) for salt in ("m", "o")}
    for request in prompts.values():
        engine.run(request)
    assert engine.store.flush(10)
    engine.store.leave_to_ssd()
    for salt, request in prompts.items():
        ids = pack_tokens(request.all_token_ids)
        assert do(engine, "warm", tokens=ids, salt=salt)["dram_tokens"] == 128
    per_prompt = len(prefetched) // 2
    do(engine, "clear", salt="m")
    until(lambda: len(prefetched) == per_prompt)


def test_a_prompt_that_was_warmed_leaves_late(start: Start) -> None:
    clock = Clock()
    engine = start(dram_bytes=DRAM_BYTES, clock=clock)
    warmed, other = turn("w", 128, seed=1, cache_salt="w"), turn("o", 128, seed=2)
    for request in (warmed, other):
        engine.run(request)
    ids = pack_tokens(warmed.all_token_ids)
    assert do(engine, "warm", tokens=ids, salt="w", keep_s=3600.0)["dram_tokens"] == 128

    def fill_while_time_passes() -> None:
        for number in range(12):
            clock.passes(61.0)  # sessions whose think time is unknown are expected for a minute
            engine.run(turn(f"x{number}", seed=100 + number))

    fill_while_time_passes()
    assert (stored(engine, warmed), stored(engine, other)) == (128, 0)
    do(engine, "clear", salt="w")
    users = engine.store.catalog.users.names_where(lambda *_: True)
    assert not any(isinstance(user, PromptName) for user in users)


def test_a_prompt_that_was_warmed_leaves_as_others_when_its_time_is_over(start: Start) -> None:
    clock = Clock()
    engine = start(dram_bytes=DRAM_BYTES, clock=clock)
    warmed = turn("w", 128, seed=1)
    engine.run(warmed)
    do(engine, "warm", tokens=pack_tokens(warmed.all_token_ids), keep_s=60.0)
    clock.passes(61.0)
    fill(engine, "x")
    assert stored(engine, warmed) == 0


@pytest.mark.parametrize("count", [48, 240])
def test_warming_counts_the_short_end_of_a_prompt(start: Start, tmp_path: Path, count: int) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    request = turn("a", count=count)
    engine.run(request)
    assert engine.store.flush(10)
    engine.store.leave_to_ssd()
    ids = pack_tokens([*request.all_token_ids, 1, 2, 3])
    answer = do(engine, "warm", tokens=ids)
    assert answer == {"tokens": count + 3, "stored_tokens": count, "dram_tokens": count}


def test_a_draining_engine_stores_nothing_new_and_has_written_all(
    start: Start, tmp_path: Path
) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22, spill_delay_s=3600.0)
    first, second = turn("a", count=128), turn("b", count=128, seed=2)
    engine.run(first)
    assert do(engine, "drain") == {"draining": True, "written": True}
    ssd = engine.store.occupancy()[1]
    assert ssd.artifacts == {StateType.DENSE_KV: 2, StateType.WINDOW_SWA: 2}
    engine.run(second)
    assert stored(engine, second) == 0
    assert stored(engine, first) == 128, "it is still restored"
    do(engine, "drain", resume=True)
    engine.run(FakeRequest("c", second.all_token_ids))
    assert stored(engine, second) == 128


def test_draining_waits_for_the_end_of_a_prompt_that_is_being_copied(
    start: Start, tmp_path: Path
) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22, spill_delay_s=3600.0)
    request = turn("a", count=150)
    engine.admit(request)
    engine.step(a=150)
    engine.finish(request)  # its last chunk is reserved, and no worker has copied it
    drain = engine.side.commands.drain
    assert drain({"wait_s": 0.05}) == {"draining": True, "written": False}
    assert do(engine, "drain") == {"draining": True, "written": True}
    assert engine.store.occupancy()[1].artifacts[StateType.DENSE_KV] == 3


def test_draining_says_what_the_ssd_has_no_room_for(start: Start, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22, ssd_write_bytes_per_day=1)
    engine.run(turn("a", count=256))
    answer = do(engine, "drain")
    artifacts = sum(engine.store.occupancy()[0].artifacts.values())
    assert (answer["draining"], answer["written"]) == (True, False)
    assert answer["unwritten"] == artifacts > 0
    assert f"{artifacts} artifacts are in DRAM alone" in answer["reason"]
    assert "ssd_write_gib_per_day" in answer["reason"]


def test_an_engine_that_makes_no_checksums_refuses_to_scrub(start: Start) -> None:
    engine = start()
    with pytest.raises(CommandError, match="makes no checksums"):
        do(engine, "scrub")
    assert engine.store.scrubber.progress is None
    assert do(start(verify="all"), "scrub")["scrub"]["state"] in ("running", "complete")


def test_an_engine_without_ssd_says_that_draining_writes_nothing(start: Start) -> None:
    with pytest.raises(CommandError, match="no ssd_dir"):
        do(start(), "drain")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("clear", {}, "say what to clear"),
    ("clear", {"all": True, "salt": "x"}, "nothing else"),
    ("clear", {"all": 1}, "true or false"),
    ("clear", {"all": "yes"}, "true or false"),
    ("clear", {"salt": ""}, "1 to"),
    ("clear", {"salt": 7}, "text"),
    ("clear", {"salt": "x" * 5000}, "text"),
    ("clear", {"session": ["s"]}, "text"),
    ("clear", {"model": "m", "salt": "s"}, "nothing else"),
    ("clear", {"model": "m", "all": True}, "nothing else"),
    ("clear", {"model": ""}, "1 to"),
    ("clear", {"sesion": "s"}, "unknown argument sesion"),
    ("clear", {"all": True, "x" * 9000: 1}, "unknown argument"),
    ("warm", {}, "token ids"),
    ("warm", {"tokens": []}, "token ids"),
    ("warm", {"tokens": "AAA"}, "token ids"),
    ("warm", {"tokens": "AAAAAAA="}, "token ids"),
    ("warm", {"tokens": "\u00e9"}, "token ids"),
    ("warm", {"tokens": pack_tokens([1]), "keep_s": -1}, "seconds"),
    ("warm", {"tokens": pack_tokens([1]), "wait_s": float("nan")}, "seconds"),
    ("warm", {"tokens": pack_tokens([1]), "wait_s": True}, "seconds"),
    ("drain", {"wait_s": 1e9}, "seconds"),
    ("scrub", {"mib_per_s": "fast"}, "MiB per second"),
    ("scrub", {"mib_per_s": float("inf")}, "MiB per second"),
    ("scrub", {"stop": "yes"}, "true or false"),
    ("scrub", {"rate": 1}, "unknown argument rate"),
]


@pytest.mark.parametrize(("name", "arguments", "problem"), BAD)
def test_a_malformed_command_changes_nothing(
    start: Start, name: str, arguments: dict[str, Any], problem: str
) -> None:
    engine = start()
    request = turn("a")
    engine.run(request)
    with pytest.raises(CommandError, match=problem):
        do(engine, name, **arguments)
    assert stored(engine, request)
    assert not engine.side.commands.is_draining


def test_token_ids_that_are_none_are_refused() -> None:
    for wrong in ([-1], [1 << 32], ["a"], [None]):
        with pytest.raises(ValueError, match="integers"):
            pack_tokens(wrong)  # type: ignore[arg-type]


def test_a_command_that_no_step_has_taken_is_never_carried_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP_S", 0.05)
    engine = start()
    request = turn("a")
    engine.run(request)
    with pytest.raises(CommandError, match="not carried out"):
        engine.side.commands.clear({"all": True})
    engine.step()
    assert stored(engine, request)
    assert not engine.side.has_work


def test_a_session_is_not_cleared_while_the_engine_does_not_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    request = turn("a", session_id="s")
    engine.run(request)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_STEP_S", 0.05)
        with pytest.raises(CommandError, match="not carried out"):
            engine.side.commands.clear({"session": "s"})
    engine.step()
    assert stored(engine, request)
    assert do(engine, "clear", session="s")["chunks"] == 3


def test_a_session_is_cleared_before_clients_give_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two steps of the engine have one deadline."""
    engine, clock = start(), Clock()
    engine.run(turn("a", session_id="s"))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    waits, call = list[float](), engine.side.commands.steps.call

    def late(function: Callable[[], Any], timeout_s: float) -> Any:
        waits.append(timeout_s)
        clock.passes(timeout_s - 1.0)
        return call(function, 60)

    monkeypatch.setattr(engine.side.commands.steps, "call", late)
    assert do(engine, "clear", session="s")["chunks"] == 3
    assert waits == [module._STEP_S, 1.0]
    assert min(tools._PATIENCE_S, command_routes._MARGIN_S) > module._STEP_S + module._JOURNAL_S


@pytest.mark.parametrize("name", ["salt", "model"])
def test_a_clearing_that_no_step_has_taken_is_carried_out_by_the_next(
    start: Start, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The store forgets at once, and pages that vLLM still has are not stored later."""
    monkeypatch.setattr(module, "_STEP_S", 0.05)
    engine = start()
    engine.side.commands.model_names = frozenset({"base"})
    monkeypatch.setattr(engine.tables, "reset_prefix_cache", lambda: False)
    engine.tables.prefixes = {b"a page": 1}
    salt = "m" if name == "salt" else None
    request = turn("a", session_id="s", cache_salt=salt)
    engine.run(request)
    assert stored(engine, request)
    with pytest.raises(CommandError, match=r"half carried out.*next step: the engine has not"):
        engine.side.commands.clear({name: "m" if name == "salt" else "base"})
    assert stored(engine, request) == 0
    assert not list(engine.store.catalog.tiers.index.artifacts())
    assert not engine.side.has_work, "a sleeping engine must not step for it"
    engine.step()
    hit = turn("b", cache_salt=salt)
    engine.admit(hit, local=CHUNK)
    assert not engine.step(b=200 - CHUNK).saves
    engine.finish(hit)
    engine.step()


def test_an_idle_engine_is_woken_and_a_sleeping_one_is_not() -> None:
    idle = IdleSteps(lambda: False)
    calls = StepCalls(idle.request_step)
    asleep, woken = [False], threading.Event()
    idle.start(Loop(woken.set, lambda: asleep[0]))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(calls.call, lambda: 7, 10)
        assert woken.wait(60)
        assert idle.is_due
        assert calls.has_any
        calls.run()
        assert future.result() == 7
    asleep[0] = True
    with pytest.raises(CommandError, match="wake_up"):
        calls.call(lambda: 8, 10)
    assert not calls.has_any
    idle.close()


def test_commands_are_refused_while_the_engine_ends() -> None:
    calls = StepCalls(lambda: None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(calls.call, lambda: 7, 10)
        until(lambda: calls.has_any)
        calls.close()
        with pytest.raises(CommandError, match="is ending"):
            waiting.result()
    with pytest.raises(CommandError, match="is ending"):
        calls.call(lambda: 7, 10)


def test_a_call_that_fails_fails_its_caller_alone() -> None:
    calls = StepCalls(lambda: None)
    with ThreadPoolExecutor(2) as pool:
        bad, good = pool.submit(calls.call, lambda: 1 // 0, 10), pool.submit(calls.call, dict, 10)

        def are_done() -> bool:
            calls.run()
            return bad.done() and good.done()

        until(are_done)
        assert isinstance(bad.exception(), ZeroDivisionError)
        assert good.result() == {}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"zz": 1}', '{"ab": -1}', '{"ab": "1"}'])
def test_a_damaged_list_of_cleared_salts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cleared.json"
    path.write_text(content)
    with pytest.raises(StoreError, match="which salts were cleared"):
        Clearings(path)


def test_a_pipe_in_place_of_the_list_of_cleared_salts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cleared.json"
    os.mkfifo(path)
    with pytest.raises(StoreError, match="which salts were cleared"):
        Clearings(path)


def test_a_salt_or_an_adapter_is_cleared_though_the_disk_does_not_take_it(
    start: Start, tmp_path: Path
) -> None:
    engine = start()
    path = tmp_path / "gone" / "cleared.json"
    engine.side.commands.clearings = Clearings(path)
    mine, plain = turn("m", cache_salt="m"), turn("p", seed=2)
    adapted = turn("a", lora_request=adapter(tmp_path, "a"))
    for request in (mine, plain, adapted):
        engine.run(request)
    answer = do(engine, "clear", salt="m")
    assert answer["kept"] is False
    assert f"{path} cannot be written" in answer["reason"]
    assert do(engine, "clear", model="a")["kept"] is False
    assert stored(engine, mine) == 0
    assert engine.run(turn("a2", lora_request=adapted.lora_request)) == 0
    assert stored(engine, plain)
    path.parent.mkdir()
    assert do(engine, "clear", salt="o")["kept"] is True
    assert Clearings(path).of_salt("m"), "the disk has all of them now"


def test_what_was_stored_after_a_clearing_that_was_not_kept_is_cleared_by_a_later_engine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gone" / "cleared.json"
    first = Clearings(path)
    first.count_salt("m")
    names = {first.of_salt("m")}
    path.parent.mkdir()
    later = Clearings(path)
    assert later.of_salt("m") == 0
    for _ in range(3):
        later.count_salt("m")
        names.add(later.of_salt("m"))
    assert len(names) == 4, "no name comes again"


def test_the_status_says_where_sessions_are_and_not_who_they_are(
    start: Start, tmp_path: Path
) -> None:
    engine = start(ssd_dir=tmp_path, ssd_bytes=1 << 22)
    engine.run(turn("1", count=256, session_id="mine", cache_salt="secret"))
    assert engine.store.flush(10)
    engine.store.leave_to_ssd()
    engine.run(turn("2", count=128, seed=2, session_id="other"))
    engine.admit(turn("3", count=128, seed=3, session_id="third"))
    path = tmp_path / "socket"
    engine.side.serve_status(
        path, {"model": "m", "served_as": "m"}, lambda: pytest.fail("costs were not asked")
    )
    answer = ask(path, {"get": "sessions"})
    third, other, mine = answer["sessions"]
    assert mine["session"] == session_key("secret", "mine").hex()
    assert (mine["resumable_tokens"], mine["chunks_by_tier"]) == (256, {"dram": 0, "ssd": 4})
    assert (other["resumable_tokens"], other["chunks_by_tier"]) == (128, {"dram": 2, "ssd": 0})
    assert (third["is_running"], other["is_running"]) == (True, False)
    assert "secret" not in json.dumps(answer)
    assert "unknown argument" in ask(path, {"do": "clear", "sesion": "x"})["error"]
    engine.finish(engine.requests["3"])


def test_the_book_keeps_the_newest_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_book, "_CAPACITY", 3)
    book = SessionBook()
    for session in (1, 2, 3, 1, 4):
        book.on_turn_start(session, b"")
    assert [session for session, _ in book.newest()] == [4, 1, 3]
    record = book.find(1)
    assert record is not None
    assert record.turns == 2
    book.on_turn_end(2, (), 5, None)
    assert book.find(2) is None


def test_a_session_that_is_cleared_while_its_turn_is_noted_is_gone_or_noted_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_book, "_CAPACITY", 1)

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        book = SessionBook()
        book.on_turn_start(1, b"")

        def turn() -> None:
            book.on_turn_end(1, (), 5, None)
            book.on_turn_start(2, b"")
            assert [session for session, _ in book.newest()] in ([2], [])

        return turn, book.clear

    assert try_every_switch(prepare, session_book) > 20

    def prepare_end() -> tuple[Callable[[], object], Callable[[], object]]:
        book = SessionBook()
        book.on_turn_start(1, b"")
        cleared = []

        def clear() -> None:
            book.forget(1)
            cleared.append(1)

        def end() -> None:
            was_cleared = bool(cleared)
            book.on_turn_end(1, (), 5, None)
            assert not (was_cleared and book.find(1))
            cleared_by_now = bool(cleared)
            assert not (cleared_by_now and book.find(1)), "a cleared session is back"

        return end, clear

    assert try_every_switch(prepare_end, session_book) > 5


def fill(engine: Engine, name: str, requests: int = 12) -> None:
    """Store more than DRAM holds."""
    for number in range(requests):
        engine.run(turn(f"{name}{number}", seed=100 + number))


def test_a_pinned_session_or_prompt_survives_pressure_until_it_is_unpinned(start: Start) -> None:
    engine = start(dram_bytes=DRAM_BYTES)
    session, prompt = turn("s", 128, seed=1, session_id="s"), turn("p", 128, seed=2)
    engine.run(session)
    engine.run(prompt)
    packed = pack_tokens(prompt.all_token_ids)
    pins: list[dict[str, Any]] = [{"session": "s"}, {"tokens": packed}]
    for arguments in pins:
        answer = do(engine, "pin", seconds=600.0, **arguments)
        assert answer["pinned_tokens"] == 128
        assert answer["bytes"] > 0
    fill(engine, "x")
    assert stored(engine, session) == stored(engine, prompt) == 128
    for arguments in pins:
        assert do(engine, "unpin", **arguments) == {"unpinned_tokens": 128}
        assert do(engine, "unpin", **arguments) == {"unpinned_tokens": 0}
    engine.store.catalog.users.clear()
    fill(engine, "y")
    assert stored(engine, session) == stored(engine, prompt) == 0


def test_what_cannot_be_pinned_is_refused_with_the_reason(start: Start) -> None:
    engine = start(dram_bytes=DRAM_BYTES)
    engine.run(turn("s", 500, session_id="s"))
    with pytest.raises(CommandError, match="half of a tier"):
        do(engine, "pin", session="s")
    with pytest.raises(CommandError, match="nothing of it is stored"):
        do(engine, "pin", tokens=pack_tokens(tokens(128, seed=9)))
    with pytest.raises(CommandError, match="say what to pin"):
        do(engine, "pin", session="s", tokens=pack_tokens([1]))
    with pytest.raises(CommandError, match="say what to pin"):
        do(engine, "unpin")
    with pytest.raises(CommandError, match="no such session"):
        do(engine, "pin", session="t")


def test_clearing_ends_pins_but_not_those_of_others(start: Start) -> None:
    engine = start()
    request = turn("m", 128, seed=1, session_id="m", cache_salt="m")
    other = turn("o", 128, seed=2, session_id="o")
    pins = engine.store.catalog.tiers.timed_pins
    for clearing in ({"session": "m", "salt": "m"}, {"salt": "m"}, {"all": True}):
        engine.run(other)
        engine.run(request)
        do(engine, "pin", session="m", salt="m")
        do(engine, "pin", session="o")
        assert len(pins) == 2
        do(engine, "clear", **clearing)
        assert len(pins) == ("all" not in clearing)
        assert stored(engine, request) == 0
        assert stored(engine, other) == (0 if "all" in clearing else 128)


def test_a_call_that_runs_longer_than_its_caller_waits_is_answered_at_its_end() -> None:
    begins, ends = threading.Event(), threading.Event()

    def function() -> str:
        begins.set()
        ends.wait(60)
        return "done"

    def has_begun() -> None:
        """Let the caller's time begin when the call runs: else it may be over before."""
        assert begins.wait(60)

    calls = StepCalls(has_begun)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(calls.call, function, 0.1)
        until(lambda: calls.has_any)
        pool.submit(calls.run)
        assert begins.wait(60)
        with pytest.raises(TimeoutError):
            answer.result(0.5)
        is_waiting = not answer.done()
        ends.set()
        assert is_waiting
        assert answer.result(60) == "done"
