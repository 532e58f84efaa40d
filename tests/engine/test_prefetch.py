"""On the real engine a session's state is back in DRAM before its next turn. The tests advance the
connector's clock and do not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.sessions import ThinkTimes
from hetero_connector.store.artifact_store import ArtifactStore
from tests.engine.harness import (
    Completion,
    delta,
    engine,
    forget,
    generate,
    metric,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
    wide,
)
from tests.waiting import until

pytestmark = pytest.mark.engine

TURN = prompt_tokens(1300, seed=11)
EXACT, CLEAR = 1e-4, 0.02
DRAM_GIB = {"dense": 0.0062, "gemma3": 0.0068}
"""Twelve chunks: enough for a turn, or for the traffic after it, but not for both."""


@dataclass
class Serving:
    """An engine whose connector's clock can be advanced."""

    llm: Any
    ahead_s: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)

    def clock(self) -> float:
        return time.monotonic() + self.ahead_s

    @property
    def store(self) -> Any:
        return scheduler_side(self.llm).store

    def ask(self, prompt: list[int], tokens: int = 24, **params: object) -> Completion:
        """Run one turn; `params` arrive as a client's `kv_transfer_params` do."""
        extra_args = {"kv_transfer_params": params} if params else None
        return generate(self.llm, prompt, max_tokens=tokens, extra_args=extra_args)

    def later(self, seconds: float) -> None:
        """Advance the clock while no I/O is running: a running write would seem to hang."""
        settle(self.llm)
        assert self.store.flush(30.0)
        self.ahead_s += seconds

    def push_out(self, seed: int) -> None:
        """Fill DRAM with requests of no session; the artifacts that they evict are on SSD."""
        settle(self.llm)
        assert self.store.flush(30.0)
        with patch.object(scheduler_side(self.llm)._sessions, "_mode", "off"):
            for other in range(2):
                self.ask(prompt_tokens(2400, seed=1000 * seed + other), tokens=1)
                settle(self.llm)
                assert self.store.flush(30.0)
        assert self.llm.reset_prefix_cache()

    def in_dram(self, prompt: list[int]) -> bool:
        """True if DRAM has all prefix state of the prompt's full chunks."""
        side = scheduler_side(self.llm)
        chain = RequestChain(side.root.hasher)
        chain.extend(prompt)
        stored = self.store.match(chain.chunks())
        assert len(stored) == len(prompt) // side.layout.chunk_tokens
        types = side.layout.model.prefix_types
        return {chunk.tiers[t] for chunk in stored for t in types} == {Tier.DRAM}

    def moved(self, name: str, **labels: str) -> float:
        """Return a counter's increase since the last call. Counters arrive with the next step."""
        now = metric(f"heterocache_{name}_total", **labels)
        key = f"{name}{labels}"
        before, self.counted[key] = self.counted.get(key, 0.0), now
        return now - before


@pytest.fixture(scope="module", params=wide(("dense", "gemma3"), "gemma3"))
def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    extra: dict[str, Any] = {"dram_gib": DRAM_GIB[request.param], "ssd_gib": 0.3}
    extra |= {"ssd_dir": str(tmp_path_factory.mktemp("ssd")), "checkpoints": "adaptive"}
    extra["prefetch"] = "auto"
    with engine(request.param, extra, disable_log_stats=False) as llm:
        serving = Serving(llm)
        side = scheduler_side(llm)
        with ExitStack() as clocks:
            clocks.enter_context(patch.object(side._sessions, "_clock", serving.clock))
            for part, name in clocks_of(serving.store):
                clocks.enter_context(patch.object(part, name, serving.clock))
            yield serving


def clocks_of(store: ArtifactStore) -> list[tuple[object, str]]:
    """Return the parts of a store that have its clock, and the attribute that it is."""
    catalog, io_thread = store.catalog, store.io_thread
    assert io_thread is not None
    assert io_thread.ssd is not None
    parts = [catalog.loads, catalog.writes, catalog.writes.claims, catalog.users, catalog.replicas]
    parts += [catalog.prefetcher, io_thread.ssd.reads, io_thread.ssd.writes]
    return [(catalog, "clock"), *((part, "_clock") for part in parts)]


@pytest.fixture(autouse=True)
def _empty(serving: Serving) -> Iterator[None]:
    forget(serving.llm)
    with patch.object(scheduler_side(serving.llm)._sessions, "_think_times", ThinkTimes()):
        yield
    settle(serving.llm)
    assert serving.store.flush(30.0)
    until(
        lambda: not serving.store.catalog.tiers.pinned()
    )  # a sampled hit is pinned while it is checked
    serving.store.check_integrity()


def outcome_counted(serving: Serving, outcome: str) -> Callable[[], bool]:
    """Return a counter from the recorder: Prometheus gets counters only with engine steps."""
    recorder = scheduler_side(serving.llm)._recorder
    key = f"heterocache_prefetches{{outcome={outcome}}}"
    return lambda: recorder._counters.get(key, 0) > 0


def next_turn(answer: Completion, seed: int) -> list[int]:
    return [*TURN, *answer.tokens, *prompt_tokens(90, seed)]


def test_a_hinted_session_is_staged_when_it_is_due_and_its_answer_is_exact(
    serving: Serving,
) -> None:
    first = serving.ask(TURN, session_id="hinted", expected_back_s=3600)
    settle(serving.llm)
    prompt = next_turn(first, seed=12)
    with no_restores(serving.llm):
        reference = generate(serving.llm, prompt, max_tokens=8)
    serving.push_out(seed=13)
    assert not serving.in_dram(TURN), "an hour is not over"
    serving.moved("prefetched_bytes")
    serving.moved("prefetch_used_bytes")
    serving.moved("hit_tokens", tier="ssd")
    serving.later(3600)
    until(outcome_counted(serving, "staged"))
    again = serving.ask(prompt, tokens=8, session_id="hinted")
    settle(serving.llm)
    assert again.num_cached_tokens == len(TURN) + len(first.tokens) - 1 - (
        (len(TURN) + len(first.tokens) - 1) % scheduler_side(serving.llm).layout.model.alignment
    )
    assert delta(again, reference) <= EXACT
    serving.ask(prompt_tokens(40, seed=14), tokens=2)  # one more step: counters are shipped
    staged = serving.moved("prefetched_bytes")
    assert staged > 0
    assert serving.moved("prefetch_used_bytes") == staged
    assert serving.moved("hit_tokens", tier="ssd") == 0, "nothing was left to read"


def test_power_the_answer_is_computed_from_what_was_staged(serving: Serving) -> None:
    first = serving.ask(TURN, session_id="power", expected_back_s=3600)
    settle(serving.llm)
    prompt = next_turn(first, seed=15)
    with no_restores(serving.llm):
        reference = generate(serving.llm, prompt, max_tokens=8)
    serving.push_out(seed=16)
    serving.later(3600)
    until(outcome_counted(serving, "staged"))
    staged = serving.store.catalog.tiers.prefetched._waiting
    assert staged
    for artifact in staged:
        serving.store.arena.view[artifact.dram_offset :][: artifact.size_bytes] = 0
    assert delta(serving.ask(prompt, tokens=8, session_id="power"), reference) > CLEAR


def test_a_conversation_without_an_id_is_known_by_its_tokens_and_pace(serving: Serving) -> None:
    prompt = TURN
    for turn in range(8):
        answer = serving.ask(prompt, tokens=8)
        if turn < 7:
            serving.later(30)
        prompt = [*prompt, *answer.tokens, *prompt_tokens(20, seed=20 + turn)]
    with no_restores(serving.llm):
        reference = generate(serving.llm, prompt, max_tokens=8)
    serving.push_out(seed=17)
    assert not serving.in_dram(prompt)
    serving.later(24)  # a little earlier than it used to come
    until(lambda: serving.in_dram(prompt))
    assert delta(serving.ask(prompt, tokens=8), reference) <= EXACT


def test_spoiled_bytes_are_found_when_they_are_staged_and_the_turn_is_right(
    serving: Serving,
) -> None:
    first = serving.ask(TURN, session_id="spoiled", expected_back_s=3600)
    settle(serving.llm)
    prompt = next_turn(first, seed=18)
    with no_restores(serving.llm):
        reference = generate(serving.llm, prompt, max_tokens=8)
    serving.push_out(seed=19)
    directory = serving.store.io_thread.ssd.rows.directory
    for slab in directory.path.glob("*.slab"):
        with slab.open("r+b") as file:
            size = slab.stat().st_size
            for at in range(0, size, 4096):
                file.seek(at)
                file.write(b"\xa5" * 8)
    serving.later(3600)
    until(outcome_counted(serving, "failed"))
    assert delta(serving.ask(prompt, tokens=8, session_id="spoiled"), reference) <= EXACT


def test_a_wrong_hint_is_ignored(serving: Serving) -> None:
    right = serving.ask(TURN, tokens=4)
    for wrong in ({"expected_back_s": "soon"}, {"session_id": 7}, {"expected_back_s": -1}):
        assert serving.ask(TURN, tokens=4, **wrong).tokens == right.tokens
