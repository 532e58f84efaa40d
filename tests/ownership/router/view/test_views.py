"""A request's view of the fleet, and what makes it less than exact."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.session_ids import model_digest, tenant_of
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Directory, Worker, WorkerState
from ownership.directory.breaker import FIRST_PAUSE_S, CircuitBreaker
from ownership.directory.memory import MemoryDirectory
from ownership.router.identity import (
    ChainCache,
    ChainNaming,
    ModelTokenizer,
    Prompt,
    PromptIdentity,
)
from ownership.router.identity.prompts import NamedPrompt
from ownership.router.view import (
    Certainty,
    Checks,
    FleetChains,
    FleetWatch,
    PrefixViews,
    PromptView,
    PublishedChain,
    Trust,
)
from ownership.router.view.checks import PROBES
from ownership.router.view.trust import Kind
from ownership.scheduling.step import WorkerPrefix
from tests.ownership.router.identity.tokenizers_of_kinds import model_tokenizer
from tests.planner.chains import DENSE, HYBRID
from tests.waiting import until

SIZE = 64
TEXT = "What is stored of a prompt is found again by all servers. " * 40
ANSWER: Mapping[str, Any] = {
    "format": 1,
    "engine": {"worker": "a", "model": "m", "served_as": "served", "tokenizer": ""},
    "root": "ab" * 16,
    "chunk_tokens": SIZE,
    "is_shared": True,
    "clearings": {tenant_of("cleared").hex(): 2, model_digest("").hex(): 3},
    "adapters": {"lora": "cd" * 32},
    "model_spec": DENSE.as_plain(),
}
PUBLISHED = PublishedChain.of(ANSWER)


class SlowDirectory:
    """A directory whose lookups wait, or fail."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.asked = 0

    def lookup(self, chain: Any) -> Any:
        self.asked += 1
        self.may_answer.wait(60.0)
        if self.error is not None:
            raise self.error
        return self.directory.lookup(chain)


class Fleet:
    """A view of servers that were checked, and a directory to fill."""

    def __init__(self, tokenizer: ModelTokenizer | None = None) -> None:
        self.memory = MemoryDirectory(lambda: 1_000.0)
        self.directory: Any = SlowDirectory(self.memory)
        self.chains, self.trust = FleetChains(), Trust()
        identity = PromptIdentity(tokenizer or model_tokenizer("llama3"), ChainCache())
        self.views = PrefixViews(identity, self.chains, self.trust, self.directory, 0.5)
        self.epochs = {name: self.memory.register(Worker(name), 60.0).epoch for name in "ab"}

    def add(self, server: str, published: PublishedChain = PUBLISHED) -> None:
        self.chains.told(server, [published], 0.0)
        for kind in Kind:
            self.trust.compare_tokens(server, kind, [1], [1])

    def find(self, body: object, path: str = "/v1/completions", now_s: float = 1.0) -> PromptView:
        return asyncio.run(self.views.find(path, body, now_s))

    def store(self, worker: str, view: PromptView, chunks: int, *, on_ssd: bool = False) -> None:
        [chain] = view.chains.values()
        copy = Copy(10, bytes(16), on_ssd=True) if on_ssd else Copy(10, bytes(16), 0)
        claims = [Claim(ArtifactId(key, StateType.DENSE_KV), copy) for key in chain.keys[:chunks]]
        self.memory.claim_owner(self.epochs[worker], claims)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.directory.may_answer.set()
    made.views.close()


def test_what_a_server_has_is_found_exactly(fleet: Fleet) -> None:
    fleet.add("http://one")
    fleet.add("http://two", replace(PUBLISHED, worker="b"))
    view = fleet.find({"prompt": TEXT})
    assert (view.certainty, view.reasons, view.prefixes) == (Certainty.EXACT, (), {})
    fleet.store("a", view, 3)
    fleet.store("b", view, 0)
    longer = fleet.find({"prompt": TEXT + "and more"})
    assert longer.prefixes == {"http://one": WorkerPrefix(0, 3 * SIZE, 3 * SIZE)}
    assert longer.prompt_tokens > view.prompt_tokens > 3 * SIZE
    assert fleet.find({"prompt": "W" + TEXT}).prefixes == {}


def test_state_on_ssd_and_a_missing_window_do_not_count_as_dram() -> None:
    fleet = Fleet()
    fleet.add("http://one")
    view = fleet.find({"prompt": TEXT})
    fleet.store("a", view, 2, on_ssd=True)
    assert fleet.find({"prompt": TEXT}).prefixes["http://one"] == WorkerPrefix(0, 0, 2 * SIZE)
    fleet.add("http://one", replace(PUBLISHED, model=HYBRID))
    assert fleet.find({"prompt": TEXT}).prefixes == {}
    fleet.views.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_shared": False}, "reset_alone"),
        ({"root": bytes(16)}, "mixed"),
        ({"chunk_tokens": 128}, "mixed"),
        ({"tokenizer": b"other"}, "tokenizer_differs"),
    ],
)
def test_a_server_that_differs_makes_it_degraded(change: dict[str, Any], reason: str) -> None:
    tokenizer = model_tokenizer("llama3")
    own = ModelTokenizer(tokenizer._encoder, tokenizer.cuts, b"own")
    fleet = Fleet(own)
    published = replace(PUBLISHED, tokenizer=b"own")
    fleet.add("http://one", published)
    assert fleet.find({"prompt": TEXT}).certainty is Certainty.EXACT
    fleet.add("http://two", replace(published, worker="b", **change))
    view = fleet.find({"prompt": TEXT})
    assert (view.certainty, view.reasons) == (Certainty.DEGRADED, (reason,))
    fleet.chains.forget("http://two")
    assert fleet.find({"prompt": TEXT}).certainty is Certainty.EXACT
    fleet.views.close()


def test_silence_is_noticed(fleet: Fleet) -> None:
    fleet.add("http://one")
    assert fleet.find({"prompt": TEXT}, now_s=29.0).reasons == ()
    assert fleet.find({"prompt": TEXT}, now_s=31.0).reasons == ("server_silent",)


def test_prompts_that_take_long_to_name_hold_up_no_other(fleet: Fleet) -> None:
    wait, end = threading.Event(), threading.Event()

    class Slow(PromptIdentity):
        def read(self, path: str, body: object) -> list[Prompt]:
            wait.set()
            end.wait()
            return super().read(path, body)

    slow = Slow(fleet.views.identity.tokenizer, ChainCache())
    views = PrefixViews(slow, fleet.chains, fleet.trust, fleet.directory, naming_s=0.05)

    async def find_all() -> set[tuple[Certainty, tuple[str, ...]]]:
        found = await asyncio.gather(
            *(views.find("/v1/completions", {"prompt": [1]}, 1.0) for _ in range(9))
        )
        return {(view.certainty, view.reasons) for view in found}

    try:
        assert asyncio.run(find_all()) == {(Certainty.BLIND, ("prompt_late",))}
        assert wait.is_set()
    finally:
        end.set()
        views.close()


def test_prompts_that_nobody_waits_for_any_more_are_not_named(fleet: Fleet) -> None:
    """Else a burst would leave work behind that makes all later prompts late."""
    begun, end = list[object](), threading.Event()

    class Slow(PromptIdentity):
        def read(self, path: str, body: object) -> list[Prompt]:
            begun.append(body)
            end.wait()
            return super().read(path, body)

    slow = Slow(fleet.views.identity.tokenizer, ChainCache())
    views = PrefixViews(slow, fleet.chains, fleet.trust, fleet.directory, naming_s=0.05)

    async def burst() -> None:
        asked = [
            asyncio.ensure_future(views.find("/v1/completions", {"prompt": [n]}, 1.0))
            for n in range(40)
        ]
        await asyncio.sleep(0.01)
        until(lambda: begun)
        asked[-1].cancel()  # its client has left
        await asyncio.gather(*asked, return_exceptions=True)

    try:
        asyncio.run(burst())
        end.set()
    finally:
        views._threads.shutdown(wait=True)
        views.close()
    assert 1 <= len(begun) < 10, "no more than there are threads"


def test_a_prompt_is_named_no_longer_than_it_is_waited_for(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add("http://one")
    left_s = list[float]()

    class Late(PromptIdentity):
        def name(
            self, prompt: Prompt, naming: ChainNaming, until_s: float = math.inf
        ) -> NamedPrompt:
            left_s.append(until_s - time.monotonic())
            raise TimeoutError

    late = Late(fleet.views.identity.tokenizer, ChainCache())
    views = PrefixViews(late, fleet.chains, fleet.trust, fleet.directory, naming_s=60.0)
    view = asyncio.run(views.find("/v1/completions", {"prompt": TEXT}, 1.0))
    views.close()
    assert (view.certainty, view.reasons) == (Certainty.BLIND, ("prompt_late",))
    assert [x <= 60.0 for x in left_s] == [True]
    assert not caplog.records


def test_a_prompt_that_cannot_be_named_by_a_bug_is_served(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add("http://one")
    fleet.views.identity.read = lambda path, body: [][0]  # type: ignore[method-assign]
    view = fleet.find({"prompt": TEXT})
    assert (view.certainty, view.reasons) == (Certainty.BLIND, ("no_prompt",))
    assert "a prompt could not be named" in caplog.text


def test_the_length_of_a_prompt_is_guessed_after_its_first_image(fleet: Fleet) -> None:
    fleet.add("http://one")
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    text = {"type": "text", "text": TEXT}
    talk = [{"role": "user", "content": TEXT}, {"role": "user", "content": [image, text]}]
    view = fleet.find({"messages": talk}, "/v1/chat/completions")
    [chain] = view.chains.values()
    assert "media" in view.reasons
    assert 0.9 * len(TEXT) / 4 < view.prompt_tokens - chain.num_tokens < 1.1 * len(TEXT) / 4


def test_the_other_prompts_of_a_request_count_as_tokens_that_no_server_has(fleet: Fleet) -> None:
    fleet.add("http://one")
    fleet.store("a", fleet.find({"prompt": TEXT}), 3)
    alone, more = (fleet.find({"prompt": x}) for x in (TEXT, [[1] * 400, TEXT, "four" * 100]))
    assert more.prompt_tokens == alone.prompt_tokens + 500
    assert (alone.other_tokens, more.other_tokens) == (0, 500)
    assert more.prefixes == alone.prefixes


@pytest.mark.parametrize("tools", [5, True, "f", {"type": "function"}])
def test_tools_that_are_no_list_are_not_translated(fleet: Fleet, tools: object) -> None:
    fleet.add("http://one")
    body = {"model": "served", "input": "Hi", "tools": tools}
    assert "not_translated" in fleet.find(body, path="/v1/responses").reasons


def test_short_prompts_leave_the_directory_s_trial_to_others(fleet: Fleet) -> None:
    now_s = 100.0
    fleet.views._breaker = CircuitBreaker(lambda: now_s)
    fleet.add("http://one")
    fleet.directory.error = DirectoryUnavailableError("gone")
    assert fleet.find({"prompt": TEXT}).reasons == ("directory_failed",)
    fleet.directory.error = None
    now_s += 3600.0
    for _ in range(3):
        assert fleet.find({"prompt": [1, 2, 3]}).reasons == ()
    assert fleet.find({"prompt": TEXT}).reasons == ()


def test_nothing_is_known_without_servers_or_prompts(fleet: Fleet) -> None:
    assert fleet.find({"prompt": TEXT}).reasons == ("no_chains",)
    assert fleet.find({"prompt": TEXT}).certainty is Certainty.BLIND
    fleet.add("http://one")
    for path, body in [("/v1/embeddings", {"input": "x"}), ("/v1/models", None)]:
        view = fleet.find(body, path)
        assert (view.certainty, view.reasons) == (Certainty.BLIND, ("no_prompt",))
    for body in [
        None,
        [],
        {"prompt": 5},
        {"prompt": []},
        {"prompt": [["a"]]},
        {"prompt": "\ud800"},
    ]:
        view = fleet.find(body)
        assert (view.certainty, view.reasons) == (Certainty.BLIND, ("body",))


def test_a_server_is_degraded_until_its_answers_agree_and_after_they_differ(fleet: Fleet) -> None:
    fleet.chains.told("http://one", [PUBLISHED], 0.0)
    assert fleet.find({"prompt": TEXT}).reasons == ("unchecked",)
    assert fleet.find({"prompt": list(range(100))}).reasons == (), "token ids are what they are"
    fleet.trust.compare_tokens("http://one", Kind.TEXT, [1], [1])
    assert fleet.find({"prompt": TEXT}).reasons == ()
    view = fleet.find({"prompt": TEXT})
    [chain] = view.chains.values()
    right = {"prompt_tokens": chain.num_tokens, "chain": [chain.keys[1].hex(), 2 * SIZE]}
    wrong = {**right, "chain": [chain.keys[2].hex(), 2 * SIZE]}
    compare = fleet.trust.compare_report
    assert compare("http://one", Kind.TEXT, chain, right) is None
    assert compare("http://one", Kind.TEXT, chain, wrong) == "keys_differ"
    assert fleet.find({"prompt": TEXT}).reasons == ("keys_differ",)
    assert fleet.find({"prompt": list(range(100))}).reasons == ()
    for _ in range(2):
        compare("http://one", Kind.TEXT, chain, right)
        assert fleet.find({"prompt": TEXT}).reasons == ("keys_differ",)
    compare("http://one", Kind.TEXT, chain, right)
    assert fleet.find({"prompt": TEXT}).reasons == ()
    assert compare("http://one", Kind.TEXT, chain, {**right, "prompt_tokens": 1}) == "tokens_differ"
    assert fleet.find({"prompt": TEXT}).certainty is Certainty.DEGRADED
    assert fleet.find({"prompt": list(range(100))}).reasons == ()
    fleet.trust.forget("http://one")
    assert fleet.find({"prompt": TEXT}).reasons == ("unchecked",)


TALK = {"messages": [{"role": "user", "content": TEXT}]}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "body", "others"),
    [
        ("/v1/completions", {"prompt": TEXT}, [{"prompt": list(range(200))}]),
        (
            "/v1/chat/completions",
            TALK | {"tools": [TOOL]},
            [TALK, TALK | {"kv_transfer_params": {"prompt_token_ids": list(range(200))}}],
        ),
        (
            "/v1/chat/completions",
            {"messages": [*TALK["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
            [TALK],
        ),
    ],
)
def test_prompts_that_become_tokens_otherwise_say_nothing_of_those_that_differ(
    fleet: Fleet, path: str, body: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    server = Server(model_tokenizer("llama3"))
    fleet.add("http://one")
    watch = FleetWatch(fleet.views, lambda: {"http://one": server.ask}, clock=lambda: 0.0)
    asyncio.run(watch.ask_all())
    assert fleet.find(body, path).reasons == ()

    def answered(body: dict[str, Any], *, tokens: int = 0) -> tuple[str, ...]:
        view = fleet.find(body, path)
        [chain] = view.chains.values()
        agreed = {"chain": [chain.keys[-1].hex(), chain.ends[-1]]}
        server.reports["id"] = {"prompt_tokens": chain.num_tokens + tokens, **agreed}
        watch._sampled_s.clear()
        watch.on_answer("http://one", path, view, "id")
        asyncio.run(watch.ask_all())
        return fleet.find(body, path).reasons

    assert answered(body, tokens=1) == ("tokens_differ",)
    for other in others * 3:
        assert answered(other) == ()
    assert fleet.find(body, path).reasons == ("tokens_differ",)
    assert answered(body) == answered(body) == ("tokens_differ",)
    assert answered(body) == ()


def test_a_directory_that_is_late_costs_one_deadline_and_then_a_pause(fleet: Fleet) -> None:
    fleet.add("http://one")
    fleet.directory.may_answer.clear()
    view = fleet.find({"prompt": TEXT})
    assert (view.certainty, view.reasons) == (Certainty.BLIND, ("directory_late",))
    assert view.prompt_tokens > 0
    assert fleet.find({"prompt": TEXT}).reasons == ("directory_late",)
    assert fleet.directory.asked == 1, "it was asked during the pause"


@pytest.mark.parametrize("worker", ["", "elsewhere", "ended"])
def test_what_is_in_another_directory_is_not_known(fleet: Fleet, worker: str) -> None:
    """Else a fleet whose keys differ in `?fleet=` would count as known, with nothing stored."""
    fleet.memory.end_lease(fleet.memory.register(Worker("ended"), 60.0).epoch)
    fleet.add("http://one", replace(PUBLISHED, worker=worker))
    view = fleet.find({"prompt": TEXT})
    assert (view.certainty, view.reasons) == (Certainty.BLIND, ("not_in_directory",))
    assert view.prompt_tokens > 0
    assert fleet.find({"prompt": [1, 2]}).reasons == (), "nothing is stored of a short prompt"
    fleet.add("http://two", replace(PUBLISHED, worker="b"))
    fleet.store("b", view, 3)
    view = fleet.find({"prompt": TEXT}, now_s=1.1)
    assert (view.certainty, view.reasons) == (Certainty.DEGRADED, ("not_in_directory",))
    assert view.prefixes == {"http://two": WorkerPrefix(0, 3 * SIZE, 3 * SIZE)}
    fleet.add("http://one")
    assert fleet.find({"prompt": TEXT}, now_s=1.2).certainty is Certainty.EXACT
    fleet.memory.end_lease(fleet.epochs["a"])
    assert fleet.find({"prompt": TEXT}, now_s=3.0).reasons == ("not_in_directory",)


def test_while_an_engine_is_not_in_the_directory_its_workers_are_not_read_for_each_request(
    fleet: Fleet,
) -> None:
    class Counted(list[WorkerState]):
        reads = 0

        def __iter__(self) -> Iterator[WorkerState]:
            self.reads += 1
            return super().__iter__()

    fleet.add("http://one", replace(PUBLISHED, worker="elsewhere"))
    found = Counted()
    for number in range(16):
        assert not fleet.views._note_listed(fleet.chains.groups(), found, 1.0 + number / 64)
    assert found.reads == 3, "at 1 s and each 0.1 s later"


def test_lookups_that_fail_together_are_one_failure(fleet: Fleet) -> None:
    fleet.add("http://one")
    both = threading.Barrier(2, timeout=60.0)

    class Failing:
        def lookup(self, chain: object) -> None:
            both.wait()
            raise DirectoryUnavailableError("gone")

    directory: Any = Failing()
    fleet.views._directory, fleet.views._deadline_s = directory, 60.0

    async def find() -> list[PromptView]:
        asking = (fleet.views.find("/v1/completions", {"prompt": TEXT}, 1.0) for _ in range(2))
        return await asyncio.gather(*asking)

    for view in asyncio.run(find()):
        assert view.reasons == ("directory_failed",)
    assert fleet.views._breaker._pause_s == FIRST_PAUSE_S


def test_a_lookup_that_is_late_and_then_fails_is_one_failure(fleet: Fleet) -> None:
    fleet.add("http://one")
    fleet.directory.may_answer.clear()
    fleet.directory.error = DirectoryUnavailableError("gone")
    assert fleet.find({"prompt": TEXT}).reasons == ("directory_late",)
    fleet.directory.may_answer.set()
    fleet.views._lookups.shutdown()
    assert fleet.views._breaker._pause_s == FIRST_PAUSE_S


def test_a_lookup_that_fails_when_nobody_waits_for_it_any_more_logs_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """A Redis that has stopped fails each of them, and asyncio logs errors that nobody reads."""
    fleet.add("http://one")
    fleet.directory.may_answer.clear()
    fleet.directory.error = DirectoryUnavailableError("gone")

    async def play() -> None:
        view = await fleet.views.find("/v1/completions", {"prompt": TEXT}, 1.0)
        assert view.reasons == ("directory_late",)
        fleet.directory.may_answer.set()
        fleet.views._lookups.shutdown()
        for _ in range(3):
            await asyncio.sleep(0)  # the loop hears of the answer
        gc.collect()

    asyncio.run(play())
    assert "never retrieved" not in caplog.text


def test_an_error_of_the_directory_is_named(fleet: Fleet) -> None:
    fleet.add("http://one")
    fleet.directory.error = DirectoryUnavailableError("gone")
    assert fleet.find({"prompt": TEXT}).reasons == ("directory_failed",)
    assert fleet.find({"prompt": TEXT}).certainty is Certainty.BLIND


def test_salts_adapters_and_clearings_are_named_as_the_engine_does() -> None:
    fleet = Fleet()
    fleet.add("http://one")
    seen = set()
    for body in [
        {"prompt": TEXT},
        {"prompt": TEXT, "cache_salt": "s"},
        {"prompt": TEXT, "cache_salt": "cleared"},
        {"prompt": TEXT, "model": "lora"},
    ]:
        [naming] = fleet.find(body).chains
        seen.add(naming.identity)
        assert naming.salt_clearings == (2 if body.get("cache_salt") == "cleared" else 0)
        assert naming.model_clearings == (0 if body.get("model") else 3)
    assert len(seen) == 4
    assert fleet.find({"prompt": TEXT, "model": "served"}).chains.keys() == (
        fleet.find({"prompt": TEXT}).chains.keys()
    )
    unknown = fleet.find({"prompt": TEXT, "model": "new"})
    assert (unknown.certainty, unknown.reasons) == (Certainty.BLIND, ("adapter_unknown",))
    fleet.views.close()


def test_an_answer_that_is_none_is_refused() -> None:
    for wrong in [{}, {**ANSWER, "format": 2}, {**ANSWER, "root": 5}, {**ANSWER, "model_spec": {}}]:
        with pytest.raises(ValueError, match=r"format|not an engine's answer"):
            PublishedChain.of(wrong)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/heterocache/chain", {"engines": [5]}),
        ("/v1/heterocache/chain", {"engines": ["error"]}),
        ("/tokenize", "text"),
        ("/v1/heterocache/requests/id", {"reports": ["text"]}),
        ("/v1/heterocache/requests/id", {"reports": 5}),
        ("/v1/heterocache/requests/id", []),
    ],
)
def test_an_odd_answer_stops_no_question_to_other_servers(
    path: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, right = Fleet(), Server(model_tokenizer("llama3"))

    async def odd(method: str, asked: str, body: Mapping[str, Any] | None) -> Any:
        return answer if asked == path else await right.ask(method, asked, body)

    servers = {"http://odd": odd, "http://right": right.ask}
    watch = FleetWatch(fleet.views, lambda: servers, clock=lambda: 0.0)
    talk = {"messages": [{"role": "user", "content": TEXT}]}
    asyncio.run(watch.ask_all())
    watch.on_answer("http://odd", "/v1/messages", fleet.find(talk, "/v1/messages"), "id")
    asyncio.run(watch.ask_all())
    assert fleet.trust.reason("http://right", Kind.TEXT) is None
    assert "the prefixes of worker http://odd are uncertain" in caplog.text
    fleet.views.close()


def test_a_bug_of_the_router_is_no_odd_answer() -> None:
    fleet, server = Fleet(), Server(model_tokenizer("llama3"))
    server.error = AttributeError("a bug")
    watch = FleetWatch(fleet.views, lambda: {"http://one": server.ask}, clock=lambda: 0.0)
    with pytest.raises(AttributeError):
        asyncio.run(watch.ask_all())
    fleet.views.close()


class Server:
    """Answers as a server does, with a tokenizer of its own."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.identity = PromptIdentity(tokenizer, ChainCache())
        self.reports: dict[str, Any] = {}
        self.error: Exception | None = None
        self.pid = 1

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if self.error is not None:
            raise self.error
        if path == "/v1/heterocache/chain":
            answer = {**ANSWER, "engine": {**ANSWER["engine"], "pid": self.pid}}
            return {"engines": [answer, {"error": "gone"}], "count": 2}
        if path == "/v1/models":
            cards = [("served", None), ("alias", None), ("lora", "served"), ("new", "served")]
            return {"data": [{"id": name, "parent": parent} for name, parent in cards]}
        if path.startswith("/v1/heterocache/requests/"):
            if path.rpartition("/")[2] not in self.reports:
                raise ValueError("404")
            return {"reports": [self.reports[path.rpartition("/")[2]]]}
        assert (method, path) == ("POST", "/tokenize")
        kind = "/v1/completions" if body and "prompt" in body else "/v1/chat/completions"
        prompt = self.identity.read(kind, body)[0]
        assert prompt.text is not None
        assert self.identity.tokenizer is not None
        before = self.identity.tokenizer.before if prompt.is_wrapped else []
        return {"tokens": before + self.identity.tokenizer.tokens(prompt.text)}


def test_probes_find_another_tokenizer_and_another_template() -> None:
    own = model_tokenizer("llama3")
    fleet = Fleet(own)
    checks = Checks(fleet.views)
    other_template = ModelTokenizer(
        own._encoder, own.cuts, templates={"default": own.templates["default"] + " "}
    )
    for tokenizer, differences, reason in [
        (own, 0, ()),
        (model_tokenizer("qwen"), len(PROBES), ("tokens_differ",)),
        (other_template, 2, ()),
    ]:
        server = Server(tokenizer)
        asyncio.run(checks.refresh("http://one", server.ask, 0.0))
        fleet.trust.forget("http://one")
        found = asyncio.run(checks.probe("http://one", server.ask))
        assert len(found) == differences
        assert fleet.find({"prompt": TEXT}).reasons == reason
        talk = {"messages": [{"role": "user", "content": TEXT}]}
        told = fleet.find(talk, "/v1/chat/completions").reasons
        assert told == (("tokens_differ",) if differences else ())
        assert fleet.find({**talk, "max_tokens": 5}, "/v1/messages").reasons == ("unchecked",)
    fleet.views.close()


def test_all_names_of_the_model_are_known() -> None:
    fleet, server = Fleet(), Server(model_tokenizer("llama3"))
    asyncio.run(Checks(fleet.views).refresh("http://one", server.ask, 0.0))
    plain = fleet.find({"prompt": TEXT}).chains.keys()
    for name in ("m", "served", "alias"):
        assert fleet.find({"prompt": TEXT, "model": name}).chains.keys() == plain
    assert fleet.find({"prompt": TEXT, "model": "lora"}).chains.keys() != plain
    assert "adapter_unknown" in fleet.find({"prompt": TEXT, "model": "new"}).reasons
    fleet.views.close()


def test_a_sample_compares_with_the_report_of_the_request() -> None:
    fleet, server = Fleet(), Server(model_tokenizer("llama3"))
    checks = Checks(fleet.views)
    asyncio.run(checks.refresh("http://one", server.ask, 0.0))
    talk = {"messages": [{"role": "user", "content": TEXT}], "system": "You are brief."}
    view = fleet.find(talk, "/v1/messages")
    assert view.reasons == ("unchecked",)
    [chain] = view.chains.values()
    server.reports["right"] = {
        "prompt_tokens": chain.num_tokens,
        "chain": [chain.keys[-1].hex(), chain.ends[-1]],
    }
    server.reports["wrong"] = {**server.reports["right"], "chain": ["00" * 16, chain.ends[-1]]}

    def sample(name: str) -> str | None:
        return asyncio.run(checks.sample("http://one", server.ask, view, name))

    assert sample("unknown") is None
    assert fleet.find(talk, "/v1/messages").reasons == ("unchecked",)
    assert sample("right") is None
    assert fleet.find(talk, "/v1/messages").reasons == ()
    assert sample("wrong") == "keys_differ"
    assert fleet.find(talk, "/v1/messages").reasons == ("keys_differ",)
    fleet.views.close()


def test_answers_are_compared_until_they_agree_and_then_once_a_minute() -> None:
    fleet, server, now_s = Fleet(), Server(model_tokenizer("llama3")), 0.0
    watch = FleetWatch(fleet.views, lambda: {"http://one": server.ask}, clock=lambda: now_s)
    talk = {"messages": [{"role": "user", "content": TEXT}]}
    asyncio.run(watch.ask_all())
    view = fleet.find(talk, "/v1/messages", now_s=1.0)
    [chain] = view.chains.values()
    right = {"prompt_tokens": chain.num_tokens, "chain": [chain.keys[-1].hex(), chain.ends[-1]]}
    server.reports |= {"right": right, "wrong": {**right, "prompt_tokens": 1}}

    def reasons_after(answer_id: str, view: PromptView = view) -> tuple[str, ...]:
        watch.on_answer("http://one", "/v1/messages", view, answer_id)
        asyncio.run(watch.ask_all())
        return fleet.find(talk, "/v1/messages", now_s=now_s).reasons

    assert reasons_after("") == ("unchecked",)
    assert reasons_after("unknown") == ("unchecked",)
    partly = replace(view, reasons=("media", "unchecked"))
    assert reasons_after("right", partly) == ("unchecked",), "its report is of another length"
    assert reasons_after("right") == ()
    assert reasons_after("wrong") == (), "one has agreed in this minute"
    now_s = 61.0
    assert reasons_after("wrong") == ("tokens_differ",)
    assert reasons_after("right") == reasons_after("right") == ("tokens_differ",)
    assert reasons_after("right") == (), "three in a row"
    fleet.views.close()


def test_servers_are_probed_when_they_start_and_forgotten_when_they_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, one = Fleet(), Server(model_tokenizer("llama3"))
    servers = {"http://one": one.ask}
    watch = FleetWatch(fleet.views, lambda: servers, clock=lambda: 0.0)

    def reasons(*, now_s: float = 1.0) -> tuple[str, ...]:
        return fleet.find({"prompt": TEXT}, now_s=now_s).reasons

    def ask_all() -> None:
        asyncio.run(watch.ask_all())

    ask_all()
    assert reasons() == ()
    one.identity = PromptIdentity(model_tokenizer("qwen"), ChainCache())
    ask_all()
    assert reasons() == (), "it was probed already"
    one.pid = 2
    ask_all()
    assert reasons() == ("tokens_differ",), "it has started again"
    ask_all()
    assert caplog.text.count("tokens_differ") == 1
    one.error = ValueError("404")
    ask_all()
    assert reasons() == ("tokens_differ",)
    assert reasons(now_s=31.0) == ("server_silent", "tokens_differ")
    servers["http://stock"] = one.ask
    ask_all()
    assert reasons() == ("server_silent", "tokens_differ"), "it may have no connector"
    servers.clear()
    ask_all()
    assert reasons() == ("no_chains",)
    one.error, one.pid = OSError("refused"), 1
    servers["http://one"] = one.ask
    ask_all()
    assert reasons() == ("no_chains", "server_silent")
    one.error, one.identity = None, PromptIdentity(model_tokenizer("llama3"), ChainCache())
    ask_all()
    assert reasons() == ()
    fleet.views.close()
