"""After a reset or new weights nothing older is restored, or saved as if it were new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.engine.scheduler.chain_root import Cleared
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import CHUNK, Engine, tokens

PROMPT = 2 * CHUNK + 2


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(DENSE)
    yield made
    made.side.close()


def run(engine: Engine, prompt: int = 0) -> int:
    """Run a request and store it; return the tokens that were restored for it."""
    return engine.run(FakeRequest(f"r{len(engine.requests)}", tokens(PROMPT, prompt)))


def hear(engine: Engine, fleet: int) -> None:
    """Reset the fleet: its generation becomes `number`, after one that the engine knows."""
    for number in (fleet - 1, fleet):
        engine.store._generations.note_fleet(number, engine.store.generation)


def test_state_is_found_with_its_own_weights_alone(engine: Engine) -> None:
    run(engine)
    engine.side.root.on_weights_changed("v1")
    assert run(engine) == 0
    assert run(engine) > 0
    engine.side.root.on_weights_changed("v2")
    assert run(engine) == 0
    engine.side.root.on_weights_changed("v1")
    assert run(engine) > 0


def test_what_is_computed_during_an_update_is_never_found(engine: Engine) -> None:
    engine.side.root.on_weights_changed(None)
    assert run(engine) == 0
    engine.side.root.on_weights_changed(None)
    assert run(engine) == 0, "the first step of an update is not the second"
    engine.side.root.on_weights_changed("v1")
    assert run(engine) == 0
    engine.side.root.on_weights_changed("default")
    assert run(engine) == 0


@pytest.mark.parametrize("version", ["v1", None])
def test_a_request_that_runs_across_a_change_is_not_stored(
    engine: Engine, version: str | None
) -> None:
    request = FakeRequest("a", tokens(PROMPT))
    engine.admit(request)
    engine.step(a=CHUNK // 2)
    engine.side.root.on_weights_changed(version)
    assert engine.step(a=PROMPT - CHUNK // 2).saves == []
    engine.finish(request)
    assert engine.step().early_saves == []
    assert run(engine) == 0
    engine.side.root.on_weights_changed("default")
    assert run(engine) == 0


def test_the_same_version_again_changes_nothing(engine: Engine) -> None:
    engine.side.root.on_weights_changed("v1")
    run(engine)
    request = FakeRequest("a", tokens(PROMPT, 1))
    engine.admit(request)
    engine.side.root.on_weights_changed("v1")
    assert engine.step(a=PROMPT).saves
    assert run(engine) > 0


@pytest.mark.parametrize("change", ["reset", "update"])
def test_pages_that_vllm_kept_from_before_are_not_stored(engine: Engine, change: str) -> None:
    """vLLM's own prefix cache is not reset while requests run, nor by itself."""
    engine.tables.prefixes[b"block"] = 1
    if change == "reset":
        engine.side.reset()
    else:
        engine.side.root.on_weights_changed("v1")
    hit = FakeRequest("hit", tokens(PROMPT))
    engine.admit(hit, local=CHUNK)
    assert engine.step(hit=PROMPT - CHUNK).saves == []
    fresh = FakeRequest("fresh", tokens(PROMPT, 1))
    engine.admit(fresh)
    assert engine.step(fresh=PROMPT).saves
    engine.finish(hit)  # until then vLLM may publish what it computes on top of them
    engine.step()
    engine.tables.prefixes.clear()
    again = FakeRequest("again", tokens(PROMPT, 2))
    engine.admit(again, local=CHUNK)
    assert engine.step(again=PROMPT - CHUNK).saves


CHANGES = {
    "reset": lambda engine: engine.side.reset(),
    "fleet": lambda engine: hear(engine, 5),
    "update": lambda engine: engine.side.root.on_weights_changed("v1"),
    "clearing": lambda engine: engine.side.on_cleared(Cleared(model="")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_vllms_own_pages_are_forgotten_at_a_change_while_requests_run(
    engine: Engine, change: str
) -> None:
    """Else what hits them is not stored until vLLM's cache is empty, which may be never."""
    engine.tables.has_partial_hits = False
    engine.tables.prefixes = {b"the first block": 1, b"the last block": 999}
    running = FakeRequest("running", tokens(PROMPT, 3))
    engine.admit(running)
    engine.step(running=9)
    CHANGES[change](engine)
    engine.step()
    assert engine.tables.prefixes == {}
    assert all(published["running"] > 10**6 for published in engine.tables.published)
    hit = FakeRequest("hit", tokens(PROMPT))
    engine.admit(hit, local=CHUNK)
    assert engine.step(hit=PROMPT - CHUNK, running=PROMPT - 9).saves
    assert all("hit" not in published for published in engine.tables.published)
    engine.finish(running)
    assert engine.step().early_saves == []
    assert run(engine, 3) == 0


def test_vllms_own_pages_stay_while_the_version_of_the_weights_is_unknown(engine: Engine) -> None:
    """Any call to the workers may have changed them: a monitor's, say, in each second."""
    engine.tables.has_partial_hits = False
    engine.tables.prefixes = {b"block": 1}
    engine.side.root.on_weights_changed(None)
    assert engine.tables.prefixes == {b"block": 1}
    hit = FakeRequest("hit", tokens(PROMPT))
    engine.admit(hit, local=CHUNK)
    assert engine.step(hit=PROMPT - CHUNK).saves == []


def test_once_vllms_pages_are_forgotten_what_hits_newer_ones_is_stored(engine: Engine) -> None:
    """The weights have no version, and a salt is cleared."""
    engine.tables.has_partial_hits = False
    engine.tables.prefixes = {b"block": 1}
    engine.side.root.on_weights_changed(None)
    engine.side.on_cleared(Cleared(salt="other"))
    engine.tables.prefixes = {b"newer": 2}
    hit = FakeRequest("hit", tokens(PROMPT))
    engine.admit(hit, local=CHUNK)
    assert engine.step(hit=PROMPT - CHUNK).saves


def test_vllm_is_not_asked_to_empty_a_cache_that_requests_use(engine: Engine) -> None:
    engine.tables.has_partial_hits = False
    engine.tables.prefixes, engine.tables.usage = {b"block": 1}, 0.1
    assert engine.side.reset_pages()
    assert (engine.tables.prefixes, engine.tables.resets) == ({}, 0)


def test_a_request_that_was_matched_before_its_step_adopts_a_reset_is_not_stored(
    engine: Engine,
) -> None:
    """vLLM has found its own pages, and asks the connector then."""
    engine.tables.has_partial_hits = False
    engine.tables.usage = 0.1
    hear(engine, 5)
    matched = FakeRequest("matched", tokens(PROMPT))
    engine.admit(matched, local=CHUNK)
    pages = {block for group in engine.tables.ids["matched"] for block in group}
    assert pages <= engine.tables.evicted
    assert all(published["matched"] > 10**6 for published in engine.tables.published)
    assert engine.step(matched=PROMPT - CHUNK).saves == []
    later = FakeRequest("later", tokens(PROMPT))
    engine.admit(later, local=CHUNK)
    assert engine.step(later=PROMPT - CHUNK).saves
    assert all("later" not in published for published in engine.tables.published)


def test_a_hit_that_ends_inside_a_block_is_not_stored_and_a_restore_is(engine: Engine) -> None:
    """vLLM tells `match` whole blocks alone: 0 for a hit inside the first one."""
    engine.tables.prefixes[b"block"] = 1
    engine.side.reset()
    inside = FakeRequest("inside", tokens(PROMPT))
    engine.admit(inside)
    inside.num_computed_tokens = CHUNK // 2
    assert engine.step(inside=PROMPT - CHUNK // 2).saves == []
    engine.finish(inside)
    assert engine.step().early_saves == []
    assert run(engine, 1) == 0
    longer = FakeRequest("longer", tokens(PROMPT, 1) + tokens(PROMPT, 2))
    restored = engine.admit(longer)
    assert restored > 0
    assert engine.step(longer=2 * PROMPT - restored).saves


@pytest.mark.parametrize("forgotten_first", [False, True])
def test_pages_that_a_request_from_before_fills_later_are_not_stored(
    engine: Engine, forgotten_first: bool
) -> None:
    """At the change the pages are not in vLLM's prefix cache, or they are lost later."""
    before = FakeRequest("before", tokens(PROMPT))
    engine.admit(before)
    engine.step(before=9)
    engine.tables.prefixes = {b"a page": 1} if forgotten_first else {}
    engine.side.reset()
    engine.tables.prefixes = {}
    engine.step(before=CHUNK - 9)
    engine.tables.prefixes = {b"the page it has filled": 1}
    engine.finish(before)
    engine.step()
    later = FakeRequest("later", tokens(PROMPT))
    engine.admit(later, local=CHUNK)
    assert engine.step(later=PROMPT - CHUNK).saves == []
    engine.finish(later)
    engine.step()
    assert run(engine) == 0


def test_pages_that_an_uncached_request_from_before_fills_later_are_not_stored(
    engine: Engine,
) -> None:
    """A streaming request, say: nothing is known of it but that it has pages."""
    engine.tables.usage = 0.1
    engine.side.reset()
    engine.step()
    engine.tables.prefixes = {b"the page it has filled": 1}
    engine.tables.usage = 0.0
    later = FakeRequest("later", tokens(PROMPT))
    engine.admit(later, local=CHUNK)
    assert engine.step(later=PROMPT - CHUNK).saves == []


def test_a_fleets_reset_comes_between_steps_not_into_one(engine: Engine) -> None:
    """A restore that vLLM has admitted is loaded; nothing else from before is."""
    run(engine)
    first, second = (FakeRequest(name, tokens(PROMPT)) for name in ("first", "second"))
    restored = engine.admit(first)
    assert restored
    hear(engine, 5)
    assert engine.ask(second), "asked in the same step"
    meta = engine.step(first=PROMPT - restored)
    assert [load.request_id for load in meta.loads] == ["first"]
    assert engine.ask(second) == 0
    first.all_token_ids += tokens(CHUNK, 3)
    engine.grow_table(first)
    assert engine.step(first=CHUNK).saves == []


def test_a_handoff_names_no_tokens_while_no_engine_can_find_them(engine: Engine) -> None:
    assert engine.side.root.is_shared
    engine.side.root.on_weights_changed(None)
    assert not engine.side.root.is_shared
    engine.side.root.on_weights_changed("v1")
    assert engine.side.root.is_shared
    engine.side.reset()
    assert not engine.side.root.is_shared
    hear(engine, 5)
    engine.step()
    assert engine.side.root.is_shared


EVENTS = st.one_of(
    st.integers(0, 2).map(lambda prompt: ("run", prompt)),
    st.sampled_from(["v1", "v2", "default", None]).map(lambda v: ("weights", v)),
    st.sampled_from([("reset", None), ("fleet", None)]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=14))
def test_restorable_tokens_equal_those_of_an_oracle(events: list[tuple[str, object]]) -> None:
    """The oracle: the state stored since the last reset with the present weights."""
    engine = Engine(DENSE)
    stored: dict[tuple[object, object], set[object]] = {}
    weights: tuple[object, object] = ("default", 0)
    fleet = unnamed = 0
    for event, what in [("run", 0), *events]:
        if event == "run":
            here = stored.setdefault(weights, set())
            assert (run(engine, what) > 0) == (what in here)  # type: ignore[arg-type]
            here.add(what)
            continue
        if event == "weights":
            unnamed += what is None
            weights = (weights[0], unnamed) if what is None else (what, 0)
            engine.side.root.on_weights_changed(what)  # type: ignore[arg-type]
            continue
        stored.clear()
        if event == "reset":
            unnamed += 1
            weights = (weights[0], unnamed if weights[1] else 0)
            assert engine.side.reset()
        else:
            fleet += 1
            weights = (weights[0], 0)
            hear(engine, 2 * fleet)
    engine.side.close()


def test_an_idle_engine_steps_to_adopt_a_reset_of_the_fleet(engine: Engine) -> None:
    """Until then a router sees a fleet whose engines name chains in two ways."""
    side = engine.side
    before = side.root.hasher.root
    engine.step()
    side._recorder.drain()
    assert not side._has_news()
    hear(engine, 7)
    side._recorder.drain()
    assert side._has_news()
    engine.step()
    assert side.root.hasher.root != before
    side._recorder.drain()
    assert not side._has_news()
