"""The scheduler side handles session ids, hints and turns, over a real store with an SSD."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.scheduler import sessions
from hetero_connector.engine.scheduler.request_params import ParamsReader, RequestParams
from hetero_connector.engine.scheduler.scheduler_side import Policies, SchedulerSide
from hetero_connector.engine.scheduler.sessions import Mode
from hetero_connector.metrics import Recorder
from hetero_connector.planner.checkpoints import Full
from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.catalog.fair_shares import FairShares
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from tests.engine.fakes import HYBRID, FakeBlockTables, FakeRequest

CHUNK = 64


def tokens(count: int, seed: int = 0) -> list[int]:
    return [1000 * seed + i for i in range(count)]


class Turns:
    """A scheduler side whose requests are matched and finished without a step."""

    def __init__(self, root: Path, mode: Mode) -> None:
        layout = ArtifactLayout(HYBRID, CHUNK)
        self.store = ArtifactStore.open(
            layout.max_bytes,
            StoreConfig(1 << 20, root / "ssd", 8 << 20),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=b"f" * 32,
            description={},
        )
        costs = CostModel(ComputeRegression(), LoadModel(HYBRID.state_types))
        self.side = SchedulerSide(
            layout, ChainHasher(b"f" * 32, CHUNK), self.store, Recorder(),
            Policies(RestorePlanner(layout, costs), Full(), prefetch=mode),
            layerwise=True, load_deadline_s=1.0,
        )  # fmt: skip
        self.side.bind(FakeBlockTables())  # type: ignore[arg-type]
        self.now_s = 1000.0 + time.monotonic()
        self.side._sessions._clock = lambda: self.now_s

    def turn(self, request: FakeRequest) -> Any:
        """Match and finish the request; return its session."""
        side: Any = self.side
        side.match(request, 0)
        tracker = side._trackers[request.request_id]
        tracker.outdated = True  # nothing is to be saved
        side.on_finished(request, ([], []))
        return tracker.session

    @property
    def expected(self) -> dict[object, ExpectedReturn]:
        return self.store.catalog.prefetcher.schedule._expected

    def users(self, prompt: list[int]) -> list[int]:
        """Return the number of sessions that use each full chunk of the prompt."""
        nodes = self.store.catalog.tiers.index.nodes
        return [nodes[chunk.key].users for chunk in chain_of(prompt).chunks(len(prompt))]


def chain_of(prompt: list[int]) -> RequestChain:
    chain = RequestChain(ChainHasher(b"f" * 32, CHUNK))
    chain.extend(prompt)
    return chain


def put(turns: Turns, prompt: list[int]) -> None:
    """Store the prompt's full chunks with any bytes."""
    for chunk in chain_of(prompt).chunks(len(prompt)):
        if kinds := turns.store.missing(chunk, HYBRID.state_types):
            save = turns.store.begin_save(chunk, dict.fromkeys(kinds, 64))
            assert save is not None
            turns.store.complete_save(save)


@pytest.fixture
def turns(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Turns]:
    turns = Turns(tmp_path, getattr(request, "param", "auto"))
    yield turns
    turns.store.close()


def asking(name: str, prompt: list[int], **fields: Any) -> FakeRequest:
    return FakeRequest(name, prompt, num_computed_tokens=len(prompt), **fields)


def test_a_hinted_session_is_expected_at_the_hinted_time(turns: Turns) -> None:
    params = {"session_id": "s", "expected_back_s": 60}
    prompt = tokens(220)
    session = turns.turn(asking("a", prompt, kv_transfer_params=params))
    expected = turns.expected[session]
    assert turns.now_s + 30 < expected.start_s < turns.now_s + 60 < expected.latest_s
    assert expected.latest_s < turns.now_s + 120
    chain = RequestChain(ChainHasher(b"f" * 32, CHUNK))
    chain.extend(prompt)
    assert expected.leaves == tuple(chain.ending_at(end).key for end in (208, 192))


def test_a_session_is_recognised_though_the_directory_answers_late(turns: Turns) -> None:
    prompt = tokens(200)
    put(turns, prompt)
    session = turns.turn(asking("a", prompt))
    chunks = [chunk.key for chunk in chain_of(prompt).chunks(len(prompt))]
    turns.store.retention.limit_life(chunks, 3600.0, is_forgotten=True)
    polls = iter([False])
    lookup = SimpleNamespace(poll=lambda: next(polls, True), found=())
    side: Any = turns.side
    side._peers._fleet = SimpleNamespace(find=lambda _: lookup, accepts_claims=True)
    again = asking("b", [*prompt, *tokens(100, seed=1)])
    assert side.match(again, 0) == (None, False)
    assert turns.turn(again) == session
    assert not turns.store.retention._lifetimes, "what it has found is kept"


def test_a_named_turn_begins_before_the_directory_answers(turns: Turns) -> None:
    kept = {"heterocache": {"pin_s": 600}}
    put(turns, tokens(200))
    turns.turn(asking("a", tokens(200), session_id="s", kv_transfer_params=kept))
    assert len(turns.store.retention.pins().pins) == 1
    side: Any = turns.side
    lookup = SimpleNamespace(poll=lambda: False, found=())
    side._peers._fleet = SimpleNamespace(find=lambda _: lookup, accepts_claims=True)
    ended = {"heterocache": {"end_session": True}}
    again = asking("b", tokens(300), session_id="s", kv_transfer_params=ended)
    assert side.match(again, 0) == (None, False)
    side.on_finished(again, ([],))
    assert not turns.store.retention.pins().pins


@pytest.mark.parametrize("named", ["session_id", "kv_transfer_params"])
def test_a_session_is_known_by_either_id(turns: Turns, named: str) -> None:
    value: Any = "s" if named == "session_id" else {"session_id": "s"}
    one = turns.turn(asking("a", tokens(200), **{named: value}))
    other = turns.turn(asking("b", tokens(100, seed=1), session_id="s"))
    assert one == other
    assert turns.turn(asking("c", tokens(200), session_id="t")) != one


def test_a_session_that_is_back_is_not_expected_while_it_runs(turns: Turns) -> None:
    params = {"expected_back_s": 60}
    session = turns.turn(asking("a", tokens(200), session_id="s", kv_transfer_params=params))
    assert session in turns.expected
    turns.side.match(asking("b", tokens(300), session_id="s"), 0)  # type: ignore[arg-type]
    assert session not in turns.expected


def test_without_hints_a_session_is_expected_at_its_own_pace(turns: Turns) -> None:
    for turn in range(6):
        session = turns.turn(asking(f"a{turn}", tokens(200), session_id="s"))
        turns.now_s += 20.0
    ended_s = turns.now_s - 20.0
    assert (
        ended_s < turns.expected[session].start_s < ended_s + 20 < turns.expected[session].latest_s
    )


@pytest.mark.parametrize("turns", ["hint"], indirect=True)
def test_mode_hint_expects_only_hinted_sessions(turns: Turns) -> None:
    for turn in range(6):
        session = turns.turn(asking(f"a{turn}", tokens(200), session_id="s"))
        turns.now_s += 20.0
    assert session not in turns.expected
    params = {"expected_back_s": 5}
    turns.turn(asking("b", tokens(200), session_id="s", kv_transfer_params=params))
    assert session in turns.expected


@pytest.mark.parametrize("turns", ["off"], indirect=True)
def test_mode_off_expects_no_session_but_protects_chains(turns: Turns) -> None:
    put(turns, tokens(200))
    params = {"session_id": "s", "expected_back_s": 5}
    turns.turn(asking("a", tokens(200), kv_transfer_params=params))
    assert not turns.expected
    assert turns.users(tokens(200)) == [1, 1, 1]


def test_two_continuations_of_a_prompt_are_two_users_of_it(turns: Turns) -> None:
    trunk, fork = tokens(200), tokens(128) + tokens(72, seed=5)
    for name, prompt in (("s", trunk), ("t", fork)):
        put(turns, prompt)
        turns.turn(asking(name, prompt, session_id=name))
    assert turns.users(trunk) == turns.users(fork) == [2, 2, 1]
    turns.turn(asking("again", tokens(200), session_id="t"))
    assert turns.users(trunk) == [2, 2, 2], "the session has left its fork"
    assert turns.users(fork) == [2, 2, 0]


def test_a_session_that_is_not_back_in_time_protects_nothing(turns: Turns) -> None:
    put(turns, tokens(200))
    params = {"expected_back_s": 5}
    turns.turn(asking("a", tokens(200), session_id="s", kv_transfer_params=params))
    users = turns.store.catalog.users
    assert turns.now_s + 5 < users.look_s < turns.now_s + 60
    turns.turn(asking("b", tokens(200), session_id="s"))
    assert users.look_s == turns.now_s + sessions._PROTECTED_S, "without a hint nothing is known"


def test_requests_without_a_session_are_left_alone(turns: Turns) -> None:
    for number in range(3):
        turns.turn(asking(f"short {number}", tokens(10)))
    assert not turns.expected
    never_matched = asking("n", tokens(200))
    turns.side.on_finished(never_matched, ([], []))  # type: ignore[arg-type]
    assert not turns.expected


@pytest.mark.parametrize(
    "params",
    [
        {"session_id": "s", "expected_back_s": 1e308},
        {"session_id": "s", "expected_back_s": 10**400},
        {"session_id": "\ud800", "expected_back_s": 5},
    ],
)
def test_no_client_can_stop_the_engine_by_its_parameters(turns: Turns, params: object) -> None:
    for name in ("a", "b"):
        assert turns.turn(asking(name, tokens(200), kv_transfer_params=params)) is not None
    sane = {"session_id": "t", "expected_back_s": 5}
    turns.turn(asking("c", tokens(200, seed=1), kv_transfer_params=sane))
    assert max(x.latest_s for x in turns.expected.values()) < turns.now_s + 3600


def test_a_wrong_hint_is_logged_once_and_ignored(
    turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.heterocache").propagate = True
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            params = {"session_id": "s", "expected_back_s": "soon"}
            turns.turn(asking(f"a{number}", tokens(200), kv_transfer_params=params))
    lines = [r.message for r in caplog.records if "expected_back_s" in r.message]
    assert len(lines) == 1
    assert "'soon'" in lines[0]
    assert not turns.expected


def test_a_misspelt_hint_is_logged_once(turns: Turns, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm.heterocache").propagate = True
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            params = {"session_id": "s", "expcted_back_s": 5}
            turns.turn(asking(f"a{number}", tokens(200), kv_transfer_params=params))
    (line,) = [r.message for r in caplog.records if "expcted_back_s" in r.message]
    assert "did you mean 'expected_back_s'?" in line


def test_session_fields_sent_to_the_stock_server_reach_the_request() -> None:
    """vLLM's own classes carry the fields from a chat request's body to the connector."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.request import Request

    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "go on"}],
        "session_id": "agent-7",
        "kv_transfer_params": {"expected_back_s": 12.5},
    }
    parsed = ChatCompletionRequest.model_validate(body)
    request = Request(
        "r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=parsed.to_sampling_params(16, {}),
        pooling_params=None,
        session_id=parsed.session_id,
    )
    assert request.session_id == "agent-7"
    params = ParamsReader().read(request.kv_transfer_params, "r")
    assert params == RequestParams(expected_back_s=12.5)


def test_a_session_id_is_valid_only_within_its_salt(turns: Turns) -> None:
    """Otherwise a client that guesses an id could overwrite its hint and pace."""
    params = {"expected_back_s": 60}
    ann = turns.turn(
        asking("a", tokens(200), session_id="s", cache_salt="ann", kv_transfer_params=params)
    )
    others = {
        turns.turn(asking("b", tokens(200, seed=1), session_id="s", cache_salt=salt))
        for salt in ("eve", None, "")
    }
    assert ann not in others
    assert len(others) == 3
    assert ann in turns.expected, "it is not taken for back"


def test_no_hint_keeps_a_chain_for_longer_than_an_hour(turns: Turns) -> None:
    prompt = tokens(128)
    put(turns, prompt)
    params = {"expected_back_s": 86_400.0 * 30}
    session = turns.turn(asking("a", prompt, session_id="s", kv_transfer_params=params))
    assert turns.store.catalog.users.look_s <= turns.now_s + 3_600.0
    assert turns.expected[session].latest_s > turns.now_s + 86_400.0, "it is staged when it is due"


def test_many_sessions_of_one_salt_do_not_displace_anothers(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns.store.catalog.prefetcher.schedule, "_shares", FairShares(20))
    hint = {"kv_transfer_params": {"expected_back_s": 60}}
    ann = turns.turn(asking("a", tokens(128), session_id="s", cache_salt="ann", **hint))
    for number in range(100):
        name = str(number)
        turns.turn(asking(f"e{name}", tokens(128), session_id=name, cache_salt="eve", **hint))
    assert ann in turns.expected
    assert len(turns.expected) == 20
