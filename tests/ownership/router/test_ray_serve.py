"""The router inside Ray Serve, without Ray: `make test-ray` has its class on a real deployment."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import RouterConfigError
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Worker
from ownership.directory.memory import MemoryDirectory
from ownership.router import opening
from ownership.router.placer import Placed
from ownership.router.ray_serve import placing as placing_module
from ownership.router.ray_serve.asked import request_of
from ownership.router.ray_serve.placing import ReplicaPlacing, replica_config
from ownership.router.ray_serve.replicas import Answer, Replicas, routing_stats
from ownership.router.requests import RouterRequest
from ownership.router.view.certainty import Certainty, Reason
from tests.ownership.router.bench import PATIENCE_S
from tests.ownership.router.known_fleet import PROMPT, chain_answer

STATS = {
    name: routing_stats(
        [
            Answer("GET", "/v1/heterocache/chain", None, {"engines": [chain_answer(f"at-{name}")]}),
            Answer("GET", "/v1/models", None, {"data": [{"id": "chat", "parent": None}]}),
            Answer("GET", "/metrics", None, ""),
        ]
    )
    for name in ("r1", "r2")
}
NOTHING: Mapping[str, Mapping[str, Any]] = {"r1": {}, "r2": {}}


class Request(BaseModel):
    """A body as Ray has it."""

    model_config = ConfigDict(extra="allow")
    temperature: float = 1.0


def completion(session: str = "", prompt: Iterable[int] = PROMPT) -> RouterRequest:
    return request_of("completions", Request(prompt=list(prompt)), {}, session)


def playing(act: Callable[[ReplicaPlacing], Awaitable[None]], **keys: Any) -> None:
    """Play with a placing on an event loop of its own."""

    async def play() -> None:
        placing = ReplicaPlacing(replica_config(keys))
        try:
            await act(placing)
        finally:
            await placing.close()

    asyncio.run(play())


async def placed_at(placing: ReplicaPlacing, name: str, session: str = "") -> Placed:
    found = await placing.place(name, completion(session), ["r1", "r2"])
    assert found is not None
    return found


async def served_by(placing: ReplicaPlacing, name: str, session: str = "") -> str:
    worker = (await placed_at(placing, name, session)).worker.name
    placing.routed(name, worker)
    placing.ended(name, worker)
    return worker


def test_the_placer_may_be_opened_before_there_is_a_replica() -> None:
    """It is opened once, so no request waits for that any more."""

    async def act(placing: ReplicaPlacing) -> None:
        placing.begin()
        first = await placing.opened()
        placing.replicas.update(NOTHING)
        placing.begin()
        assert await placing.opened() is first
        assert await served_by(placing, "a") in NOTHING

    playing(act)


def test_a_request_keeps_what_the_client_gave_and_the_headers_of_its_session() -> None:
    body = Request(messages=[{"role": "user", "content": "Hi"}], kv_transfer_params={"a": 1})
    request = request_of("chat", body, {"X-Session-Id": "s", "authorization": "k"}, "other")
    assert (request.door.name, request.target) == ("chat", "/v1/chat/completions")
    assert json.loads(request.body) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "kv_transfer_params": {"a": 1},
    }
    assert request.headers == [(b"x-session-id", b"s")]


@pytest.mark.parametrize(
    ("method", "body", "path"),
    [
        ("completions", Request(prompt="Hi"), "/v1/completions"),
        ("__call__", SimpleNamespace(prompt="Hi"), "/v1/completions"),
        ("__call__", SimpleNamespace(messages=[]), "/v1/chat/completions"),
        ("__call__", None, "/v1/chat/completions"),
        ("embeddings", Request(input="Hi"), ""),
    ],
)
def test_the_path_is_that_of_the_method_or_of_the_body(method: str, body: Any, path: str) -> None:
    request = request_of(method, body, {}, "s")
    assert request.target == path
    assert (b"x-session-id", b"s") in request.headers


def test_replicas_answer_only_what_they_told() -> None:
    replicas = Replicas()
    replicas.update({**STATS, "r3": {"heterocache": [["GET"]], "other": 1}})

    async def ask(name: str, path: str) -> Any:
        return await replicas.servers()[name]("GET", path, None)

    assert asyncio.run(ask("r1", "/v1/models"))["data"][0]["id"] == "chat"
    for name, path in (("r1", "/tokenize"), ("r3", "/v1/models")):
        with pytest.raises(ValueError, match="tells nothing of"):
            asyncio.run(ask(name, path))


def test_a_request_goes_to_the_replica_that_has_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = MemoryDirectory(lambda: 1_000.0)
    monkeypatch.setattr(opening, "open_directory", lambda url: directory)
    epoch = directory.register(Worker("at-r2"), 60.0).epoch
    directory.register(Worker("at-r1"), 60.0)

    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(STATS)
        async with asyncio.timeout(PATIENCE_S):
            while (known := await placed_at(placing, "first")).certainty != Certainty.EXACT:
                await asyncio.sleep(0.01)
        [chain] = known.view.chains.values()  # type: ignore[attr-defined]
        claims = [
            Claim(ArtifactId(key, StateType.DENSE_KV), Copy(10, bytes(16), 0))
            for key in chain.keys[:18]
        ]
        directory.claim_owner(epoch, claims)
        placing.ended("first", known.worker.name)
        for number in range(3):
            found = await placed_at(placing, f"n{number}")
            assert (found.worker.name, found.certainty, found.reasons) == ("r2", "exact", ())
            placing.ended(f"n{number}", "r2")

    playing(act, directory="memory://", directory_s=PATIENCE_S)


def test_sessions_stay_and_requests_at_once_spread_while_nothing_is_told() -> None:
    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        busy = await placed_at(placing, "busy")
        assert busy.certainty == Certainty.BLIND
        assert Reason.NO_CHAINS in busy.reasons
        at = await served_by(placing, "1", "s")
        assert at != busy.worker.name
        placing.ended("busy", busy.worker.name)
        assert {await served_by(placing, f"2{n}", "s") for n in range(4)} == {at}
        assert (await placed_at(placing, "3", "s")).certainty == Certainty.DEGRADED

    playing(act)


def test_a_request_counts_where_ray_sent_it_until_it_has_ended() -> None:
    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        chosen = (await placed_at(placing, "full")).worker
        [other] = [x for x in placing.replicas.workers if x is not chosen]
        placing.routed("full", other.name)
        assert (chosen.in_flight, other.in_flight) == (0, 1)
        placing.ended("full", chosen.name)  # of an attempt that was refused there
        assert other.in_flight == 1
        assert (await placed_at(placing, "next")).worker is chosen
        placing.left("next")
        placing.ended("full", other.name)
        assert (chosen.in_flight, other.in_flight) == (0, 0)
        assert await served_by(placing, "x", "s")  # nothing is left behind in the ledger

    playing(act)


def test_a_request_whose_end_is_not_told_is_freed_wherever_ray_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing_module, "_UNSEEN_S", 0.0)

    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        chosen = (await placed_at(placing, "picked")).worker
        [other] = [x for x in placing.replicas.workers if x is not chosen]
        placing.end_unseen("picked")
        placing.routed("picked", other.name)
        assert other.in_flight == 1
        async with asyncio.timeout(PATIENCE_S):
            while other.in_flight:
                await asyncio.sleep(0)

    playing(act)


def test_the_time_of_an_earlier_choice_does_not_end_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        await placed_at(placing, "again")
        placing.end_unseen("again")
        monkeypatch.setattr(placing_module, "_UNSEEN_S", 600.0)
        worker = (await placed_at(placing, "again")).worker
        placing.end_unseen("again")
        await asyncio.sleep(0.1)  # the first time is over
        assert worker.in_flight == 1
        placing.ended("again", worker.name)
        assert worker.in_flight == 0

    monkeypatch.setattr(placing_module, "_UNSEEN_S", 0.05)
    playing(act)


class RayRouter:
    """`OwnerRouter`, loaded with stand-ins for what it imports of Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted = counted = Counter[tuple[str, ...]]()

        class Metric:
            def __init__(self, name: str, *_: object) -> None:
                self._name = name

            def inc(self, tags: Mapping[str, str]) -> None:
                counted[self._name, *tags.values()] += 1

        class Base:
            def update_replicas(self, replicas: object) -> None: ...

        names = ("PendingRequest", "ReplicaID", "RunningReplica")
        of_ray = SimpleNamespace(RequestRouter=Base, **dict.fromkeys(names))
        metrics = SimpleNamespace(Counter=Metric)
        monkeypatch.setitem(sys.modules, "ray.serve.request_router", of_ray)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)  # type: ignore[arg-type]
        path = Path(placing_module.__file__).with_name("router.py")
        spec = spec_from_file_location("router", path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module := module_from_spec(spec))
        self.replicas = [
            SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={})
            for name in NOTHING
        ]
        self.router = module.OwnerRouter()
        self.router.initialize_state()

    def in_flight(self) -> dict[str, int]:
        return {x.name: x.in_flight for x in self.router._placing.replicas.workers}

    def pending(self, name: str, method: str = "completions") -> Any:
        """Return a request as Ray has it. To be called on the event loop."""
        metadata = SimpleNamespace(internal_request_id=name, call_method=method, session_id="")
        return SimpleNamespace(
            metadata=metadata,
            args=[Request(prompt=PROMPT)],
            routing_context=SimpleNamespace(should_backoff=False),
            future=asyncio.Future[Any](),
        )


@pytest.mark.parametrize("method", ["completions", "__call__"])
def test_a_request_counts_where_ray_sends_it_and_nowhere_if_its_client_has_left_before(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = RayRouter(monkeypatch)

    async def act() -> None:
        ray.router.update_replicas(ray.replicas)
        [[chosen], [other]] = await ray.router.choose_replicas(
            ray.replicas, pending := ray.pending("a", method)
        )
        assert ray.in_flight()[chosen.replica_id.unique_id] == 1
        pending.future.set_result(other)  # the chosen one is full
        await asyncio.sleep(0)
        assert ray.in_flight() == {
            chosen.replica_id.unique_id: 0,
            other.replica_id.unique_id: 1,
        }
        ray.router.on_request_completed(other.replica_id, "a")
        assert set(ray.in_flight().values()) == {0}
        await ray.router.choose_replicas(ray.replicas, left := ray.pending("b", method))
        left.future.cancel()  # the client leaves before there is a replica for it
        await asyncio.sleep(0)
        assert set(ray.in_flight().values()) == {0}
        await ray.router._placing.close()

    asyncio.run(act())


def test_a_request_that_a_replica_has_rejected_is_followed_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray chooses again for the same request, and gives it another future (`reset_future`)."""
    ray = RayRouter(monkeypatch)

    async def act() -> None:
        ray.router.update_replicas(ray.replicas)
        pending = ray.pending("a")
        [[first], _] = await ray.router.choose_replicas(ray.replicas, pending)
        pending.future.set_result(first)
        await asyncio.sleep(0)
        pending.future = asyncio.Future()
        [_, [other]] = await ray.router.choose_replicas(ray.replicas, pending)
        pending.future.set_result(other)  # the chosen one is full
        await asyncio.sleep(0)
        assert ray.in_flight()[other.replica_id.unique_id] == 1
        pending.future = asyncio.Future()
        await ray.router.choose_replicas(ray.replicas, pending)
        pending.future.cancel()  # the client leaves
        await asyncio.sleep(0)
        assert set(ray.in_flight().values()) == {0}
        await ray.router._placing.close()

    asyncio.run(act())


class CountedFuture(asyncio.Future[Any]):
    """Counts what is to be called at its end."""

    callbacks = 0

    def add_done_callback(self, *given: Any, **keys: Any) -> None:
        self.callbacks += 1
        super().add_done_callback(*given, **keys)


@pytest.mark.parametrize("earlier", [0, 3])
def test_a_client_that_leaves_while_its_request_is_placed_counts_nowhere(
    earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = RayRouter(monkeypatch)

    async def act() -> None:
        ray.router.update_replicas(ray.replicas)
        pending = ray.pending("a")
        pending.future = CountedFuture()
        for _ in range(earlier):
            await ray.router.choose_replicas(ray.replicas, pending)
            added = pending.future.callbacks
            assert added == 1, "Ray asks hundreds of times while all replicas are full"
        place = ray.router._placing.place

        async def left_meanwhile(*given: Any) -> Placed | None:
            pending.future.cancel()
            await asyncio.sleep(0)  # its callbacks run
            found: Placed | None = await place(*given)
            return found

        ray.router._placing.place = left_meanwhile
        await ray.router.choose_replicas(ray.replicas, pending)
        assert set(ray.in_flight().values()) == {0}
        await ray.router._placing.close()

    asyncio.run(act())


def test_a_request_counts_once_in_the_metrics_however_often_ray_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = RayRouter(monkeypatch)

    async def act() -> None:
        ray.router.update_replicas(ray.replicas)
        for number in range(2):
            pending = ray.pending(f"{number}")
            for _ in range(3):
                assert len(await ray.router.choose_replicas(ray.replicas, pending)) == 2
        await ray.router._placing.close()

    asyncio.run(act())
    counted = ray.counted
    assert counted.pop(("heterocache_router_placements", "blind", "colocated_prefill")) == 2
    assert set(counted.values()) == {2}, "each reason of each request"


def test_a_request_that_is_placed_again_counts_once() -> None:
    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        for _ in range(3):
            await placed_at(placing, "same")
        assert sum(x.in_flight for x in placing.replicas.workers) == 1

    playing(act)


def test_a_session_moves_when_its_replica_has_gone_and_none_is_chosen_when_all_have() -> None:
    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        at = await served_by(placing, "1", "s")
        under_way = await placed_at(placing, "lost", "s")
        assert under_way.worker.name == at
        [left] = {"r1", "r2"} - {at}
        placing.replicas.update({left: {}})
        assert await served_by(placing, "2", "s") == left
        placing.routed("lost", at)
        placing.ended("lost", at)
        placing.replicas.update({})
        assert await placing.place("3", completion("s"), ["r1", "r2"]) is None
        assert await placing.place("4", completion("s"), []) is None

    playing(act)


def test_least_loaded_takes_idle_replicas_by_turns() -> None:
    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        found = [await served_by(placing, f"{number}", "s") for number in range(4)]
        assert found[:2] == found[2:]
        assert set(found) == {"r1", "r2"}

    playing(act, policy="least_loaded")


def test_a_model_that_cannot_be_opened_leaves_sessions(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise OSError(f"{path} is not here")

    monkeypatch.setattr(opening, "open_tokenizer", fail)

    async def act(placing: ReplicaPlacing) -> None:
        placing.replicas.update(NOTHING)
        at = await served_by(placing, "1", "s")
        assert {await served_by(placing, f"2{n}", "s") for n in range(3)} == {at}

    with caplog.at_level(logging.ERROR):
        playing(act, model_path="/no/such/model")
    assert "placed by their sessions alone" in caplog.text
    assert "model_path: /no/such/model is not here" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"modle_path": "m"}, "did you mean 'model_path'"),
        ({"port": 1}, "unknown key 'port'"),
        ({"directory_s": 0}, "directory_s: "),
        ({"policy": "static_pd"}, "static_pd needs a worker with `role: "),
    ],
)
def test_wrong_arguments_are_named(keys: dict[str, object], message: str) -> None:
    with pytest.raises(RouterConfigError, match=message):
        replica_config(keys)
