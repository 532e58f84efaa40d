"""Ways in which routers of other projects lose hits silently: here each is told, with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

from ownership.router.figures import WorkerFigures
from ownership.router.identity import ChainCache, ModelTokenizer, PromptIdentity
from ownership.router.policy_placer import PolicyPlacer
from ownership.router.reports import LoadReports
from ownership.router.view import Certainty, FleetWatch, PrefixViews, StockWorkers
from ownership.router.view.event_stream import EventStream
from ownership.scheduling.registry import scheduling_policy
from ownership.scheduling.step import WorkerPrefix
from tests.ownership.router.identity.tokenizers_of_kinds import model_tokenizer
from tests.ownership.router.view.test_views import ANSWER, Fleet, Server

SIZE = 16
OWN = model_tokenizer("llama3")
OTHER_TEMPLATE = ModelTokenizer(
    OWN._encoder, OWN.cuts, templates={"default": OWN.templates["default"] + " "}
)
TALK = {"messages": [{"role": "user", "content": "Which blocks does a server have? " * 40}]}


class StockServer(Server):
    """A server without the connector, which publishes the blocks of `TALK`."""

    def __init__(self, tokenizer: ModelTokenizer = OWN, seed: int = 0) -> None:
        super().__init__(tokenizer)
        self.is_asleep = False
        self.stream = EventStream(0.0)
        self._seed = seed

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if path == "/v1/heterocache/chain":
            raise ValueError("404")
        if path == "/kv_event_sources":
            return {"0": {"endpoint": "tcp://*:5557", "publisher": "zmq"}}
        if path == "/metrics":
            return (
                'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
                'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} '
                f"{float(not self.is_asleep)}\n"
                'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0\n'
            )
        return await super().ask(method, path, body)

    def publish(self, *events: Any, number: int | None = None) -> None:
        stream = self.stream
        payload = msgspec.msgpack.encode([1.0, list(events), 0])
        stream.on_batch(stream.expected if number is None else number, payload, 0.0)

    def blocks(self) -> dict[str, Any]:
        """Return the event for all whole blocks of `TALK`, as the router's tokenizer reads it."""
        identity = PromptIdentity(OWN, ChainCache())
        text = identity.read("/v1/chat/completions", TALK)[0].text
        assert text is not None
        tokens = OWN.tokens(text)
        count = len(tokens) // SIZE
        return {
            "type": "BlockStored",
            "block_hashes": [hash((self._seed, x)) & ((1 << 63) - 1) for x in range(count)],
            "parent_block_hash": None,
            "token_ids": tokens[: count * SIZE],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }


class NoReader:
    """In place of an `EventReader`: the test publishes events itself."""

    def follow(self, server: str, sources: object) -> None:
        pass

    def forget(self, server: str) -> None:
        pass


class Watched:
    """A router's view of one server, which it has asked."""

    def __init__(self, server: Server) -> None:
        self.server = server
        fleet = Fleet(OWN)
        streams = [server.stream] if isinstance(server, StockServer) else []
        for stream in streams:
            stream.on_asked(0.0)
            stream.on_all_repeated(0.0)
        self.views = PrefixViews(
            fleet.views.identity,
            fleet.chains,
            fleet.trust,
            fleet.directory,
            5.0,
            StockWorkers(lambda name: streams),
        )
        fleet.views.close()
        reader: Any = NoReader()
        self._watch = FleetWatch(
            self.views, lambda: {"one": server.ask}, clock=lambda: 0.0, events=reader
        )
        policy = scheduling_policy("ownerserve", Random(0))
        placer = PolicyPlacer(policy, self.views, WorkerFigures())
        self._reports = LoadReports(lambda: {"one": server.ask}, placer.on_report, 1.0)
        self.ask()

    def ask(self) -> None:
        asyncio.run(self._watch.ask_all())
        asyncio.run(self._reports.ask_all())

    def find(self, now_s: float = 1.0) -> tuple[Certainty, tuple[str, ...], int]:
        view = asyncio.run(self.views.find("/v1/chat/completions", TALK, now_s))
        return view.certainty, view.reasons, view.prefixes.get("one", WorkerPrefix()).hbm_tokens


def chat_template(server: StockServer) -> None:
    server.identity = PromptIdentity(OTHER_TEMPLATE, ChainCache())
    server.stream.restarts += 1


def lost_events(server: StockServer) -> None:
    server.publish(server.blocks(), number=7)
    server.stream.on_asked(0.0)
    server.stream.on_unanswered(0.0)


def old_events(server: StockServer) -> None:
    server.publish(["BlockRemoved", [1], "GPU"])


def sleep(server: StockServer) -> None:
    server.is_asleep = True


def nothing(server: StockServer) -> None:
    """Time passes without an answer."""


@pytest.mark.parametrize(
    ("trap", "reason", "now_s"),
    [
        (chat_template, "tokens_differ", 1.0),
        (lost_events, "events_lost", 1.0),
        (old_events, "events_unreadable", 1.0),
        (sleep, "sleeping", 1.0),
        (nothing, "events_silent", 60.0),
    ],
)
def test_a_trap_of_a_stock_server_is_told(
    trap: Callable[[StockServer], None], reason: str, now_s: float
) -> None:
    server = StockServer()
    watched = Watched(server)
    server.publish(server.blocks())
    certainty, reasons, tokens = watched.find()
    assert (certainty, reasons) == (Certainty.EXACT, ())
    assert tokens > 10 * SIZE
    trap(server)
    watched.ask()
    certainty, reasons, _ = watched.find(now_s)
    assert (certainty, reasons) == (Certainty.DEGRADED, (reason,))
    watched.views.close()


def test_a_server_that_wakes_or_leaves_is_asleep_no_more() -> None:
    server = StockServer()
    watched = Watched(server)
    fleet = watched.views.fleet
    sleep(server)
    watched.ask()
    assert fleet.asleep == {"one"}
    server.is_asleep = False
    watched.ask()
    assert not fleet.asleep
    sleep(server)
    watched.ask()
    fleet.forget("one")
    assert not fleet.asleep
    fleet.note_sleep("one", is_asleep=True)
    assert not fleet.asleep, "its last report came after it had left"
    watched.views.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_hash_seeds_do_not_matter_and_a_reset_is_followed(seed: int) -> None:
    server = StockServer(seed=seed)
    watched = Watched(server)
    server.publish(server.blocks())
    assert watched.find()[2] > 10 * SIZE
    server.publish({"type": "AllBlocksCleared"})
    assert watched.find() == (Certainty.EXACT, (), 0)
    watched.views.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "server_silent"),
        ({"is_shared": False}, "reset_alone"),
        ({"engine": {**ANSWER["engine"], "tokenizer": "ab"}}, "tokenizer_differs"),
    ],
)
def test_a_trap_of_a_server_with_the_connector_is_told(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version, a reset of one engine alone, other files of a tokenizer."""
    tokenizer = ModelTokenizer(OWN._encoder, OWN.cuts, b"own", templates=OWN.templates)
    server = Server(OWN)
    plain = server.ask

    async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        answer = await plain(method, path, body)
        if path == "/v1/heterocache/chain":
            answer["engines"] = [{**answer["engines"][0], **told}]
        return answer

    monkeypatch.setattr(server, "ask", ask)
    told: dict[str, Any] = {"engine": {**ANSWER["engine"], "tokenizer": b"own".hex()}}
    fleet = Fleet(tokenizer)
    watch = FleetWatch(fleet.views, lambda: {"one": ask}, clock=lambda: 0.0)
    asyncio.run(watch.ask_all())
    assert fleet.find(TALK, "/v1/chat/completions").certainty is Certainty.EXACT
    told |= change
    asyncio.run(watch.ask_all())
    view = fleet.find(TALK, "/v1/chat/completions", now_s=40.0 if "format" in change else 1.0)
    assert (view.certainty, view.reasons) == (Certainty.DEGRADED, (reason,))
    fleet.views.close()
