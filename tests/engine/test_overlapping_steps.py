"""Under async scheduling a step is scheduled before the workers have reported the last one. vLLM's
CPU platform switches async scheduling off, so these tests call the scheduler side, over a real
store, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_connector.engine.messages import StepMetadata
from hetero_connector.metrics import HISTOGRAMS
from tests.engine.fakes import DENSE, FakeRequest, scheduled
from tests.engine.stepped import Engine, tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(DENSE)
    yield engine
    tiers = engine.store.catalog.tiers
    assert tiers.pinned() == []
    assert len(tiers._pins) == 0
    assert all(a.sealed for a in tiers.index.artifacts())
    assert not engine.side.has_work
    engine.store.check_integrity()
    engine.side.close()


def schedule(engine: Engine, **num_tokens: int) -> StepMetadata:
    """Schedule a step whose report comes later; as in vLLM its tokens count as computed."""
    output: Any = scheduled(**num_tokens)
    meta = engine.side.order_step(output)
    for request_id, count in num_tokens.items():
        engine.requests[request_id].num_computed_tokens += count
    return meta


def ends(meta: StepMetadata) -> list[int]:
    saves = [*meta.saves, *meta.early_saves]
    return [artifact.end for save in saves for artifact in save.copy.artifacts]


def test_a_chunk_being_saved_is_not_saved_again_by_the_next_step(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(128)))
    first = schedule(engine, a=64)
    second = schedule(engine, a=64)
    assert (ends(first), ends(second)) == ([64], [128])
    engine.report(first)
    engine.report(second)
    engine.finish(engine.requests["a"])


def test_a_token_that_is_not_known_yet_is_never_hashed(engine: Engine) -> None:
    request = FakeRequest("a", tokens(63))
    engine.admit(request)
    first = schedule(engine, a=63)
    request.num_computed_tokens += 1  # the token it samples is scheduled before it is known
    engine.grow_table(request)
    second = schedule(engine, a=1)
    assert (ends(first), ends(second)) == ([], [])
    request.all_token_ids.append(7)
    engine.grow_table(request)
    third = schedule(engine, a=1)
    assert ends(third) == [64]
    for meta in (first, second, third):
        engine.report(meta)
    engine.finish(request)
    assert engine.admit(FakeRequest("b", [*tokens(63), 8, 1])) == 0
    assert engine.admit(FakeRequest("c", [*tokens(63), 7, 1])) == 64
    for name in "bc":
        engine.step(**{name: 1})
        engine.finish(engine.requests[name])
    engine.step()


def counted(engine: Engine) -> dict[str, list[float]]:
    """Return the timings since the last call."""
    found: dict[str, list[float]] = (engine.recorder.drain() or {}).get(HISTOGRAMS, {})
    return found


def test_the_first_token_counts_when_it_is_known(
    engine: Engine,
) -> None:
    engine.run(FakeRequest("a", tokens(128)))
    request = FakeRequest("b", tokens(200))
    assert engine.admit(request) == 128
    observed = "heterocache_ttft_seconds{kind=observed}"
    first = schedule(engine, b=72)
    second = schedule(engine, b=1)  # while the first still runs
    assert observed not in counted(engine)
    engine.report(first)
    request.all_token_ids.append(7)
    third = schedule(engine, b=1)
    assert len(counted(engine)[observed]) == 1
    engine.report(second)
    engine.report(third)
    engine.finish(request)
    engine.step()


def test_a_request_ends_while_its_load_and_its_save_are_unreported(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(128)))
    again = FakeRequest("b", tokens(200))
    assert engine.admit(again) == 128
    first = schedule(engine, b=72)
    assert len(first.loads) == 1
    engine.finish(again)  # aborted
    second = schedule(engine)
    assert ends(first) == [192]
    engine.report(first)
    engine.report(second)


def test_preempted_before_the_report_and_admitted_again_after_it(engine: Engine) -> None:
    engine.run(FakeRequest("a", tokens(128)))
    request = FakeRequest("b", tokens(200))
    assert engine.admit(request) == 128
    first = schedule(engine, b=72)
    request.num_computed_tokens = 0  # preempted while the step runs
    second = schedule(engine)
    engine.report(first)
    assert engine.admit(request) == 192
    third = schedule(engine, b=8)
    engine.report(second)
    engine.report(third)
    engine.finish(request)
    engine.step()


def test_preempted_and_admitted_again_before_the_report(engine: Engine) -> None:
    """After `reset_prefix_cache(reset_running_requests=True)` vLLM resumes in the next step."""
    engine.run(FakeRequest("a", tokens(128)))
    request = FakeRequest("b", tokens(200))
    assert engine.admit(request) == 128
    first = schedule(engine, b=8)
    request.num_computed_tokens = 0
    assert engine.admit(request) == 128
    second = schedule(engine, b=8)
    assert len(second.loads) == 1
    engine.report(first)
    assert len(engine.store.catalog.tiers._pins) == 1, "the second load is still under way"
    engine.report(second)
    assert len(engine.store.catalog.tiers._pins) == 0
    engine.finish(request)
    engine.step()


def test_a_reset_while_a_save_is_under_way_forgets_it(engine: Engine) -> None:
    engine.admit(FakeRequest("a", tokens(128)))
    first = schedule(engine, a=128)
    engine.side.reset()
    engine.report(first)
    assert engine.admit(FakeRequest("b", tokens(128))) == 0
    for name in "ab":
        engine.finish(engine.requests[name])
    engine.step()
