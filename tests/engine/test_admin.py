"""Routes and commands at a real server: a request finds what they promise."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.engine.scheduler.session_book import session_name
from hetero_connector.session_ids import session_key
from ownership.directory import MemoryDirectory
from ownership.router.identity import (
    ChainCache,
    ChainNaming,
    PromptChain,
    PromptIdentity,
    open_tokenizer,
)
from ownership.router.view import Checks, FleetChains, PrefixViews, Trust
from tests.engine.harness import CHECKPOINTS, prompt_tokens
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]  # a server start

GUIDES = Path(__file__).parents[2] / "docs/guides"
GUIDE = GUIDES / "admin.md"
MODEL, KEY = "dense", "secret"
LENGTH = 1100
STORED = 1088
"""Tokens of a prompt of that length in full blocks of 32."""
TIERS = {"dram_gib": 0.02, "checkpoints": "full", "planner": "always_load"}


class Admin(NamedTuple):
    server: Server
    ssd_dir: Path

    def post(self, path: str, body: Any = None, key: str | None = KEY) -> Any:
        """Send a request and return the answer. Raises HTTPError."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def order(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Have the server's engine do something; return what it says."""
        (answer,) = self.post(f"/v1/heterocache/{name}", arguments)["engines"]
        return dict(answer)

    def sources(self, seed: int, **request: Any) -> dict[str, int]:
        """Complete a prompt; return its tokens by source, as its report tells."""
        self.server.reset_prefix_cache()
        body = {
            "model": MODEL,
            "prompt": prompt_tokens(LENGTH, seed),
            "max_tokens": 2,
            "kv_transfer_params": {"heterocache": {"report": True}},
            **request,
        }
        answer = self.post("/v1/completions", body)
        report = answer["kv_transfer_params"]["heterocache"]["report"]
        return dict(report["restored_tokens"])

    def sessions(self) -> dict[str, Any]:
        """Return what the engine knows of the sessions that these tests name."""
        (answer,) = self.post("/v1/heterocache/sessions")["engines"]
        by_digest = {x["session"]: x for x in answer["sessions"]}
        names = ("system", "agent-7", "agent-7/search", "short", "low", "normal", "high")
        return {x: by_digest[digest(x)] for x in names if digest(x) in by_digest}

    def run(self, *words: str) -> str:
        """Run `heterocache` for this engine; return what it prints."""
        command = [sys.executable, "-m", "hetero_connector.tools.cli", *words]
        command += ["--engine", str(self.ssd_dir)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    folder = tmp_path_factory.mktemp("admin")
    ssd_dir = folder / "ssd"
    server = Server(
        write_checkpoint(MODEL, CHECKPOINTS),
        folder / "server.log",
        kv_transfer_config({**TIERS, "ssd_dir": str(ssd_dir), "ssd_gib": 1}),
        {"api_key": KEY},
        {"VLLM_PLUGINS": "heterocache"},
    )
    with server:
        yield Admin(server, ssd_dir)


@pytest.fixture(autouse=True)
def emptied(admin: Admin) -> None:
    admin.order("clear", all=True)


def test_the_key_guards_every_route(admin: Admin) -> None:
    admin.sources(1)
    for key in (None, "wrong"):
        for path, body in (("status", None), ("clear", {"all": True})):
            with pytest.raises(urllib.error.HTTPError) as refused:
                admin.post(f"/v1/heterocache/{path}", body, key)
            assert refused.value.code == 401
            refused.value.close()
    assert sum(admin.sources(1).values()) == STORED


def test_what_is_cleared_is_computed(admin: Admin) -> None:
    admin.sources(1)
    admin.sources(1, cache_salt="a")
    admin.sources(1, cache_salt="b")
    assert admin.order("clear", salt="a")["pages"] is True
    assert admin.sources(1, cache_salt="a") == {}
    assert admin.sources(1, cache_salt="b") == {"dram": STORED}
    assert "forgot everything" in admin.run("clear", "--all", "--yes")
    assert admin.sources(1) == admin.sources(1, cache_salt="b") == {}


def test_a_warmed_prompt_is_restored_from_dram(admin: Admin) -> None:
    admin.sources(1)
    write_out(admin)
    push_out(admin)
    assert admin.sources(1) == {"ssd": STORED}
    push_out(admin)
    warmed = admin.order("warm", token_ids=prompt_tokens(LENGTH, 1))
    assert warmed == {"tokens": LENGTH, "stored_tokens": STORED, "dram_tokens": STORED}
    assert admin.sources(1) == {"dram": STORED}


def test_a_pinned_prompt_stays_in_dram(admin: Admin) -> None:
    prompt = prompt_tokens(LENGTH, 1)
    admin.sources(1)
    write_out(admin)
    assert admin.order("pin", token_ids=prompt, seconds=300)["pinned_tokens"] == STORED
    push_out(admin)
    assert admin.sources(1) == {"dram": STORED}
    assert admin.order("unpin", token_ids=prompt)["unpinned_tokens"] == STORED
    push_out(admin)
    assert admin.sources(1) == {"ssd": STORED}


def push_out(admin: Admin) -> None:
    """Store more than DRAM holds."""
    push_out.seed += 100  # type: ignore[attr-defined]
    for seed in range(12):
        admin.sources(push_out.seed + seed)  # type: ignore[attr-defined]
    write_out(admin)


push_out.seed = 1000  # type: ignore[attr-defined]


def write_out(admin: Admin) -> None:
    """Wait until all is on SSD. The end of a prompt is stored a moment after its answer."""
    assert admin.order("drain", wait_s=30)["written"]
    assert admin.order("resume") == {"draining": False}


def test_text_and_messages_are_the_prompts_of_requests(admin: Admin) -> None:
    """The tokens that `warm` makes of text are those of a completion of this text."""
    text = "".join(chr(97 + n % 26) for n in prompt_tokens(LENGTH, 5))
    admin.sources(0, prompt=text)
    found = admin.order("warm", prompt=text)
    assert found["stored_tokens"] == found["dram_tokens"] > 1000
    unknown = admin.order("warm", prompt=text[::-1])
    assert unknown["stored_tokens"] < 64


def test_a_draining_engine_restores_and_stores_nothing(admin: Admin) -> None:
    admin.sources(1)
    assert "all that it stored is on SSD" in admin.run("drain")
    assert admin.sources(2) == admin.sources(2) == {}
    assert admin.sources(1) == {"dram": STORED}
    admin.run("drain", "--resume")
    admin.sources(2)
    assert admin.sources(2) == {"dram": STORED}


def test_a_scrub_reads_all_while_requests_run(admin: Admin) -> None:
    for seed in range(4):
        admin.sources(seed)
    write_out(admin)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(admin.sources, 9)
        admin.run("scrub", "--rate", "100")
        served.result()

    def progress() -> dict[str, Any]:
        (status,) = admin.post("/v1/heterocache/status")["engines"]
        return dict(status["activity"]["scrub"])

    until(lambda: progress()["state"] == "complete", pause_s=0.05)
    assert progress()["damaged"] == 0
    assert progress()["bytes_checked"] > 0


def test_status_and_top_while_it_serves(admin: Admin) -> None:
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(admin.sources, 9, max_tokens=200)
        (status,) = admin.post("/v1/heterocache/status")["engines"]
        shown = admin.run("top", "--once", "--interval", "0.5")
        served.result()
    assert status["engine"]["config"]["ssd_dir"] == str(admin.ssd_dir)
    assert "healthy" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_guides_requests_are_answered(admin: Admin) -> None:
    admin.sources(1, kv_transfer_params={"session_id": "agent-7", **REPORT})
    lines = re.findall(r"^curl .*", GUIDE.read_text(), re.MULTILINE)
    assert len(lines) >= 6
    for line in sorted(lines, key=lambda line: "/clear" in line):
        words = [x.replace("localhost:8000", admin.server.url) for x in shlex.split(line)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout)
        assert "error" not in answer, f"{line}: {done.stdout}"
        assert len(answer["engines"]) == 1


def test_the_requests_of_the_guide_do_what_it_says(admin: Admin) -> None:
    guide = (GUIDES / "requests.md").read_text()
    lines = re.findall(r"^curl .*", guide, re.MULTILINE)
    assert len(lines) == 4
    prompt = "You are a helpful agent. "
    answers = []
    for line in lines:
        long = line.replace(prompt, prompt * 40).replace('"MODEL"', f'"{MODEL}"')
        words = [x.replace("localhost:8000", admin.server.url) for x in shlex.split(long)]
        done = subprocess.run(
            [*words, "-H", f"Authorization: Bearer {KEY}"],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        answers.append(json.loads(done.stdout))
        assert answers[-1]["choices"], done.stdout
        admin.server.reset_prefix_cache()
    report = answers[2]["kv_transfer_params"]["heterocache"]["report"]
    assert report["restored_tokens"] == {"dram": 992}, "1000 characters, a token each"
    assert admin.sessions().keys() == {"system", "agent-7/search"}, "the other one has ended"
    assert admin.sessions()["agent-7/search"]["parent"] == digest("agent-7")
    push_out(admin)
    text = prompt * 40 + "and more"
    assert admin.sources(0, prompt=text) == {"dram": 992}, "the system prompt is pinned"


def test_what_lives_for_a_second_is_forgotten_in_every_tier(admin: Admin) -> None:
    admin.sources(1)
    admin.sources(2, session_id="short", **params(ttl_s=1))

    def is_gone() -> bool:
        session = admin.sessions()["short"]
        return not sum(session["chunks_by_tier"].values())

    until(is_gone, pause_s=0.05)
    assert admin.sources(2) == {}
    assert admin.sources(1) == {"dram": STORED}


def test_what_has_low_priority_leaves_first(admin: Admin) -> None:
    for number, priority in enumerate(("high", "normal", "low")):
        admin.sources(number, session_id=priority, **params(priority=priority))
    write_out(admin)

    def chunks_in_dram(session: str) -> int:
        return int(admin.sessions()[session]["chunks_by_tier"]["dram"])

    assert chunks_in_dram("high") == chunks_in_dram("normal") == chunks_in_dram("low") > 0
    seed = 50
    while chunks_in_dram("low"):
        admin.sources(seed)
        seed += 1
        assert seed < 100
    assert chunks_in_dram("high") == chunks_in_dram("normal") > 0


def params(**ours: Any) -> dict[str, Any]:
    """Return the fields of a request with these parameters, and with a report."""
    return {"kv_transfer_params": {"heterocache": {"report": True, **ours}}}


def digest(session: str) -> str:
    return session_name(session_key(None, session))


REPORT = {"heterocache": {"report": True}}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LONG = "Names and figures: 12, 345, naïve 文本. " * 20
TALK = [
    {"role": "system", "content": "Be brief. " * 20},
    {"role": "user", "content": [{"type": "text", "text": LONG}]},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "Go on"},
]


def test_a_router_names_chains_as_the_engine_does(admin: Admin) -> None:
    """The engine's own report of each request has the key that the router has made."""
    asyncio.run(_compare_chains(admin))


async def _compare_chains(admin: Admin) -> None:
    async def ask(method: str, path: str, body: Any) -> Any:
        return admin.post(path, body)

    tokenizer = open_tokenizer(str(write_checkpoint(MODEL, CHECKPOINTS)))
    fleet, trust = FleetChains(), Trust()
    views = PrefixViews(PromptIdentity(tokenizer, ChainCache()), fleet, trust, MemoryDirectory())
    checks = Checks(views)
    await checks.refresh("server", ask, 0.0)
    assert await checks.probe("server", ask) == []
    admin.order("clear", salt="cleared")
    await checks.refresh("server", ask, 1.0)
    chat, messages = "/v1/chat/completions", "/v1/messages"
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG * 2, "cache_salt": "salt"}),
        ("/v1/completions", {"prompt": LONG, "cache_salt": "cleared"}),
        ("/v1/completions", {"prompt": prompt_tokens(LENGTH, 7)}),
        (chat, {"messages": TALK}),
        (chat, {"messages": TALK, "tools": [TOOL], "tool_choice": "none", "cache_salt": "salt"}),
        (messages, {"system": LONG, "messages": TALK[3:]}),
    ]
    for path, request in requests:
        body = {"model": MODEL, "max_tokens": 1, **request}
        view = await views.find(path, body, 2.0)
        assert view.prompt_tokens > 512
        expected = {"unchecked", "reset_alone", "not_in_directory", "not_translated"}
        assert expected.issuperset(view.reasons)
        answer = await ask("POST", path, body)
        for broken in (True, False):
            seen = view if not broken else replace(view, chains=_changed(view.chains))
            found = await checks.sample("server", ask, seen, answer["id"])
            assert found == ("keys_differ" if broken else None), body
        trust.forget("server")
    for _ in range(2):  # a reset gives chains another root, which is published
        admin.order("clear", all=True)
        answer = await ask("POST", path, body)
        assert await checks.sample("server", ask, view, answer["id"]) == "keys_differ"
        await checks.refresh("server", ask, 3.0)
        view = await views.find(path, body, 3.0)
        assert "reset_alone" in view.reasons
        assert await checks.sample("server", ask, view, answer["id"]) is None
    views.close()


def _changed(chains: Mapping[ChainNaming, PromptChain]) -> dict[ChainNaming, PromptChain]:
    """Return the chains with other keys."""
    return {n: replace(c, keys=[ChunkKey(k[::-1]) for k in c.keys]) for n, c in chains.items()}
